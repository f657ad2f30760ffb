"""What follows the layers in the same call, logits or draws: as by the head's product and draws alone, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from asyncllm.kernels.cpu.build import Library
from asyncllm.kernels.cpu.decoder import DecoderCall, DecoderKernel, DecoderOutputs, DecoderStep, Draws, HeadWeights
from asyncllm.kernels.cpu.draw import draw_tokens, draw_uniform
from asyncllm.kernels.cpu.matrix import KernelMatrix, kernel_product
from asyncllm.kernels.cpu.team import TeamSize
from tests.kernels.cpu.test_decoder import CASES, Model
from tests.kernels.cpu.test_matrix import make
from tests.layers.test_cpu_product import grouped

VOCABULARY = 1040  # no multiple of a draw's tile
EPS = 1e-5


class Steps:
    """Steps of single tokens at position 20 of rows that all have a history, with outputs."""

    def __init__(self, library: Library, rows: int, bits: int) -> None:
        # teams of one size, on which a product's last bits depend
        self.library, self.rows = replace(library, team=TeamSize(clock=lambda: -1.0)), rows
        self.model = Model(self.library, CASES["bytes"], rows, 64)
        self.model.run([(row, 0, 20) for row in range(rows)])
        hidden = self.model.case.hidden
        self.matrix, _ = make(grouped(VOCABULARY, hidden, min(bits, 8)), bits)
        self.norm = (1 + torch.arange(hidden) / hidden).bfloat16()
        self.model.kernel = self.kernel(self.matrix)
        self.positions = torch.full((rows,), 20)

    def kernel(self, matrix: KernelMatrix) -> DecoderKernel:
        weights = self.model.kernel._weights
        return DecoderKernel(self.library, self.model.shape, weights, HeadWeights(self.norm, matrix, EPS))

    def describe(self, wanted: Tensor | Draws, tokens: Tensor | None = None) -> DecoderStep:
        model, positions = self.model, self.positions
        return DecoderStep(
            residual=model.inputs[:, 20].clone(),
            cosine=model.cosine[positions],
            sine=model.sine[positions],
            singles=self.rows,
            span_starts=torch.tensor([self.rows]),
            rows=torch.arange(self.rows),
            positions=positions,
            tables=[model.table],
            windows=[None],
            caches=model.caches,
            reads_new=False,
            outputs=DecoderOutputs(tokens, wanted),
        )

    def expected(self, residual: Tensor, tokens: Tensor | None) -> Tensor:
        x = residual if tokens is None else residual[tokens]
        return kernel_product(self.library, x, self.matrix, norm=self.norm, eps=EPS, dtype=torch.float32)


def some_draws(rows: int) -> Draws:
    """Every third row is greedy."""
    temperature = torch.tensor([0.0 if row % 3 == 2 else 0.5 + row / rows for row in range(rows)])
    seed = torch.arange(rows) * 77 - 2**62
    return Draws(temperature, seed, torch.arange(rows) % 4, torch.full((rows,), -7, dtype=torch.int32))


def no_logits(rows: int) -> Tensor:
    """For those that the kernel is to write."""
    return torch.full((rows, VOCABULARY), float("nan"))


def expected_tokens(library: Library, logits: Tensor, draws: Draws, positions: Tensor) -> Tensor:
    uniform = draw_uniform(library, draws.seed, positions + 1, draws.choice)
    greedy = draws.temperature == 0
    drawn = draw_tokens(library, logits, draws.temperature + greedy, uniform)
    return torch.where(greedy, torch.from_numpy(logits.numpy().argmax(-1)), drawn).int()


@pytest.mark.parametrize("bits", [4, 8, 16])
@pytest.mark.parametrize("rows", [1, 3, 16, 33])
def test_logits_and_draws(library: Library, rows: int, bits: int) -> None:
    steps = Steps(library, rows, bits)
    draws, logits = some_draws(rows), no_logits(rows)
    step = steps.describe(logits)
    steps.model.kernel(step)
    assert torch.equal(logits, steps.expected(step.residual, None))
    drawing = steps.describe(draws)
    steps.model.kernel(drawing)
    assert torch.equal(drawing.residual, step.residual)
    assert torch.equal(draws.token_ids, expected_tokens(library, logits, draws, steps.positions))


@pytest.mark.parametrize("bits", [4, 16])
@pytest.mark.parametrize("rows", [2, 5, 16, 17, 36, 40])
@pytest.mark.parametrize("vocabulary", [16, 48, 272, 528])
def test_draws_from_any_vocabulary(library: Library, rows: int, bits: int, vocabulary: int) -> None:
    """With as many threads as there may be, from the first to the last token; all logits are close to each other."""
    steps = Steps(library, rows, bits)
    steps.matrix, _ = make(grouped(vocabulary, steps.model.case.hidden, min(bits, 8)), bits)
    steps.model.kernel = steps.kernel(steps.matrix)
    draws, logits = some_draws(rows), torch.empty(rows, vocabulary)
    draws.temperature[draws.temperature > 0] *= 40
    steps.model.kernel(steps.describe(logits))
    expected, before = expected_tokens(library, logits, draws, steps.positions), torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            draws.token_ids.fill_(-7)
            steps.model.kernel(steps.describe(draws))
            assert torch.equal(draws.token_ids, expected)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 3])
def test_some_of_the_tokens_in_any_order(library: Library, threads: int) -> None:
    """And one more than once; positions differ, and are those of the tokens."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        steps = Steps(library, 9, 4)
        tokens, draws = torch.tensor([7, 0, 3, 3, 8]), some_draws(5)
        steps.positions = torch.arange(9) + 12
        logits = no_logits(5)
        step = steps.describe(logits, tokens)
        steps.model.kernel(step)
        assert torch.equal(logits, steps.expected(step.residual, tokens))
        steps.model.kernel(steps.describe(draws, tokens))
        assert torch.equal(draws.token_ids, expected_tokens(library, logits, draws, steps.positions[tokens]))
    finally:
        torch.set_num_threads(before)


