"""Steps that follow each other without a call of their own: as steps that wait for each other, and in order."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncllm.engine.event_loop import EngineLoop
from asyncllm.engine.execution.processor import native_kernels
from asyncllm.engine.plan import Int32Array, RowJoin, StepPlan, StepResult
from asyncllm.kernels.cpu.decoder import DecoderCall
from asyncllm.kernels.cpu.further import Advance, FurtherSteps
from asyncllm.layers.kernel_decoder import KernelDecoder
from asyncllm.testing.tiny_models import write_tiny_model
from tests.engine.execution.plan_driver import GREEDY, Piece, PlanDriver, seeded

SIZES = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 8, "num_key_value_heads": 4}
PROMPT = list(range(7, 40))
MOST_POSITIONS = 200  # of a row, and fewer than the model's
COUNT = 90  # several blocks, and more than a call computes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if native_kernels() is None:
        pytest.skip("this processor runs torch's operators")
    return write_tiny_model(tmp_path_factory.mktemp("native"), config=SIZES)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of the kernel: how many steps each of them has computed."""
    computed: list[int] = []
    call = DecoderCall.__call__

    def counting(self: DecoderCall, further: FurtherSteps | None = None) -> None:
        call(self, further)
        computed.append(1 if further is None else max(1, further.done))

    monkeypatch.setattr(DecoderCall, "__call__", counting)
    return computed


