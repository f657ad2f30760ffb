"""The steps of the GPU runner on CPU tensors, under Triton's interpreter: every step gives what the CPU runner gives.

What needs a GPU (stream, memory, graphs, events) is left out here, and tested in `tests/gpu`.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncllm.config import EngineConfig
from asyncllm.engine.execution.cuda_executor import CudaExecutor, read_late, read_result
from asyncllm.engine.execution.device_adjustments import SamplerUse
from asyncllm.engine.execution.device_rows import DeviceRows, RowSizes
from asyncllm.engine.execution.device_thread import DeviceThread
from asyncllm.engine.execution.first_steps import FirstSteps, first_plans
from asyncllm.engine.execution.graph_sizes import first_graph_sizes, graph_sizes, padding_before_capture
from asyncllm.engine.execution.kv_cache import allocate_device_cache, make_cache_layout
from asyncllm.engine.execution.step_program import StepProgram
from asyncllm.engine.execution.step_ring import StepRing
from asyncllm.engine.plan import (
    Fork,
    LateSamples,
    LateTokens,
    LogprobsRequest,
    RowBias,
    RowJoin,
    RowLogits,
    StepLogprobs,
    StepPlan,
    StepResult,
    TokenScores,
)
from asyncllm.kernels.language import TRITON_AVAILABLE
from asyncllm.kernels.step_layout import StepWords
from asyncllm.layers.parameter import Placement
from asyncllm.models.checkpoint import load_weights
from asyncllm.models.registry import find_architecture, read_model_config
from asyncllm.testing.tiny_models import write_tiny_model
from asyncllm.weights.source import resolve_source
from asyncllm.weights.tensors import iterate_tensors
from tests.engine.execution.plan_driver import GREEDY, Piece, PlanDriver, seeded
from tests.engine.execution.short_prefixes import share_short_prefixes

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ROWS, TOKENS, LENGTH, BLOCKS = 8, 24, 64, 64


def test_graph_sizes() -> None:
    assert graph_sizes(8192)[-1] == 8192
    assert graph_sizes(100)[-3:] == [80, 96, 100]
    assert graph_sizes(1) == [1]
    assert graph_sizes(20_000)[-1] == 8192
    for sizes in map(graph_sizes, (8192, 777)):
        assert sizes == sorted(set(sizes))
        assert all(b - a <= a / 8 for a, b in pairwise(sizes) if a >= 256)
    assert first_graph_sizes(300, chunks=True) == [300, 256, 128, 64, 32, 16]
    assert first_graph_sizes(6, chunks=False) == [6, 4, 2, 1]
    assert set(first_graph_sizes(5000, chunks=True)) <= set(graph_sizes(5000))


def test_a_graph_is_worth_more_steps_of_a_smaller_model() -> None:
    assert padding_before_capture(16_060_000_000) == 4381
    assert padding_before_capture(1_190_000_000) == 59133
    assert padding_before_capture(1 << 60) == 1


def run_interpreted(marks: str, file: str = __file__) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", marks, file, "-p", "no:cacheprovider"]
    # as on a GPU, operations on infinities that a mask throws away again are no fault
    command += ["-W", "ignore::RuntimeWarning"]
    result = subprocess.run(
        command,
        cwd=Path(__file__).parents[3],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-10_000:] + result.stderr[-2_000:]


if TRITON_AVAILABLE and not INTERPRETED:

    def test_steps_under_the_interpreter() -> None:
        run_interpreted("not full")

    @pytest.mark.full
    def test_steps_of_more_models_under_the_interpreter() -> None:
        run_interpreted("full")


class HostSpace:
    """Stands for a `CudaSpace` where there is no GPU. It has no graphs, so every step is launched by hand."""

    device = torch.device("cpu")

    class stream:
        @staticmethod
        def synchronize() -> None:
            pass

    @contextmanager
    def entered(self) -> Iterator[None]:
        with torch.inference_mode():
            yield

    lasting = entered

    def close(self) -> None:
        pass

    @contextmanager
    def capture(self) -> Iterator[Any]:
        raise RuntimeError("there are no graphs on the CPU")
        yield


def check_scores(mine: TokenScores, theirs: TokenScores) -> None:
    """The same, but where rounding can decide which of two ids is the more likely."""
    np.testing.assert_array_equal(mine.offsets, theirs.offsets)
    np.testing.assert_allclose(mine.logprobs, theirs.logprobs, atol=1e-4)
    for start, end in itertools.pairwise(mine.offsets.tolist()):
        one, other = (
            dict(zip(each.token_ids[start:end].tolist(), each.logprobs[start:end].tolist(), strict=True))
            for each in (mine, theirs)
        )
        assert one.keys() == other.keys()
        values = np.sort([*other.values()])
        for place in range(start, end):
            token = int(theirs.token_ids[place])
            close = np.count_nonzero(np.abs(values - other[token]) < 1e-5) > 1
            same = mine.token_ids[place] == token and mine.ranks[place] == theirs.ranks[place]
            assert same or (close and abs(one[token] - other[token]) < 1e-5)


def check_told(mine: StepLogprobs | None, theirs: StepLogprobs | None) -> None:
    assert (mine is None) == (theirs is None)
    if mine is not None and theirs is not None:
        assert mine.samples.tolist() == theirs.samples.tolist()
        check_scores(mine.sampled, theirs.sampled)
        for one, other in zip(mine.prompts, theirs.prompts, strict=True):
            assert (one.chunk, one.start) == (other.chunk, other.start)
            check_scores(one.scores, other.scores)


class Twins:
    """The CPU runner and the GPU's executor, which are given the same plans."""

    def __init__(self, path: Path, driver: PlanDriver, edits: int) -> None:
        self.driver = driver
        source = resolve_source(str(path), EngineConfig())
        config = read_model_config(source.config)
        layout = make_cache_layout(config.windows, config.num_kv_heads, config.head_dim, driver.facts.block_size)
        with torch.inference_mode():
            placement = Placement(torch.float32, torch.device("cpu"), kernels=True)
            model = find_architecture(source.config).model(config, layout.layers, LENGTH, placement)
            load_weights(model, iterate_tensors(source))
            cache = allocate_device_cache(layout, BLOCKS, torch.float32, torch.device("cpu"))
            ring = self.ring = StepRing(StepWords(ROWS, edits, TOKENS), 4, torch.device("cpu"))
            device = torch.device("cpu")
            blocks = -(-LENGTH // layout.block_size)
            sizes = RowSizes(ROWS, len(layout.groups), blocks, config.vocab_size, LENGTH, 4, torch.float32)
            rows = DeviceRows(sizes, device)
            program = StepProgram(model, layout, cache, rows, ring)
        space: Any = HostSpace()
        self.executor = CudaExecutor(space, program, rows, ring, cache)
        self.turn = 0

    def launch(self, plan: StepPlan) -> StepResult:
        launched = self.executor.enqueue(plan, self.turn)
        self.executor.capture()
        result = read_result(plan, launched, self.ring, self.turn)
        self.late: LateTokens | None = None
        if plan.late is not None:
            self.late = read_late(plan, launched, self.ring, self.turn)
        self.turn = (self.turn + 1) % 4
        return result

    def shared_units(self) -> int:
        """Of the last step, in the layers without a window."""
        plan = self.executor._program._plans[None]
        return int(plan.small_units[: int(plan.totals[0]), 15].sum())

    async def run(self, copies: Any = None, **parts: Any) -> list[int]:
        plan = self.driver.plan(**parts)
        if copies is not None:
            plan = replace(plan, copies=copies)
        return await self.run_plan(plan)

    async def run_plan(self, plan: StepPlan) -> list[int]:
        """The late tokens, then the step's own."""
        ticket, actual = self.driver.runner.launch(plan), self.launch(plan)
        expected, tokens = await ticket.result, []
        if ticket.late is not None:
            late = await ticket.late
            assert self.late is not None
            tokens = late.token_ids.tolist()
            assert self.late.token_ids.tolist() == tokens
            check_told(self.late.logprobs, late.logprobs)
        assert actual.token_ids.tolist() == expected.token_ids.tolist()
        check_told(actual.logprobs, expected.logprobs)
        assert (actual.logits is None) == (expected.logits is None)
        if actual.logits is not None and expected.logits is not None:
            np.testing.assert_allclose(actual.logits, expected.logits, atol=1e-4)
        return tokens + actual.token_ids.tolist()


SMALL = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "num_hidden_layers": 1,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "qwen3": {"model_type": "qwen3", "head_dim": 24, "tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh"},
    "windows": {
        "model_type": "qwen2",
        "num_hidden_layers": 3,
        "use_sliding_window": True,
        "sliding_window": 7,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    },
    "dynamic rope": {
        "max_position_embeddings": 16,
        "rope_scaling": {"rope_type": "dynamic", "factor": 4.0},
    },
    "long rope": {
        "rope_scaling": {
            "rope_type": "longrope",
            "short_factor": [1.0] * 8,
            "long_factor": [4.0] * 8,
            "original_max_position_embeddings": 14,
        },
    },
}

