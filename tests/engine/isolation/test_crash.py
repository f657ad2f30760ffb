"""A child that dies takes its requests along, and nothing else."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from asyncllm import AsyncEngine, SamplingParams
from asyncllm.engine.isolation import dispatcher, engine_process
from asyncllm.errors import EngineClosed, EngineCrashed, EngineDead, InsufficientMemoryError
from asyncllm.metrics import EngineState
from asyncllm.testing.shadow_engine import ShadowModel
from tests.engine.conftest import eventually
from tests.engine.isolation.models import (
    DEVICE_FAULT,
    FATAL,
    SLOW,
    CountedModel,
    DangerousModel,
    be_slow_later,
    be_wrong_by_name,
    child_of,
    die_always,
    die_later,
    die_twice_later,
)

GREEDY = SamplingParams(temperature=0, max_tokens=20)
LONG = SamplingParams(temperature=0, max_tokens=400)
EXPECTED = tuple(ShadowModel().expected([5], 20))

pytestmark = pytest.mark.usefixtures("no_thread_left")


def isolated(model: object = None, **settings: object) -> AsyncEngine:
    return AsyncEngine(model or DangerousModel(), isolation="process", **settings)  # type: ignore[arg-type]


async def test_a_killed_child_ends_its_streams_and_comes_back(caplog: pytest.LogCaptureFixture) -> None:
    async with isolated() as engine:
        assert (await engine.generate([6], GREEDY)).finish_reason == "length"
        before, pid = engine.statistics().tokens_generated, child_of(engine)
        assert engine.statistics().restarts == 0
        streams = [engine.stream([n], LONG) for n in range(4)]
        for stream in streams:
            await anext(stream)
        hooked = SamplingParams(on_token=lambda _: time.sleep(0.5))
        waiting = asyncio.create_task(engine.generate([5], hooked))
        await asyncio.sleep(0.1)
        os.kill(pid, signal.SIGKILL)
        for reading in (*(stream.result() for stream in streams), waiting):
            with pytest.raises(EngineCrashed, match="died: SIGKILL ended it, as the system does where memory runs out"):
                await reading
        await streams[0].aclose()
        meanwhile = await asyncio.gather(*(engine.generate([5], GREEDY) for _ in range(3)), engine.inspect())
        assert [done.token_ids for done in meanwhile[:3]] == [EXPECTED] * 3
        assert child_of(engine) != pid
        assert engine.state is EngineState.RUNNING
        statistics = engine.statistics()
        assert statistics.tokens_generated >= before + 60
        assert statistics.restarts == 1
        await eventually(lambda: engine.statistics().blocks_used == 0)
    assert "SIGKILL ended it" in caplog.text


@pytest.mark.full
async def test_a_prompt_that_kills_does_so_each_time_and_the_engine_lives() -> None:
    async with isolated() as engine:
        for _ in range(6):  # more often than a child may die at its start
            with pytest.raises(EngineCrashed, match="SIGSEGV"):
                await engine.generate([FATAL], GREEDY)
        assert (await engine.generate([5], GREEDY)).token_ids == EXPECTED
        assert engine.statistics().restarts == 6


async def test_a_lost_device_ends_the_process_and_not_the_engine() -> None:
    async with isolated() as engine:
        mate = asyncio.create_task(engine.generate([6], LONG))
        await asyncio.sleep(0.1)
        with pytest.raises(EngineCrashed, match="the device is lost") as caught:
            await engine.generate([DEVICE_FAULT], GREEDY)
        assert isinstance(caught.value.__cause__, EngineDead)
        with pytest.raises(EngineCrashed):
            await mate
        assert (await engine.generate([5], GREEDY)).token_ids == EXPECTED


async def test_requests_wait_for_the_next_child(tmp_path: Path) -> None:
    model = CountedModel(tmp_path / "loads", be_slow_later)
    async with isolated(model) as engine:
        os.kill(child_of(engine), signal.SIGKILL)
        await eventually(lambda: engine.state is EngineState.LOADING)
        start = time.monotonic()
        waiting = asyncio.create_task(engine.generate([5], GREEDY))
        aborted = asyncio.create_task(engine.generate([5], GREEDY, request_id="aborted"))
        late = asyncio.create_task(engine.generate([5], GREEDY, deadline=0.3))
        text = asyncio.create_task(engine.inspect())
        dropped = asyncio.create_task(engine.generate([7], GREEDY))
        await asyncio.sleep(0.1)
        assert engine.statistics().requests_waiting == 4
        engine.abort("aborted")
        dropped.cancel()
        assert (await aborted).finish_reason == "abort"
        done = await late
        assert done.finish_reason == "deadline"
        assert done.token_ids == ()
        assert time.monotonic() - start < 1.5
        assert not waiting.done()
        assert (await waiting).token_ids == EXPECTED
        assert time.monotonic() - start > 1.5
        assert (await text).blocks
        assert model.loads == 2


@pytest.mark.full
async def test_a_child_that_dies_twice_at_its_start_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_process, "PAUSES", (0.0, 0.1, 0.1))
    model = CountedModel(tmp_path / "loads", die_twice_later)
    async with isolated(model) as engine:
        os.kill(child_of(engine), signal.SIGKILL)
        await eventually(lambda: engine.state is EngineState.LOADING)
        assert (await engine.generate([5], GREEDY)).token_ids == EXPECTED
    assert model.loads == 4


async def test_a_child_that_keeps_dying_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_process, "PAUSES", (0.0, 0.1, 0.1))
    model = CountedModel(tmp_path / "loads", die_later)
    async with isolated(model) as engine:
        assert (await engine.generate([5], GREEDY)).token_ids == EXPECTED
        os.kill(child_of(engine), signal.SIGKILL)
        await eventually(lambda: engine.state is EngineState.LOADING)
        with pytest.raises(EngineDead, match=r"died 4 times .* at last: .*exit status 7"):
            await engine.generate([5], GREEDY)
        assert engine.state is EngineState.DEAD
        for use in (engine.generate([5]), engine.tokenize("x"), engine.inspect()):
            with pytest.raises(EngineDead):
                await use
        assert engine.statistics().blocks_used == 0
    assert model.loads == 5


async def test_a_child_that_dies_while_it_loads_is_an_error_of_start(tmp_path: Path) -> None:
    engine = isolated(CountedModel(tmp_path / "loads", die_always))
    with pytest.raises(EngineCrashed, match="exit status 7"):
        await engine.start()
    assert engine.state is EngineState.NEW


@pytest.mark.full
async def test_a_model_that_cannot_be_loaded_again_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_process, "PAUSES", (0.0,))
    async with isolated(DangerousModel()) as engine:
        home = engine._home
        assert isinstance(home, engine_process.EngineProcess)
        broken = isolated(CountedModel(tmp_path / "loads", be_wrong_by_name))._make_home()
        assert isinstance(broken, engine_process.EngineProcess)
        home._begin = broken._begin
        os.kill(child_of(engine), signal.SIGKILL)
        await eventually(lambda: engine.state is EngineState.DEAD, 20)
        with pytest.raises(EngineDead, match="2 TB are needed") as caught:
            await engine.generate([5])
        assert isinstance(caught.value.__cause__, InsufficientMemoryError)


@pytest.mark.full
async def test_closing_while_the_next_child_comes_up(tmp_path: Path) -> None:
    engine = isolated(CountedModel(tmp_path / "loads", be_slow_later))
    await engine.start()
    os.kill(child_of(engine), signal.SIGKILL)
    await eventually(lambda: engine.state is EngineState.LOADING)
    waiting = asyncio.create_task(engine.generate([5], GREEDY))
    await asyncio.sleep(0.2)
    start = time.monotonic()
    await engine.aclose(drain=60)
    assert time.monotonic() - start < 1.5
    with pytest.raises(EngineClosed):
        await waiting


async def test_a_child_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher, "PATIENCE", 0.5)
    engine = isolated()
    await engine.start()
    stuck = asyncio.create_task(engine.generate([SLOW], GREEDY))
    await asyncio.sleep(0.3)
    start = time.monotonic()
    await engine.aclose()
    assert time.monotonic() - start < 5
    with pytest.raises(EngineClosed):
        await stuck


async def test_a_function_that_outlives_its_child_is_not_taken_for_one_of_the_next() -> None:
    begun, end, cancelled = asyncio.Event(), threading.Event(), asyncio.Event()

    async def wait(_: int) -> None:
        begun.set()
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.set()

    async with isolated() as engine:
        first = asyncio.create_task(engine.generate([5], SamplingParams(on_token=lambda _: end.wait(30))))
        await eventually(lambda: bool(engine._home._calls))  # type: ignore[union-attr]
        os.kill(child_of(engine), signal.SIGKILL)
        with pytest.raises(EngineCrashed):
            await first
        second = asyncio.create_task(engine.generate([5], SamplingParams(on_token=wait)))
        await begun.wait()
        end.set()  # the first child's call returns: it has the number that this one has
        await asyncio.sleep(0.1)
        second.cancel()
        async with asyncio.timeout(2):
            await cancelled.wait()


@pytest.mark.full
async def test_a_stopped_child_holds_up_nobody_and_is_killed_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher, "PATIENCE", 1.0)
    engine = isolated()
    await engine.start()
    os.kill(child_of(engine), signal.SIGSTOP)
    streams = [engine.stream([5] * 100_000, GREEDY) for _ in range(20)]  # more than the socket takes
    starting = [asyncio.create_task(stream.start()) for stream in streams]
    ticks = 0
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        await asyncio.sleep(0.01)
        ticks += 1
    assert ticks > 10
    await engine.aclose()
    for task in starting:
        with pytest.raises(EngineClosed):
            await task