def on_engine_loop(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    loop = EngineLoop()
    try:
        loop.run_until_complete(asyncio.wait_for(main(), 60))
        loop.run_until_complete(loop.shutdown_default_executor())
    finally:
        loop.close()


class Rows:
    """Rows that decode, with the same array in each plan."""

    def __init__(self, driver: PlanDriver, count: int) -> None:
        self.driver, self.decoded = driver, np.arange(count, dtype=np.int32)

    async def begin(self) -> list[int]:
        joins = [RowJoin(row, row, seeded(row) if row % 2 else GREEDY, len(PROMPT)) for row in self.decoded.tolist()]
        return await self.driver.run(joins=joins, pieces=[Piece(join.row, 0, PROMPT) for join in joins])

    def plan(self) -> StepPlan:
        return replace(self.driver.plan(decode=self.decoded.tolist()), decode_rows=self.decoded)

    async def decode(self, ahead: int, steps: int = COUNT) -> list[list[int]]:
        """With so many steps launched beyond the one that is awaited."""
        launched: deque[tuple[StepPlan, asyncio.Future[StepResult]]] = deque()
        tokens, done = [], []
        for index in range(steps + ahead):
            if index < steps:
                plan = self.plan()
                future = self.driver.runner.launch(plan).result
                future.add_done_callback(lambda future: done.append(future.result().step))
                launched.append((plan, future))
            if index >= ahead:
                plan, future = launched.popleft()
                result = await future
                assert result.step == plan.step
                tokens.append(result.token_ids.tolist())
        assert done == sorted(done)
        return tokens


async def waited_for(folder: Path, rows: int) -> list[list[int]]:
    async with await PlanDriver.load(folder, dtype="bfloat16") as driver:
        decoding = Rows(driver, rows)
        await decoding.begin()
        tokens: list[list[int]] = []
        for _ in range(COUNT):
            decoding.decoded = decoding.decoded.copy()  # so that no plan follows the one before
            tokens += await decoding.decode(0, 1)
        return tokens


@pytest.mark.parametrize("ahead", [0, 1, 2, 5])
@pytest.mark.parametrize("rows", [1, 3])
async def test_tokens_are_the_same(folder: Path, rows: int, ahead: int) -> None:
    expected = await waited_for(folder, rows)

    def engine() -> None:
        async def main() -> None:
            async with await PlanDriver.load(folder, dtype="bfloat16") as driver:
                decoding = Rows(driver, rows)
                await decoding.begin()
                assert await decoding.decode(ahead) == expected

        on_engine_loop(main)

    await asyncio.to_thread(engine)


def test_most_steps_have_no_call_of_their_own(folder: Path, calls: list[int]) -> None:
    async def main() -> None:
        async with await PlanDriver.load(folder, dtype="bfloat16") as driver:
            decoding = Rows(driver, 1)
            await decoding.begin()
            calls.clear()
            await decoding.decode(2)
        assert sum(calls) == COUNT
        assert len(calls) < COUNT / 2

    on_engine_loop(main)


def test_a_call_goes_on_into_new_blocks(folder: Path, calls: list[int]) -> None:
    """All steps are launched before the first one is done, so nothing but a call's length ends it."""

    async def main() -> None:
        async with await PlanDriver.load(folder, dtype="bfloat16") as driver:
            decoding = Rows(driver, 2)
            await decoding.begin()
            calls.clear()
            plans = [decoding.plan() for _ in range(40)]
            assert sum(len(plan.tables.blocks) > 0 for plan in plans) > 1
            futures = [driver.runner.launch(plan).result for plan in plans]
            await asyncio.gather(*futures)
        assert max(calls) > 16

    on_engine_loop(main)


def test_other_steps_and_texts_come_between(folder: Path) -> None:
    """Prompts, embeddings, and steps that fail: each in its turn, and decoding goes on as if alone."""

    async def main() -> None:
        async with await PlanDriver.load(folder, dtype="bfloat16") as driver:
            decoding = Rows(driver, 1)
            await decoding.begin()
            expected = await decoding.decode(1, 40)
        async with await PlanDriver.load(folder, dtype="bfloat16") as driver:
            decoding = Rows(driver, 1)
            await decoding.begin()
            ids: Int32Array = np.array(PROMPT, np.int32)
            text = driver.runner.embed(ids)  # type: ignore[attr-defined]  # `CpuRunner`'s
            embedding = asyncio.ensure_future(text)
            tokens = await decoding.decode(1, 20)
            failing = driver.plan(joins=[RowJoin(2, 2, GREEDY)], pieces=[Piece(2, 0, [10**6])])
            failed = driver.runner.launch(failing).result
            tokens += await decoding.decode(2, 20)
            assert tokens == expected
            with pytest.raises(IndexError):
                await failed
            assert np.isfinite(await embedding).all()

    on_engine_loop(main)


def test_closing_waits_for_steps(folder: Path) -> None:
    async def main() -> None:
        for steps in (1, 2, 7, 40, 70):
            driver = await PlanDriver.load(folder, dtype="bfloat16")
            decoding = Rows(driver, 1)
            await decoding.begin()
            futures = [driver.runner.launch(decoding.plan()).result for _ in range(steps)]
            await driver.runner.aclose()
            assert all(len(future.result().token_ids) == 1 for future in futures)

    on_engine_loop(main)


def test_steps_that_wait_do_not_get_lost(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no memory for the call that they were to be computed in."""
    failures = [MemoryError("none left")]
    make = KernelDecoder.further

    def failing(self: KernelDecoder, advance: Advance, told: int) -> FurtherSteps:
        if failures:
            raise failures.pop()
        return make(self, advance, told)

    async def main() -> None:
        async with await PlanDriver.load(folder, dtype="bfloat16") as driver:
            decoding = Rows(driver, 1)
            await decoding.begin()
            monkeypatch.setattr(KernelDecoder, "further", failing)
            futures = [driver.runner.launch(decoding.plan()).result for _ in range(8)]
            errors = await asyncio.gather(*futures, return_exceptions=True)
            assert [type(error) for error in errors] == [MemoryError, *[RuntimeError] * 7]
            await decoding.begin()
            assert len(await decoding.decode(2, 5)) == 5

    on_engine_loop(main)


class Mixture:
    """Plans by dice: prompts, some of which fail, beside rows that decode; and the same rows again and again."""

    def __init__(self, driver: PlanDriver, seed: int) -> None:
        self._driver, self._dice = driver, random.Random(seed)
        self._decoded: Int32Array = np.zeros(0, np.int32)
        self._positions: dict[int, int] = {}
        self._again = 0

    def plan(self) -> StepPlan:
        full = any(self._positions[row] > MOST_POSITIONS for row in self._decoded.tolist())
        if full or not self._again or not len(self._decoded):
            return self._mixed()
        self._again -= 1
        self._advance(self._decoded.tolist())
        return replace(self._driver.plan(decode=self._decoded.tolist()), decode_rows=self._decoded)

    def _mixed(self) -> StepPlan:
        dice = self._dice
        joining = dice.sample(range(6), dice.choice([1, 1, 2, 3]))
        going_on = [row for row in self._decoded.tolist() if row not in joining]
        going_on = [row for row in going_on if self._positions[row] <= MOST_POSITIONS]
        pieces = [Piece(row, 0, PROMPT[: dice.choice([1, 5, 16, 33])]) for row in joining]
        if dice.random() < 0.15:
            pieces[0] = Piece(joining[0], 0, [10**6])
        joins = [RowJoin(row, row, dice.choice([GREEDY, seeded(row)]), len(PROMPT)) for row in joining]
        self._positions.update({piece.row: len(piece.token_ids) for piece in pieces})
        self._advance(going_on)
        rows = sorted({*going_on, *joining})
        self._decoded = np.array(dice.sample(rows, dice.randrange(1, len(rows) + 1)), np.int32)
        self._again = dice.choice([0, 3, 10, 50])
        return self._driver.plan(joins=joins, pieces=pieces, decode=going_on)

    def _advance(self, rows: list[int]) -> None:
        for row in rows:
            self._positions[row] += 1


async def results_of_mixture(folder: Path, seed: int, ahead: int | None) -> list[object]:
    """Of 120 steps; None: each is waited for, and none follows another."""
    async with await PlanDriver.load(folder, dtype="bfloat16", block_size=64) as driver:
        mixture, dice = Mixture(driver, seed), random.Random(seed)
        futures: list[asyncio.Future[StepResult]] = []
        texts: list[asyncio.Future[Any]] = []
        for _ in range(120):
            plan = mixture.plan()
            if ahead is None:
                plan = replace(plan, decode_rows=plan.decode_rows.copy())
            elif dice.random() < 0.05:
                ids: Int32Array = np.array(PROMPT, np.int32)
                texts.append(asyncio.ensure_future(driver.runner.embed(ids)))  # type: ignore[attr-defined]  # `CpuRunner`'s
            futures.append(driver.runner.launch(plan).result)
            if len(futures) > (ahead or 0):
                await asyncio.wait([futures[-1 - (ahead or 0)]])
        await asyncio.gather(*texts)
        results = await asyncio.gather(*futures, return_exceptions=True)
    return [repr(each) if isinstance(each, BaseException) else each.token_ids.tolist() for each in results]


@pytest.mark.parametrize("ahead", [1, 2, 40])
@pytest.mark.parametrize("seed", range(4))
def test_mixtures_are_as_waited_for(folder: Path, seed: int, ahead: int) -> None:
    async def main() -> None:
        expected = await results_of_mixture(folder, seed, None)
        assert await results_of_mixture(folder, seed, ahead) == expected

    on_engine_loop(main)
