"""Late rows and further choices on the GPU's executor: its steps on CPU tensors, under Triton's interpreter, give what
the CPU runner gives, word for word and row for row.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncllm.engine.execution.cuda_runner import CudaRunner
from asyncllm.engine.plan import (
    Fork,
    LateSamples,
    LogprobsRequest,
    RowBias,
    RowJoin,
    RowLogits,
    RowSampling,
    StepPlan,
)
from asyncllm.kernels.language import TRITON_AVAILABLE
from asyncllm.testing.tiny_models import write_tiny_model
from tests.engine.execution.plan_driver import GREEDY, Piece, PlanDriver, seeded
from tests.engine.execution.short_prefixes import share_short_prefixes
from tests.engine.execution.test_cuda_executor import BLOCKS, INTERPRETED, LENGTH, MODELS, SMALL, TOKENS, Twins
from tests.engine.execution.test_cuda_executor import run_interpreted as run_file_interpreted

VOCABULARY = 512
WORDS = VOCABULARY // 32


if TRITON_AVAILABLE and not INTERPRETED:

    def test_late_steps_under_the_interpreter() -> None:
        run_file_interpreted("not full", __file__)

    @pytest.mark.full
    def test_more_late_steps_under_the_interpreter() -> None:
        run_file_interpreted("full", __file__)


def prompt(seed: int, length: int) -> list[int]:
    return [int(token_id) for token_id in np.random.default_rng(seed).integers(3, VOCABULARY, length)]


def late_of(sampling: RowSampling, **changes: Any) -> RowSampling:
    return replace(sampling, late=True, **changes)


def masks(*legal: Sequence[int] | None) -> np.ndarray[Any, Any]:
    """A mask a row: these tokens, or all."""
    bits = np.zeros((len(legal), WORDS), np.uint32)
    for row, token_ids in zip(bits, legal, strict=True):
        if token_ids is None:
            row[:] = 0xFFFFFFFF
        for token_id in token_ids or ():
            row[token_id // 32] |= np.uint32(1 << token_id % 32)
    return bits


class LateTwins(Twins):
    """Plans with all that a plan may have."""

    def plan(
        self,
        *,
        late: Sequence[int] = (),
        decoding: int = 0,
        words: dict[str, Any] | None = None,
        keeps: Sequence[int] = (),
        forks: Sequence[Fork] = (),
        decode: Sequence[int] = (),
        **parts: Any,
    ) -> StepPlan:
        """`late`: the rows of late samples. `keeps`: rows whose piece is the last before a late sample."""
        plan = self.driver.plan(decode=[*decode, *late[:decoding]], **parts)
        samples = LateSamples(np.array(late, np.int32), decoding, None, (None,) * len(late))
        chunks = [replace(each, samples=False, keeps=True) if each.row in keeps else each for each in plan.chunks]
        return replace(
            plan,
            decode_rows=np.array(decode, np.int32),
            chunks=tuple(chunks),
            late=replace(samples, **(words or {})) if late else None,
            forks=tuple(forks),
        )

    async def step(self, **parts: Any) -> list[int]:
        """The late tokens, then the others."""
        return await self.run_plan(self.plan(**parts))

    def share(self, source: int, target: int, positions: int) -> Any:
        copies = self.driver.share(source=source, target=target, positions=positions)
        self.driver.move(target, positions)
        return copies


@pytest.fixture
async def twins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[LateTwins]:
    share_short_prefixes(monkeypatch)
    path = write_tiny_model(tmp_path, config={**SMALL, **MODELS["llama"]})
    config = {"max_model_len": LENGTH, "max_batched_tokens": TOKENS, "num_blocks": BLOCKS, "block_size": 8}
    async with await PlanDriver.load(path, device="cpu", dtype="float32", **config) as driver:
        yield LateTwins(path, driver, edits=4)


if INTERPRETED:
    pytestmark = pytest.mark.blocks_loop

    async def test_late_rows_beside_others(twins: LateTwins) -> None:
        """They wait for some steps, decode or end; steps without them, and steps of nothing else."""
        a, b, c = prompt(0, 12), prompt(1, 9), prompt(2, 6)
        joins = [RowJoin(2, 0, GREEDY, 6)]
        await twins.step(joins=joins, pieces=[Piece(2, 0, c)])
        assert twins.executor._rows.adjustments.kept is None  # nothing is there for rows that nobody has
        joins = [RowJoin(4, 1, late_of(GREEDY), 12), RowJoin(1, 2, late_of(seeded(3, top_k=30)), 9)]
        pieces = [Piece(4, 0, a[:7], False), Piece(1, 0, b)]
        assert len(await twins.step(joins=joins, pieces=pieces, keeps=[1], decode=[2])) == 1
        pieces = [Piece(4, 7, a[7:])]
        assert len(await twins.step(late=[1], decoding=1, pieces=pieces, keeps=[4], decode=[2])) == 2
        assert len(await twins.step(decode=[2])) == 1  # both wait
        assert len(await twins.step(late=[4, 1], decoding=2)) == 2
        assert len(await twins.step(late=[1, 4], decoding=1, decode=[2])) == 3  # row 4 ends
        assert len(await twins.step(late=[1])) == 1  # of late samples alone
        joins = [RowJoin(4, 3, seeded(8), 5)]  # a row that is not late follows one that was
        await twins.step(joins=joins, pieces=[Piece(4, 0, a[:5])], decode=[2])
        await twins.step(decode=[4, 2])

    async def test_what_the_host_says(twins: LateTwins) -> None:
        """Masks, biases, and logits in place of the model's, after the row's own bans and penalties; what it reads."""
        known = np.array(prompt(5, 8), np.int32)
        settings = [
            late_of(GREEDY, reads_logits=True),
            late_of(GREEDY, repetition_penalty=1.7, presence_penalty=2.0, banned=(3, 4), logit_bias=((9, 5.0),)),
            late_of(seeded(6, typical_p=0.8), reads_logits=True, suppress_before=40, suppressed=tuple(range(3, 200))),
            late_of(seeded(7, top_p=0.9, min_p=0.01)),
        ]
        joins = [RowJoin(row, row, each, 8, known) for row, each in enumerate(settings)]
        pieces = [Piece(row, 0, known.tolist()[: 3 + row]) for row in range(4)]
        await twins.step(joins=joins, pieces=pieces, keeps=range(4))
        order = [3, 0, 1, 2]
        ban = RowBias(np.array([5, 77, 400], np.int32), np.array([-np.inf, 2.5, -np.inf], np.float32))
        legal = masks([50, 60, 70], None, range(0, 512, 3), range(100, 512))
        words = {"masks": legal, "biases": (None, ban, ban, None)}
        tokens = await twins.step(late=order, decoding=4, words=words)
        assert tokens[0] in (50, 60, 70)
        assert tokens[2] % 3 == 0
        assert tokens[3] >= 200
        instead = RowLogits(np.eye(VOCABULARY, dtype=np.float32)[88] * 50)
        words = {"biases": (instead, None, ban, instead)}
        tokens = await twins.step(late=[0, 2, 1, 3], decoding=3, words=words)
        assert (tokens[0], tokens[3]) == (88, 88)
        await twins.step(late=[2, 1, 0], decoding=1)

    async def test_late_tokens_are_told_about(twins: LateTwins) -> None:
        """Few log-probabilities and all; in the step, other rows are told of others."""
        settings = [
            late_of(seeded(1), logprobs=LogprobsRequest(3, (5, 500))),
            late_of(GREEDY, logprobs=LogprobsRequest(VOCABULARY)),
            replace(seeded(2), logprobs=LogprobsRequest(2)),
        ]
        joins = [RowJoin(row, row, each, 5) for row, each in enumerate(settings)]
        pieces = [Piece(row, 0, prompt(row, 5)) for row in range(3)]
        await twins.step(joins=joins, pieces=pieces, keeps=[0, 1])
        words = {"masks": masks(range(60), None)}
        for late in ([0, 1], [1, 0]):
            await twins.step(late=late, decoding=2, decode=[2], words=words)
        await twins.step(late=[1, 0], decoding=1, decode=[2])

    async def test_further_choices(twins: LateTwins) -> None:
        """From the logits of a prompt's end, beside other rows; they go on by themselves."""
        first, asked = prompt(7, 16), LogprobsRequest(2)
        await twins.step(joins=[RowJoin(5, 0, GREEDY, 16)], pieces=[Piece(5, 0, first)])
        for row in (1, 2):
            twins.share(5, row, 16)
        settings = [seeded(3, choice=choice, logprobs=asked if choice != 1 else None) for choice in range(3)]
        joins = [RowJoin(row, 1 + row, each, 16) for row, each in enumerate(settings)]
        other = [RowJoin(7, 9, seeded(4, frequency_penalty=1.0), 3, np.array(first[:3], np.int32))]
        pieces = [Piece(7, 0, first[:3]), Piece(0, 0, first)]
        forks = [Fork(1, 2), Fork(1, 1)]
        tokens = await twins.step(joins=joins + other, pieces=pieces, forks=forks, decode=[5], keep=[1, 2])
        assert len(tokens) == 5
        for decode in ([0, 2, 1, 7], [1, 0, 2], [5, 1, 0, 2]):
            await twins.step(decode=decode)

    @pytest.mark.full
    async def test_further_choices_that_are_late(twins: LateTwins) -> None:
        first = prompt(8, 16)
        await twins.step(joins=[RowJoin(5, 0, GREEDY, 16)], pieces=[Piece(5, 0, first)])
        for row in (1, 2):
            twins.share(5, row, 16)
        settings = [late_of(seeded(3, choice=choice, reads_logits=choice > 0)) for choice in range(3)]
        joins = [RowJoin(row, 1 + row, each, 16) for row, each in enumerate(settings)]
        forks = [Fork(0, 1), Fork(0, 2)]
        pieces = [Piece(0, 0, first)]
        assert len(await twins.step(joins=joins, pieces=pieces, keeps=[0], forks=forks, keep=[1, 2], decode=[5])) == 1
        await twins.step(late=[2, 0], decoding=2, words={"masks": masks(range(9), None)})
        await twins.step(late=[0, 1, 2], decoding=2, decode=[5])
        await twins.step(late=[0, 1])

    async def test_a_forced_token_takes_the_place_of_a_late_sample(twins: LateTwins) -> None:
        """The row's logits are not looked at; the tokens count for its penalties."""
        known = np.array(prompt(9, 4), np.int32)
        joins = [RowJoin(3, 0, late_of(GREEDY, repetition_penalty=3.0, frequency_penalty=4.0), 4, known)]
        await twins.step(joins=joins, pieces=[Piece(3, 0, known.tolist())], keeps=[3])
        (token,) = await twins.step(late=[3], decoding=1)
        await twins.step(pieces=[Piece(3, 5, [token, token, 40])], keeps=[3])
        await twins.step(late=[3], decoding=1)
        await twins.step(late=[3])

    async def test_a_step_that_cannot_be_launched_leaves_the_ring_in_order(twins: LateTwins) -> None:
        await twins.step(joins=[RowJoin(2, 0, GREEDY, 6)], pieces=[Piece(2, 0, prompt(2, 6))])
        nobody = replace(twins.plan(), late=LateSamples(np.array([1], np.int32), 0, None, (None,)))
        with pytest.raises((AssertionError, RuntimeError)):
            twins.executor.enqueue(nobody, twins.turn)
        twins.executor.recover(twins.turn)
        await twins.step(decode=[2])
        await twins.step(decode=[2])

    class Event:
        """Stands for a CUDA event; on the CPU all that is launched is done at once."""

        waits: list[Event]
        held = threading.Event()

        def __init__(self, *, blocking: bool) -> None:
            assert blocking  # a wait must not poll
            self.recorded = 0

        def record(self, stream: object) -> None:
            self.recorded += 1

        def synchronize(self) -> None:
            assert self.recorded
            Event.waits.append(self)
            if len(Event.waits) == 2:
                Event.held.wait(30)

    async def test_late_tokens_come_before_the_step_is_done(twins: LateTwins, monkeypatch: pytest.MonkeyPatch) -> None:
        joins = [RowJoin(1, 0, late_of(seeded(1)), 4), RowJoin(2, 1, GREEDY, 4)]
        pieces = [Piece(1, 0, prompt(1, 4)), Piece(2, 0, prompt(2, 4))]
        await twins.step(joins=joins, pieces=pieces, keeps=[1])
        monkeypatch.setattr(torch.cuda, "Event", Event)
        Event.waits = []
        runner = CudaRunner(twins.executor, twins.ring, twins.turn)
        try:
            plan = twins.plan(late=[1], decoding=1, decode=[2])
            expected = twins.driver.runner.launch(plan)
            ticket = runner.launch(plan)
            assert ticket.late is not None
            late = await asyncio.wait_for(ticket.late, 30)
            assert not ticket.result.done()
            Event.held.set()
            result = await ticket.result
            assert expected.late is not None
            assert late.token_ids.tolist() == (await expected.late).token_ids.tolist()
            assert result.token_ids.tolist() == (await expected.result).token_ids.tolist()
            assert len(Event.waits) == 2
            plan = twins.plan(decode=[2])
            ticket = runner.launch(plan)
            assert ticket.late is None
            assert len((await ticket.result).token_ids) == 1
            assert len(Event.waits) == 3  # one wait for a step without late samples
        finally:
            Event.held.set()
            await runner.aclose()