if INTERPRETED:
    QUICK = ["windows"]

    @pytest.fixture(
        params=[pytest.param(name, marks=[] if name in QUICK else pytest.mark.full) for name in MODELS],
    )
    async def twins(
        request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> AsyncIterator[Twins]:
        share_short_prefixes(monkeypatch)
        path = write_tiny_model(tmp_path, config={**SMALL, **MODELS[request.param]})
        config = {"max_model_len": LENGTH, "max_batched_tokens": TOKENS, "num_blocks": BLOCKS, "block_size": 8}
        async with await PlanDriver.load(path, device="cpu", dtype="float32", **config) as driver:
            yield Twins(path, driver, edits=4)

    @pytest.mark.blocks_loop
    async def test_steps_equal_those_of_the_cpu_runner(twins: Twins) -> None:
        prompts = np.random.default_rng(0).integers(3, 512, (4, 21)).tolist()
        banned = replace(GREEDY, suppress_before=200, suppressed=tuple(range(3, 300)))
        filtered = seeded(7, top_k=20, top_p=0.9, min_p=0.02)
        joins = [RowJoin(3, 0, GREEDY, 21), RowJoin(0, 1, seeded(2**64 - 5, choice=3), 9)]
        await twins.run(joins=joins, pieces=[Piece(3, 0, prompts[0][:13], False), Piece(0, 0, prompts[1][:9])])
        await twins.run(pieces=[Piece(3, 13, prompts[0][13:])], decode=[0])
        await twins.run(decode=[0, 3])
        joins = [RowJoin(7, 2, filtered, 1), RowJoin(5, 3, banned, 12)]
        await twins.run(joins=joins, pieces=[Piece(7, 0, [5]), Piece(5, 0, prompts[2][:12])], decode=[0, 3])
        await twins.run(decode=[0, 3, 7, 5])
        await twins.run(joins=[RowJoin(0, 4, GREEDY, 20)], pieces=[Piece(0, 0, prompts[3][:20])], decode=[5, 7])
        await twins.run(decode=[7, 0])

    @pytest.mark.blocks_loop
    @pytest.mark.parametrize("length", [1, *(pytest.param(n, marks=pytest.mark.full) for n in (25, 31, 60))])
    async def test_a_text_between_steps(length: int, twins: Twins) -> None:
        """Its features are the CPU runner's, and requests that run meanwhile do not notice."""
        joins = [RowJoin(3, 0, GREEDY, 9), RowJoin(1, 1, seeded(3), 5)]
        await twins.run(joins=joins, pieces=[Piece(3, 0, list(range(5, 14))), Piece(1, 0, [7, 8, 9, 10, 11])])
        used = twins.executor._rows.tables.clone()
        token_ids = np.random.default_rng(6).integers(3, 512, length).astype(np.int32)
        expected = await twins.driver.runner.embed(token_ids)  # type: ignore[attr-defined]
        text, chunks = twins.executor.text(token_ids), 1
        while not text.launch():
            chunks += 1
            await twins.run(decode=[1, 3])
        np.testing.assert_allclose(text.read(), expected, atol=1e-5)
        text.close()
        assert chunks == -(-length // TOKENS)
        assert torch.equal(twins.executor._rows.tables[:, [0, 2, 4]], used[:, [0, 2, 4]])

    @pytest.mark.blocks_loop
    async def test_rows_that_adjust_their_logits(twins: Twins) -> None:
        """Beside rows that do not; plain steps before and after; a row that is resumed; a row that follows one."""
        prompts = np.random.default_rng(3).integers(3, 512, (4, 12)).tolist()
        adjustments = twins.executor._rows.adjustments
        await twins.run(joins=[RowJoin(2, 0, seeded(5), 12)], pieces=[Piece(2, 0, prompts[0])])
        assert adjustments.rows is None
        repeated = replace(GREEDY, repetition_penalty=2.0, presence_penalty=1.0, frequency_penalty=0.5)
        biased = seeded(9, top_p=0.8)
        biased = replace(biased, logit_bias=tuple((i, 3.0) for i in range(0, 140)), banned=(3, 4), suppress_before=20)
        biased = replace(biased, suppressed=(7, 8))
        joins = [
            RowJoin(6, 1, repeated, 12, np.array(prompts[1], np.int32)),
            RowJoin(1, 2, biased, 12),
            RowJoin(4, 3, replace(seeded(3), typical_p=0.7, xtc_probability=0.6, xtc_threshold=0.002), 2),
        ]
        pieces = [Piece(6, 0, prompts[1]), Piece(1, 0, prompts[2][:5], False), Piece(4, 0, [9, 10])]
        await twins.run(joins=joins, pieces=pieces, decode=[2])
        tokens = await twins.run(pieces=[Piece(1, 5, prompts[2][5:])], decode=[2, 6, 4])
        tokens = await twins.run(decode=[2, 6, 4, 1])
        known = [*prompts[1], *tokens[1:2]]
        narrow = replace(seeded(8), allowed=(40, 41, 500), temperature=3.0)
        await twins.run(joins=[RowJoin(0, 4, narrow, 1)], pieces=[Piece(0, 0, [5])], decode=[6, 1])
        resumed = RowJoin(4, 5, repeated, 12, np.array(known, np.int32))
        assert (await twins.run(joins=[resumed], pieces=[Piece(4, 0, known)], decode=[0]))[0] in (40, 41, 500)
        await twins.run(joins=[RowJoin(6, 6, GREEDY, 3)], pieces=[Piece(6, 0, [3, 4, 5])])
        assert adjustments.use([6, 2]) == SamplerUse.PLAIN
        assert adjustments.use([6, 2, 4]) == SamplerUse.ADJUSTED
        await twins.run(decode=[6, 4])

    @pytest.mark.blocks_loop
    @pytest.mark.full
    async def test_log_probabilities(twins: Twins) -> None:
        """Of the chosen, the most likely, named ids, all; of prompts in chunks; beside rows that do not ask."""
        prompts = np.random.default_rng(4).integers(3, 512, (4, 14)).tolist()
        few = replace(seeded(1, top_k=9), logprobs=LogprobsRequest(3, (5, 500)))
        banned = replace(GREEDY, suppress_before=30, suppressed=tuple(range(3, 300)), logprobs=LogprobsRequest(0))
        told = replace(seeded(2), prompt_logprobs=LogprobsRequest(2), logprobs=LogprobsRequest(20), min_p=0.01)
        joins = [RowJoin(5, 0, few, 9), RowJoin(0, 1, GREEDY, 5)]
        await twins.run(joins=joins, pieces=[Piece(5, 0, prompts[0][:9]), Piece(0, 0, prompts[1][:5])])
        joins = [RowJoin(2, 2, told, 14, np.array(prompts[2], np.int32)), RowJoin(7, 3, banned, 1)]
        await twins.run(joins=joins, pieces=[Piece(2, 0, prompts[2][:6], False), Piece(7, 0, [9])], decode=[0, 5])
        await twins.run(pieces=[Piece(2, 6, prompts[2][6:])], decode=[5, 7])
        await twins.run(decode=[5, 7, 2, 0])
        whole = replace(seeded(3), logprobs=LogprobsRequest(512, (4,)), prompt_logprobs=LogprobsRequest(512))
        joins = [RowJoin(0, 4, whole, 3, np.array([3, 4, 5], np.int32)), RowJoin(2, 5, GREEDY, 2)]
        await twins.run(joins=joins, pieces=[Piece(0, 0, [3, 4, 5]), Piece(2, 0, [7, 8])], decode=[7])
        await twins.run(decode=[0, 2, 5])

    def late_plan(plan: StepPlan, rows: list[int], decoding: int, **late: Any) -> StepPlan:
        """Of a plan that decodes the first of these rows last: they are late samples."""
        own = plan.decode_rows[: len(plan.decode_rows) - decoding]
        words = {"masks": None, "biases": (None,) * len(rows), **late}
        return replace(plan, decode_rows=own, late=LateSamples(np.array(rows, np.int32), decoding, **words))

    def keeping(plan: StepPlan, row: int) -> StepPlan:
        """The chunk of this row keeps its logits in place of sampling."""
        chunks = tuple(replace(each, samples=False, keeps=True) if each.row == row else each for each in plan.chunks)
        return replace(plan, chunks=chunks)

    @pytest.mark.blocks_loop
    @pytest.mark.full
    async def test_late_rows(twins: Twins) -> None:
        """Masks, biases, logits in place of the model's, penalties and scores, beside rows that wait for nobody."""
        prompts = np.random.default_rng(5).integers(3, 512, (4, 7)).tolist()
        plain = replace(seeded(1), late=True, reads_logits=True)
        told = replace(GREEDY, late=True, logprobs=LogprobsRequest(2, (7,)), repetition_penalty=1.5)
        joins = [RowJoin(5, 0, plain, 7), RowJoin(2, 1, told, 7, np.array(prompts[1], np.int32))]
        joins.append(RowJoin(0, 2, GREEDY, 7))
        plan = twins.driver.plan(joins=joins, pieces=[Piece(row, 0, prompts[i]) for i, row in enumerate((5, 2, 0))])
        assert len(await twins.run_plan(keeping(keeping(plan, 5), 2))) == 1
        masks = np.full((2, 16), 0xFFFFFFFF, np.uint32)
        masks[1] = 0
        masks[1, 3] = 0xF0
        late = late_plan(twins.driver.plan(decode=[0, 5, 2]), [5, 2], 2, masks=masks)
        assert (await twins.run_plan(late))[1] in range(100, 104)
        bias = RowBias(np.array([9, 400], np.int32), np.array([-np.inf, 30.0], np.float32))
        late = late_plan(twins.driver.plan(decode=[0, 2]), [2, 5], 1, biases=(bias, None))
        assert (await twins.run_plan(late))[0] == 400
        await twins.run(decode=[0])
        alone = late_plan(twins.driver.plan(), [2], 0, biases=(RowLogits(np.eye(512, dtype=np.float32)[77]),))
        assert await twins.run_plan(alone) == [77]
        forced = twins.driver.plan(pieces=[Piece(2, 9, [77, 8, 9])], decode=[0])
        await twins.run_plan(keeping(forced, 2))
        await twins.run_plan(late_plan(twins.driver.plan(decode=[0, 2]), [2], 1))

    @pytest.mark.blocks_loop
    @pytest.mark.full
    async def test_further_choices(twins: Twins) -> None:
        prompt = np.random.default_rng(6).integers(3, 512, 16).tolist()
        settings = [replace(seeded(3, choice=i), logprobs=LogprobsRequest(1)) for i in range(3)]
        await twins.run(joins=[RowJoin(5, 9, GREEDY, 16)], pieces=[Piece(5, 0, prompt)])
        for row in (1, 2):
            twins.driver.share(source=5, target=row, positions=16)
        joins = [RowJoin(row, row, each, 16) for row, each in enumerate(settings)]
        plan = twins.driver.plan(joins=joins, pieces=[Piece(0, 0, prompt)], decode=[5], keep=[1, 2])
        for row in (1, 2):
            twins.driver.move(row, 16)
        assert len(await twins.run_plan(replace(plan, forks=(Fork(0, 2), Fork(0, 1))))) == 4
        await twins.run(decode=[0, 2, 5, 1])
        late = [replace(GREEDY, late=True), replace(seeded(4, choice=1), late=True)]
        twins.driver.share(source=5, target=7, positions=16)
        joins = [RowJoin(6, 3, late[0], 16), RowJoin(7, 4, late[1], 16)]
        plan = twins.driver.plan(joins=joins, pieces=[Piece(6, 0, prompt)], decode=[5], keep=[7])
        twins.driver.move(7, 16)
        await twins.run_plan(keeping(replace(plan, forks=(Fork(0, 7),)), 6))
        await twins.run_plan(late_plan(twins.driver.plan(decode=[5, 7, 6]), [7, 6], 2))

    @pytest.mark.blocks_loop
    async def test_blocks_are_copied_before_they_are_read(twins: Twins) -> None:
        prompt = np.random.default_rng(1).integers(3, 512, 15).tolist()
        await twins.run(joins=[RowJoin(0, 0, GREEDY, 15)], pieces=[Piece(0, 0, prompt)])
        copies = twins.driver.share(source=0, target=1, positions=12)
        pieces = [Piece(1, 12, [7, 8, 9, 10])]
        await twins.run(copies, joins=[RowJoin(1, 1, GREEDY, 16)], pieces=pieces, decode=[0], keep=[1])
        await twins.run(decode=[0, 1])

    @pytest.mark.blocks_loop
    @pytest.mark.full
    async def test_common_prefixes_are_attended_once(twins: Twins) -> None:
        prompt = np.random.default_rng(3).integers(3, 512, 38).tolist()
        await twins.run(joins=[RowJoin(0, 0, GREEDY, 38)], pieces=[Piece(0, 0, prompt[:20], False)])
        await twins.run(pieces=[Piece(0, 20, prompt[20:])])
        for row, positions in ((1, 32), (2, 16)):
            twins.driver.share(source=0, target=row, positions=positions)
        pieces = [Piece(1, 32, [5, 6, 7]), Piece(2, 16, prompt[16:30])]
        joins = [RowJoin(1, 1, GREEDY, 35), RowJoin(2, 2, seeded(4), 30)]
        await twins.run(joins=joins, pieces=pieces, decode=[0], keep=[1, 2])
        for decode in ([0, 1, 2], [2, 0, 1], [1, 2]):
            await twins.run(decode=decode)
            assert twins.shared_units() > 0
        await twins.run(decode=[1])
        assert twins.shared_units() == 0

    @pytest.mark.blocks_loop
    @pytest.mark.full
    @pytest.mark.parametrize("whole", [False, True])
    async def test_first_steps_leave_nothing_behind(
        whole: bool, twins: Twins, caplog: pytest.LogCaptureFixture
    ) -> None:
        plans = first_plans(ROWS, TOKENS, LENGTH)
        if whole:
            for plan in plans:
                assert len(twins.launch(plan).token_ids) == plan.num_sampled
        else:  # most are captured only
            thread = DeviceThread("asyncllm-test")
            twins.turn = FirstSteps(twins.executor, plans, thread).run()
            await thread.aclose()
            assert twins.turn == 3
            kinds = {record.args[0] for record in caplog.records if record.msg.startswith("no graph for")}
            assert {kind.tokens for kind in kinds if kind.chunks} == {24, 16}
            assert {kind.tokens for kind in kinds if not kind.chunks} == {8, 4, 2, 1}
        prompt = np.random.default_rng(2).integers(3, 512, 20).tolist()
        await twins.run(joins=[RowJoin(0, 0, GREEDY, 20)], pieces=[Piece(0, 0, prompt)])
        await twins.run(decode=[0])