def test_no_token_is_wanted(library: Library) -> None:
    """Of a piece of a prompt, say: the layers are computed all the same."""
    steps = Steps(library, 3, 4)
    plain = steps.describe(no_logits(3))
    steps.model.kernel(plain)
    for none in (no_logits(0), some_draws(0)):
        with_none = steps.describe(none, torch.empty(0, dtype=torch.int64))
        steps.model.kernel(with_none)
        assert torch.equal(plain.residual, with_none.residual)


def test_a_call_computes_what_its_tensors_hold(library: Library) -> None:
    """The same step described once and described anew, with other numbers and positions, and other calls between."""
    steps = Steps(library, 5, 4)
    draws = some_draws(5)
    step = steps.describe(draws)
    call = DecoderCall(steps.model.kernel, step)
    call()
    steps.model.run([(2, 25, 30)])  # of more tokens, which need more memory
    steps.positions += 1
    steps.positions[3] = 60  # and so do more keys
    for to, table in ((step.cosine, steps.model.cosine), (step.sine, steps.model.sine)):
        to.copy_(table[steps.positions])
    step.residual.copy_(steps.model.inputs[:, 33])
    for row in range(5):
        steps.model.run([(row, 21, 40)])
    call()
    others = some_draws(5)
    anew = steps.describe(others)
    anew.residual.copy_(steps.model.inputs[:, 33])
    steps.model.kernel(anew)
    assert torch.equal(step.residual, anew.residual)
    assert torch.equal(draws.token_ids, others.token_ids)


def draws_of(library: Library, alter: Callable[[Tensor], object]) -> list[int]:
    """What two greedy rows and two drawn ones take where the logits are these: a head of zeros leaves them its bias."""
    steps = Steps(library, 4, 16)
    bias = torch.zeros(VOCABULARY)
    alter(bias)
    matrix, _ = make(grouped(VOCABULARY, steps.model.case.hidden, 8), 16, bias)
    matrix.blocks.zero_()
    steps.matrix, steps.model.kernel = matrix, steps.kernel(matrix)
    draws = some_draws(4)
    draws.temperature[:2], draws.temperature[2:] = 0.0, 1.0
    logits = no_logits(4)
    steps.model.kernel(steps.describe(logits))
    assert torch.equal(logits[0].nan_to_num(), bias.nan_to_num())
    steps.model.kernel(steps.describe(draws))
    return draws.token_ids.tolist()


@pytest.mark.parametrize("place", [0, 15, 16, 700, VOCABULARY - 1])
def test_the_first_of_the_largest(library: Library, place: int) -> None:
    def alter(bias: Tensor) -> None:
        bias[:] = -3e38
        bias[place] = 2.0
        bias[min(place + 16, VOCABULARY - 1)] = 2.0
        bias[min(place + 5, VOCABULARY - 1)] = 2.0

    assert draws_of(library, alter)[:2] == [place, place]
    assert draws_of(library, lambda bias: bias.fill_(0.0))[:2] == [0, 0]
    assert draws_of(library, lambda bias: bias[1:].fill_(-0.0).sub_(0.0))[:2] == [0, 0]


@pytest.mark.parametrize("place", [0, 517, VOCABULARY - 1])
def test_what_is_no_number(library: Library, place: int) -> None:
    assert draws_of(library, lambda bias: bias[place].fill_(torch.nan)) == [-1] * 4
    assert draws_of(library, lambda bias: bias.fill_(-torch.inf)) == [-1] * 4
    assert draws_of(library, lambda bias: bias[place].fill_(torch.inf)) == [place, place, -1, -1]

    def alter(bias: Tensor) -> None:
        bias.fill_(-torch.inf)
        bias[place] = -3.0

    assert draws_of(library, alter) == [place] * 4
