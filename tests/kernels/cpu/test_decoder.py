from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from asyncllm.kernels.cpu.build import Library
from asyncllm.kernels.cpu.decoder import (
    DecoderKernel,
    DecoderLayerWeights,
    DecoderShape,
    DecoderStep,
    PlainLayer,
    TableLines,
    decoder_reference,
)
from tests.kernels.cpu.test_matrix import make
from tests.layers.test_cpu_product import grouped


@dataclass(frozen=True)
class Case:
    heads: int
    kv_heads: int
    dim: int
    hidden: int
    inner: int
    bits: int
    window: int | None = None
    head_norms: bool = False
    block_size: int = 16


CASES = {
    "smollm2": Case(9, 3, 64, 576, 1536, 4),
    "bytes": Case(4, 2, 64, 128, 192, 8),
    "bfloat16": Case(4, 4, 64, 128, 192, 16),
    "window": Case(9, 3, 64, 192, 256, 4, window=24),
    "head norms": Case(4, 4, 32, 128, 256, 4, head_norms=True, block_size=32),
    "wide heads": Case(8, 2, 128, 256, 512, 4, window=20),
    "small blocks": Case(8, 1, 96, 256, 512, 4, block_size=8),
    "widest heads": Case(2, 1, 256, 64, 96, 4, head_norms=True),
}
LAYERS = 2


class Model:
    """Random layers, a kernel of them, and rows in a cache that holds nothing that may be read."""

    def __init__(
        self, library: Library, case: Case, rows: int, length: int, *, mixed_rows: bool = False
    ) -> None:
        self.case, self.length = case, length
        # rows for 4-bit codes are rounded to fewer bits by AVX2, beside which small faults would not be seen
        bits = 8 if case.bits == 4 and not (library.avx512 or mixed_rows) else case.bits
        generator = torch.Generator().manual_seed(case.dim + case.hidden)
        self.shape = DecoderShape(case.hidden, case.heads, case.kv_heads, case.dim)

        def weights(outputs: int, inputs: int, bias: Tensor | None = None, activation: str | None = None):
            return make(grouped(outputs, inputs, min(bits, 8)), bits, bias, activation)

        def norm(size: int) -> Tensor:
            return (1 + torch.randn(size, generator=generator) / 8).bfloat16()

        self.plain: list[PlainLayer] = []
        layers = []
        for index in range(LAYERS):
            norms = [norm(case.hidden), norm(case.hidden)]
            head_norms = [norm(case.dim) if case.head_norms else None for _ in range(2)]
            bias = torch.randn((case.heads + 2 * case.kv_heads) * case.dim, generator=generator)
            qkv, plain_qkv = weights(len(bias), case.hidden, bias)
            output, plain_output = weights(case.hidden, case.heads * case.dim)
            gate_up, plain_gate_up = weights(2 * case.inner, case.hidden, activation="silu")
            down, plain_down = weights(case.hidden, case.inner)
            layers.append(
                DecoderLayerWeights(*norms, *head_norms, qkv, output, gate_up, down, eps=1e-5, cache=index, group=0)
            )
            self.plain.append(
                PlainLayer(
                    *norms, *head_norms, plain_qkv, bias, plain_output, plain_gate_up, plain_down, case.window, 1e-5
                )
            )
        self.kernel = DecoderKernel(library, self.shape, layers)
        blocks = -(-length // case.block_size)
        size = (rows * blocks + 1, case.block_size, 2, case.kv_heads, case.dim)
        self.caches = [torch.full(size, float("nan"), dtype=torch.bfloat16) for _ in range(LAYERS)]
        self.table = torch.randperm(rows * blocks, generator=generator).view(rows, blocks) + 1
        angles = torch.outer(torch.arange(length).float(), 10000.0 ** -(torch.arange(0, case.dim, 2) / case.dim))
        self.cosine = torch.cat((angles.cos(), angles.cos()), -1).bfloat16()
        self.sine = torch.cat((-angles.sin(), angles.sin()), -1).bfloat16()
        self.inputs = torch.randn(rows, length, case.hidden, generator=generator).bfloat16()

    def run(
        self,
        parts: list[tuple[int, int, int]],
        *,
        reads_new: bool = False,
        alter: Callable[[DecoderStep], DecoderStep] = lambda step: step,
    ) -> Tensor:
        """A step of (row, first position, tokens); those of one token come first."""
        places = [(row, position) for row, start, count in parts for position in range(start, start + count)]
        rows, positions = torch.tensor(places).T.contiguous()
        singles = sum(count == 1 for _, _, count in parts)
        starts = [singles]
        starts += [starts[-1] + sum(c for _, _, c in parts[singles : i + 1]) for i in range(singles, len(parts))]
        residual = self.inputs[rows, positions]
        step = DecoderStep(
            residual=residual,
            cosine=self.cosine[positions],
            sine=self.sine[positions],
            singles=singles,
            span_starts=torch.tensor(starts),
            rows=rows,
            positions=positions,
            tables=[self.table],
            windows=[self.case.window],
            caches=self.caches,
            reads_new=reads_new,
        )
        self.kernel(alter(step))
        return residual

    def expected(self, row: int, length: int, dtype: torch.dtype) -> Tensor:
        def wide(layer: PlainLayer) -> PlainLayer:
            fields = {name: getattr(layer, name) for name in PlainLayer.__slots__}
            return replace(layer, **{k: v.to(dtype) for k, v in fields.items() if isinstance(v, Tensor)})

        tables = self.cosine[:length].to(dtype), self.sine[:length].to(dtype)
        return decoder_reference(
            self.shape, [wide(x) for x in self.plain], self.inputs[row, :length].to(dtype), *tables
        )


def assert_near(model: Model, row: int, found: Tensor, start: int = 0, times: float = 1.0) -> None:
    """From a position on, nearer to float64 than all the same in torch's bfloat16, or so many times as far."""
    exact = model.expected(row, len(found), torch.float64)
    rounded = (model.expected(row, len(found), torch.bfloat16).double() - exact)[start:].abs().mean()
    assert (found.double() - exact)[start:].abs().mean() < times * rounded


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("chunk", [1000, 77, 13])
def test_a_prompt_and_what_follows(library: Library, name: str, chunk: int) -> None:
    prompt, length = 150, 155
    model = Model(library, CASES[name], 3, length)
    found = [model.run([(1, at, min(chunk, prompt - at))]) for at in range(0, prompt, chunk)]
    found += [model.run([(1, at, 1)]) for at in range(prompt, length)]
    assert_near(model, 1, torch.cat(found))


@pytest.mark.parametrize("rows", [1, 3, 16])
def test_rows_of_fewer_bits(library: Library, rows: int) -> None:
    model = Model(library, CASES["smollm2"], rows, 60, mixed_rows=True)
    found = [model.run([(row, 0, 58)]) for row in range(rows)]
    last = [model.run([(row, at, 1) for row in range(rows)]) for at in (58, 59)]
    for row in range(rows):
        assert_near(model, row, torch.cat((found[row], *(each[row, None] for each in last))), times=2.5)


@pytest.mark.parametrize("name", ["window", "wide heads", "smollm2"])
def test_what_follows_alone(library: Library, name: str) -> None:
    """Few tokens do not tell among a prompt's."""
    model = Model(library, CASES[name], 1, 90)
    found = [model.run([(0, 0, 60)]), *(model.run([(0, at, 1)]) for at in range(60, 90))]
    assert_near(model, 0, torch.cat(found), start=60)


def test_many_keys(library: Library) -> None:
    """More than a piece of keys, for chunks and for single tokens."""
    model = Model(library, CASES["bytes"], 1, 700)
    found = [model.run([(0, 0, 300)]), model.run([(0, 300, 390)])]
    found += [model.run([(0, at, 1)]) for at in range(690, 700)]
    assert_near(model, 0, torch.cat(found))


@pytest.mark.parametrize("threads", [1, 3, 5])
@pytest.mark.parametrize("rows", [1, 7, 18])
def test_any_number_of_threads(library: Library, threads: int, rows: int) -> None:
    """What a thread computes is its own share and what it takes of the others'; few things are left out of neither."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for name in ("smollm2", "window"):
            model = Model(library, CASES[name], rows, 40)
            first = [model.run([(row, 0, 39)]) for row in range(rows)]
            last = model.run([(row, 39, 1) for row in range(rows)])
            for row, found in enumerate(first):
                assert_near(model, row, torch.cat((found, last[row, None])))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("rows", [1, 3, 16])
def test_the_same_with_any_number_of_threads(library: Library, rows: int) -> None:
    """To the bit: what a thread takes of the work, and when it joins, changes nothing."""
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            model = Model(library, CASES["smollm2"], rows, 50)
            first = [model.run([(row, 0, 40)]) for row in range(rows)]
            rest = [model.run([(row, at, 1) for row in range(rows)]) for at in range(40, 50)]
            found.append(torch.cat((*first, *rest)))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("name", CASES)
def test_single_tokens_with_many_keys(library: Library, name: str) -> None:
    """More than a piece of keys, and fewer; at the ends of blocks and of pieces, of rows whose tables are full."""
    lengths = [255, 256, 271, 303, 15, 63]
    model = Model(library, CASES[name], len(lengths), 304)
    first = [model.run([(row, 0, length)]) for row, length in enumerate(lengths)]
    last = model.run([(row, length, 1) for row, length in enumerate(lengths)])
    for row, found in enumerate(first):
        assert_near(model, row, torch.cat((found, last[row, None])))
        exact = model.expected(row, len(found) + 1, torch.float64)[-1]
        torch.testing.assert_close(last[row].double(), exact, rtol=0.05, atol=0.08)


@pytest.mark.parametrize("name", ["smollm2", "window", "small blocks"])
def test_rows_beside_each_other(library: Library, name: str) -> None:
    """Single tokens and chunks of other rows in one step, with histories of their own."""
    lengths = [40, 3, 90, 61, 17, 128, 50, 77]
    model = Model(library, CASES[name], len(lengths), 160)
    first = [model.run([(row, 0, length)]) for row, length in enumerate(lengths)]
    parts = [(row, length, 1) for row, length in enumerate(lengths[:5])]
    parts += [(row, lengths[row], count) for row, count in ((5, 20), (6, 33), (7, 2))]
    last = model.run(parts).split([count for _, _, count in parts])
    for row, found in enumerate(first):
        assert_near(model, row, torch.cat((found, last[row])))


@pytest.mark.parametrize(("name", "length"), [("smollm2", 48), ("window", 80), ("wide heads", 176)])
def test_nothing_is_read_behind_a_table(library: Library, name: str, length: int) -> None:
    """A prompt that fills the last row of a table: the number behind it is no block, and would lead anywhere."""
    model = Model(library, CASES[name], 2, length)
    size = model.table.numel()
    model.table = torch.cat((model.table.flatten(), torch.tensor([1 << 40])))[:size].view(2, -1)
    assert_near(model, 1, torch.cat((model.run([(1, 0, length // 2)]), model.run([(1, length // 2, length // 2)]))))


@pytest.mark.parametrize("start", [0, 47], ids=["beside a chunk", "beside a single token"])
def test_keys_that_another_row_writes_in_the_same_step(library: Library, start: int) -> None:
    """A prompt that begins like another finds its blocks in the step that fills them."""
    model = Model(library, CASES["smollm2"], 2, 64)
    model.inputs[1, :48] = model.inputs[0, :48]
    model.table[1, :3] = model.table[0, :3]
    found = [model.run([(0, 0, start)])] if start else []
    last, rest = model.run([(1, 48, 1), (0, start, 48 - start)], reads_new=True).split([1, 48 - start])
    assert_near(model, 1, torch.cat((*found, rest, last)))


def test_caches_may_change_and_are_not_held(library: Library) -> None:
    """A text to be embedded brings a cache of its own, and takes it away."""
    model = Model(library, CASES["smollm2"], 1, 64)
    first = model.caches
    found = [model.run([(0, 0, 30)])]
    model.caches = [torch.full_like(cache, float("nan")) for cache in first]
    other = model.run([(0, 0, 64)])
    passing = [weakref.ref(cache) for cache in model.caches]
    model.caches = first
    assert [reference() for reference in passing] == [None, None]
    assert_near(model, 0, other)
    assert_near(model, 0, torch.cat((*found, model.run([(0, 30, 34)]))))


@pytest.mark.parametrize("broken", [40, 47, 64])
@pytest.mark.parametrize("name", ["smollm2", "window", "wide heads", "small blocks"])
def test_what_is_no_number_reaches_no_token_that_does_not_see_it(library: Library, name: str, broken: int) -> None:
    """Not those before it, in the same chunk or another, nor those that it has left the windows of."""
    case, length = CASES[name], 150
    model = Model(library, case, 1, length)
    clean = model.run([(0, 0, 70)])
    model.inputs[0, broken] = float("nan")
    found = torch.cat((model.run([(0, 0, 70)]), model.run([(0, 70, length - 70)])))
    assert_near(model, 0, found[:broken])
    assert case.window is not None or torch.equal(found[:broken], clean[:broken])
    past = length if case.window is None else broken + LAYERS * (case.window - 1) + 1
    assert found[broken].isnan().all()
    assert not found[past:].isnan().any()
    if past < length:
        model.inputs[0, broken] = 0
        assert_near(model, 0, torch.where(found.isnan(), 0, found), start=past)


def test_a_broken_row_breaks_no_other(library: Library) -> None:
    model = Model(library, CASES["smollm2"], 2, 64)
    model.inputs[1] = float("nan")
    found = model.run([(0, 0, 30), (1, 0, 30)])
    assert found[30:].isnan().all()
    assert_near(model, 0, torch.cat((found[:30], model.run([(0, 30, 1), (1, 30, 1)])[:1])))


def test_lines_of_tables(library: Library) -> None:
    """Embeddings and rotations that the kernel looks up, instead of those that are there; lines that no table has."""
    model = Model(library, CASES["smollm2"], 3, 8)
    parts = [(0, 0, 1), (1, 0, 3), (2, 0, 2)]
    found = model.run(parts)
    chosen = torch.tensor([0, 8, 9, 10, 16, 17])
    embedding, (cosine, sine) = model.inputs.flatten(0, 1), (model.cosine, model.sine)

    def lines(step: DecoderStep) -> DecoderStep:
        looked_up = (
            (embedding, chosen, step.residual),
            (cosine, step.positions, step.cosine),
            (sine, step.positions, step.sine),
        )
        for _, _, out in looked_up:
            out.fill_(torch.nan)
        return replace(step, lines=[TableLines(*each) for each in looked_up])

    assert torch.equal(model.run(parts, alter=lines), found)
    for line in (-1, len(embedding), 1 << 40):
        chosen[4] = line
        with pytest.raises(IndexError, match="not one of its table's"):
            model.run(parts, alter=lines)


@pytest.mark.parametrize("hidden", [48, 300], ids=["a part", "more than a piece"])
@pytest.mark.parametrize("rows", [1, 3], ids=["alone", "beside others"])
def test_keys_that_score_minus_infinity_weigh_nothing(library: Library, rows: int, hidden: int) -> None:
    """Where a whole part or piece of the keys has such scores, as where they are only very small."""
    case, length = CASES["bfloat16"], 2 * hidden + 1
    found = []
    for size in (1e6, 3e38):
        model = Model(library, case, rows, length)
        model.cosine[:], model.sine[:] = 1, 0
        model.inputs[:, -1] = 0  # so that the first layer's queries are the bias
        for row in range(rows):
            model.run([(row, 0, length - 1)])
        bias = model.plain[0].qkv_bias[: case.heads * case.dim]
        for row in range(rows):
            for position in range(hidden):
                block = model.table[row, position // case.block_size]
                keys = model.caches[0][block, position % case.block_size, 0]
                keys.copy_(-size * bias.sign().view(keys.shape))
        found.append(model.run([(row, length - 1, 1) for row in range(rows)]))
    assert found[0].isfinite().all()
    assert torch.equal(*found)
