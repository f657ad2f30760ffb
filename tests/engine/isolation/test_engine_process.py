"""An engine in a process of its own is used like any other."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncllm import AsyncEngine, SamplingParams, StructuredOutput
from asyncllm.engine.isolation.engine_process import EngineProcess
from asyncllm.engine.plan import CacheGroup
from asyncllm.errors import (
    ConfigError,
    ContextLengthError,
    DuplicateRequestError,
    EngineClosed,
    HookFailed,
    InsufficientMemoryError,
    InvalidParamsError,
    InvalidPromptError,
    ModelNotFoundError,
)
from asyncllm.inputs.tokenizer import Tokenizer
from asyncllm.metrics import EngineState
from asyncllm.testing.shadow_engine import ShadowModel
from asyncllm.testing.tiny_models import CHAT_TEMPLATE
from tests.engine.conftest import eventually
from tests.engine.isolation.models import (
    CountedModel,
    be_wrong,
    be_wrong_by_name,
    blocks_its_process,
    child_of,
    never_loads,
)
from tests.engine.unshown import Unshown, fail_unshown

GREEDY = SamplingParams(temperature=0, max_tokens=20)
LONG = SamplingParams(temperature=0, max_tokens=400)
NAME: contextvars.ContextVar[str] = contextvars.ContextVar("name", default="nobody")


def descriptors() -> int:
    return len(os.listdir("/dev/fd"))


def children() -> set[int]:
    """Of this process, zombies too."""
    found = Path("/proc/self/task").glob("*/children")
    return {int(pid) for file in found for pid in file.read_text().split()}


def is_there(pid: int) -> bool:
    """As a process or as what is left of one."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture
def nothing_left(no_thread_left: None) -> Iterator[None]:
    """Of descriptors, threads and children."""
    gc.collect()
    before, children_before = descriptors(), children()
    yield
    gc.collect()
    assert descriptors() <= before
    assert children() <= children_before


@pytest.fixture(scope="module")
def engine(tokenizer: Tokenizer) -> Iterator[AsyncEngine]:
    """One for most tests: it may be used from one loop after the other."""
    shadow = ShadowModel(latency=0.002, tokenizer=tokenizer, chat_template=CHAT_TEMPLATE)
    engine = AsyncEngine(shadow, isolation="process", max_num_seqs=16)
    asyncio.run(engine.start())
    pid = child_of(engine)
    yield engine
    asyncio.run(engine.aclose())
    assert not is_there(pid)


async def settle(engine: AsyncEngine) -> None:
    await eventually(lambda: engine.statistics().blocks_used == 0 and engine.statistics().rows_used == 0)


async def test_tokens_ends_and_statistics(engine: AsyncEngine) -> None:
    shadow, before = ShadowModel(), engine.statistics()
    done = await asyncio.gather(*(engine.generate([5, n], GREEDY) for n in range(40)))
    assert [list(each.token_ids) for each in done] == [shadow.expected([5, n], 20) for n in range(40)]
    statistics = engine.statistics()
    assert statistics.tokens_generated - before.tokens_generated == 800
    assert statistics.requests_finished - before.requests_finished == 40
    assert (statistics.requests_running, statistics.requests_waiting, statistics.rows_used) == (0, 0, 0)
    await settle(engine)
    statistics = engine.statistics()
    assert statistics.blocks_used + statistics.blocks_cached + statistics.blocks_free == statistics.blocks_total
    assert engine.describe().name == "ShadowModel"
    assert engine.describe().has_tokenizer
    metrics = done[0].metrics
    times = [metrics.arrival, metrics.queued, metrics.scheduled, metrics.first_token, metrics.last_token]
    assert times == sorted(times, key=lambda at: at or 0.0)
    assert all(at is not None and time.monotonic() - 60 < at <= time.monotonic() for at in times)


async def test_the_block_is_left_when_the_cache_is_free(engine: AsyncEngine) -> None:
    for _ in range(5):
        async with engine.stream([5], LONG) as stream:
            await anext(stream)
        assert engine.statistics().blocks_used == engine.statistics().rows_used == 0


async def test_every_token_by_itself_and_merged(engine: AsyncEngine) -> None:
    deltas = [delta async for delta in engine.stream([5], GREEDY)]
    assert "".join(delta.text for delta in deltas) == (await engine.generate([5], GREEDY)).text
    assert len(deltas) > 10
    slow = []
    async for delta in engine.stream([5], GREEDY):
        slow.append(delta)
        await asyncio.sleep(0.02)
    assert len(slow) < 15
    assert [i for d in slow for i in d.token_ids] == [i for d in deltas for i in d.token_ids]


async def test_choices_stops_and_structures(engine: AsyncEngine) -> None:
    many = await engine.generate([5], SamplingParams(n=3, seed=7, max_tokens=8))
    shadow = ShadowModel()
    expected = [shadow.expected([5], 8, temperature=1.0, seed=7, choice=n) for n in range(3)]
    assert [list(choice.token_ids) for choice in many.choices] == expected
    text = (await engine.generate([5], GREEDY)).text
    stopped = await engine.generate([5], SamplingParams(temperature=0, max_tokens=20, stop=[text[4:6]]))
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", text[4:6])
    one = await engine.generate("x", StructuredOutput(choice=["left", "right"]))
    assert one.parsed in ("left", "right")
    from pydantic import BaseModel, field_validator

    class Answer(BaseModel):  # which another process could not import
        sure: bool

        @field_validator("sure")
        @classmethod
        def refuse(cls, value: bool) -> bool:
            raise ValueError("never good")

    done = await engine.generate("x", StructuredOutput.from_model(Answer))
    with pytest.raises(ValueError, match="never good"):
        _ = done.parsed


async def test_texts(engine: AsyncEngine) -> None:
    ids = await engine.tokenize("Hello there")
    assert await engine.detokenize(ids) == "Hello there"
    messages = [{"role": "user", "content": "Hi"}]
    assert "Hi" in await engine.apply_chat_template(messages)
    assert await engine.tokenize(messages) == list((await engine.generate(messages, GREEDY)).prompt_token_ids)
    with pytest.raises(InvalidPromptError, match="must be a list of messages, got int"):
        await engine.tokenize(5)  # type: ignore[arg-type]
    with pytest.raises(InvalidParamsError, match="no embeddings on shadow"):
        await engine.embed(["a"])
    inspection = await engine.inspect()
    assert len(inspection.blocks) == engine.statistics().blocks_total


async def test_refused_requests_say_why(engine: AsyncEngine) -> None:
    with pytest.raises(ContextLengthError):
        await engine.generate([5] * 1000)
    with pytest.raises(InvalidPromptError, match="outside the vocabulary"):
        await engine.generate([1000])
    first = engine.stream([5], LONG, request_id="same")
    await first.start()
    with pytest.raises(DuplicateRequestError):
        await engine.stream([5], GREEDY, request_id="same").start()
    await first.aclose()

    class Local:
        pass

    with pytest.raises(InvalidPromptError, match=r"cannot be sent to the engine's process: .*Local"):
        await engine.generate([{"role": "user", "content": Local()}])
    with pytest.raises(InvalidPromptError, match=r"cannot be sent"):
        await engine.apply_chat_template([{"role": "user", "content": Local()}])
    assert len((await engine.generate([5], GREEDY)).token_ids) == 20
    await settle(engine)


async def test_names_of_the_hosts_own_kinds_of_text(engine: AsyncEngine) -> None:
    class Name(str):
        """Nothing that another process could find."""

    pid = child_of(engine)
    stream = engine.stream([5], LONG, request_id=Name("a"), cache_salt=Name("b"))
    await anext(stream)
    engine.abort(Name("a"))
    assert (await stream.result()).finish_reason == "abort"
    assert child_of(engine) == pid
    async with AsyncEngine(ShadowModel(), isolation="process", device=Name("cpu")) as other:
        assert len((await other.generate([5], GREEDY)).token_ids) == 20


async def test_every_way_of_leaving(engine: AsyncEngine) -> None:
    async def read(stream: Any) -> None:
        async for _ in stream:
            pass

    closed = engine.stream([1], LONG)
    await closed.start()
    await closed.aclose()
    task = asyncio.create_task(read(engine.stream([2], LONG)))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    dropped = engine.stream([3], LONG)
    await dropped.start()
    del dropped
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await engine.generate([4], LONG)
    aborted = engine.stream([5], LONG, request_id="one")
    await anext(aborted)
    engine.abort("one")
    assert (await aborted.result()).finish_reason == "abort"
    early = engine.stream([5], LONG, request_id="two")
    engine.abort("two")
    assert (await early.result()).finish_reason == "abort"
    late = await engine.generate([6], LONG, deadline=0.1)
    assert late.finish_reason == "deadline"
    await settle(engine)
    assert isinstance(engine._home, EngineProcess)
    await eventually(lambda: not engine._home._core.streams.numbers())


async def test_a_closed_loop_ends_its_own_requests_only(engine: AsyncEngine) -> None:
    async def begin() -> Any:
        stream = engine.stream([9], LONG)
        await stream.start()
        return stream

    def elsewhere() -> Any:
        loop = asyncio.new_event_loop()
        stream = loop.run_until_complete(begin())
        loop.close()
        return stream

    mine = asyncio.create_task(engine.generate([5], LONG))
    theirs = await asyncio.to_thread(elsewhere)
    assert (await mine).token_ids[:3] == tuple(ShadowModel().expected([5], 3))
    await settle(engine)
    del theirs


async def test_a_host_that_is_blocked_for_long_gets_all_in_one_delta(engine: AsyncEngine) -> None:
    before = engine.statistics().tokens_generated
    stream = engine.stream([5], LONG)
    await anext(stream)
    time.sleep(1.5)  # noqa: ASYNC251
    assert engine.statistics().tokens_generated - before == 400
    rest = [delta async for delta in stream]
    assert len(rest) <= 3


async def test_hooks_run_here(engine: AsyncEngine) -> None:
    loop, main = asyncio.get_running_loop(), threading.current_thread()
    seen: list[Any] = []

    async def on_loop(token_ids: Sequence[int], logits: np.ndarray) -> None:
        assert asyncio.get_running_loop() is loop
        assert (logits.dtype, logits.shape) == (np.float32, (512,))
        seen.append((NAME.get(), list(token_ids)))
        logits[:] = -np.inf
        logits[[7, 8]] = 0.0

    def elsewhere(token_ids: Sequence[int], logits: np.ndarray) -> np.ndarray:
        assert threading.current_thread() is not main
        assert np.flatnonzero(logits > -np.inf).tolist() == [7, 8]
        return np.where(np.arange(512) == 8, 1.0, logits)

    tokens: list[int] = []
    params = SamplingParams(temperature=0, max_tokens=3, logits_processors=[on_loop, elsewhere], on_token=tokens.append)
    NAME.set("somebody")
    done = await engine.generate([1], params)
    assert done.token_ids == (8, 8, 8)
    assert seen == [("somebody", [1]), ("somebody", [1, 8]), ("somebody", [1, 8, 8])]
    await eventually(lambda: tokens == [8, 8, 8])
    assert isinstance(engine._home, EngineProcess)
    streams = engine._home._core.streams
    await eventually(lambda: not streams._hooks)


async def test_hooks_that_fail(engine: AsyncEngine) -> None:
    class Own(Exception):
        pass

    raised = Own("of the host's")

    def fail(*_: Any) -> None:
        raise raised

    with pytest.raises(HookFailed, match=r"logits_processors: <function .*fail at .* failed: .*Own\(") as caught:
        await engine.generate([1], SamplingParams(logits_processors=[fail]))
    assert caught.value.__cause__ is raised
    with pytest.raises(HookFailed, match=r"^logits_processors must return logits of shape \(512,\), got \(3,\)$"):
        await engine.generate([1], SamplingParams(logits_processors=[lambda *_: [1.0, 2.0, 3.0]]))
    with pytest.raises(HookFailed, match="on_token"):
        await engine.generate([1], SamplingParams(on_token=fail))
    assert len((await engine.generate([5], GREEDY)).token_ids) == 20
    await settle(engine)


class Unsent(dict[str, Any]):
    """A message that raises when it is packed."""

    def items(self) -> Any:
        """As dict has it."""
        raise Unshown


async def test_errors_that_cannot_be_shown() -> None:
    async with AsyncEngine(ShadowModel(), isolation="process") as engine:
        mate = asyncio.create_task(engine.generate([5], LONG))
        with pytest.raises(HookFailed, match="Unshown object"):
            await engine.generate([1], SamplingParams(on_token=fail_unshown))
        with pytest.raises(InvalidPromptError, match=r"cannot be sent.*Unshown object"):
            await engine.generate([Unsent()], GREEDY)
        assert len((await mate).token_ids) == LONG.max_tokens


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_slow_hook_stalls_only_its_row_and_is_given_up(tokenizer: Tokenizer, is_async: bool) -> None:
    cancelled: list[bool] = []

    async def slow(*_: Any) -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    gate = threading.Event()

    def blocked(*_: Any) -> None:
        gate.wait(60)

    params = SamplingParams(logits_processors=[slow if is_async else blocked])
    async with AsyncEngine(ShadowModel(latency=0.002), isolation="process", hook_timeout=1.0) as engine:
        stalled = asyncio.create_task(engine.generate([1], params))
        await asyncio.sleep(0.1)
        start = time.monotonic()
        await engine.generate([5], GREEDY)
        assert not stalled.done()
        assert time.monotonic() - start < 0.9
        with pytest.raises(HookFailed, match="took more than 1 seconds"):
            await stalled
        await settle(engine)
        await eventually(lambda: not is_async or cancelled == [True])
    gate.set()


async def test_a_storm_of_cancels(engine: AsyncEngine) -> None:
    async def one(n: int) -> None:
        if n % 3 == 0:
            done = await engine.generate([n], GREEDY)
            assert list(done.token_ids) == ShadowModel().expected([n], 20)
            return
        task = asyncio.create_task(engine.generate([n, 1], LONG if n % 2 else SamplingParams(n=2, max_tokens=300)))
        await asyncio.sleep((n * 7 % 50) / 100)
        if n % 5 == 0:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])

    await asyncio.gather(*(one(n) for n in range(150)))
    await settle(engine)
    assert isinstance(engine._home, EngineProcess)
    assert not engine._home._core.streams.numbers()
    statistics = engine.statistics()
    assert statistics.blocks_cached + statistics.blocks_free == statistics.blocks_total


# --- the engine's life ---


@pytest.mark.usefixtures("nothing_left")
async def test_closing_ends_streams_or_lets_them_go_on() -> None:
    async with AsyncEngine(ShadowModel(latency=0.005), isolation="process") as engine:
        stream = engine.stream([5], LONG)
        await anext(stream)
        asking = asyncio.create_task(engine.generate([6], LONG))
        await asyncio.sleep(0.05)
    for reading in (stream.result(), asking):
        with pytest.raises(EngineClosed):
            await reading
    for use in (engine.generate([5]), engine.start(), engine.tokenize("x")):
        with pytest.raises(EngineClosed):
            await use
    assert engine.state is EngineState.CLOSED
    assert engine.statistics().blocks_used == 0
    await engine.aclose()

    engine = AsyncEngine(ShadowModel(latency=0.002), isolation="process")
    await engine.start()
    running = asyncio.create_task(engine.generate([5], SamplingParams(temperature=0, max_tokens=50)))
    await asyncio.sleep(0.05)
    closing = asyncio.create_task(engine.aclose(drain=20))
    await asyncio.sleep(0.01)
    with pytest.raises(EngineClosed):
        await engine.generate([6])
    assert len((await running).token_ids) == 50
    await closing
    assert engine.statistics().tokens_generated == 50


@pytest.mark.usefixtures("nothing_left")
async def test_cancelling_aclose_cuts_the_drain() -> None:
    engine = AsyncEngine(ShadowModel(latency=0.05), isolation="process")
    await engine.start()
    running = asyncio.create_task(engine.generate([5], LONG))
    await asyncio.sleep(0.2)
    start = time.monotonic()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await engine.aclose(drain=60)
    assert time.monotonic() - start < 10
    with pytest.raises(EngineClosed):
        await running


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("load", [pytest.param(never_loads, marks=pytest.mark.full), blocks_its_process])
async def test_closing_while_it_loads(load: Any) -> None:
    engine = AsyncEngine(load, isolation="process")
    starting = asyncio.create_task(engine.start())
    await asyncio.sleep(1.0)
    assert engine.state is EngineState.LOADING
    start = time.monotonic()
    await engine.aclose()
    assert time.monotonic() - start < 3
    with pytest.raises(EngineClosed):
        await starting
    again = AsyncEngine(load, isolation="process")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await again.start()
    await again.aclose()


@pytest.mark.usefixtures("nothing_left")
async def test_errors_of_loading_reach_start(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="no-such-folder"):
        await AsyncEngine(str(tmp_path / "no-such-folder"), isolation="process").start()
    engine = AsyncEngine(CountedModel(tmp_path / "a", be_wrong_by_name), isolation="process")
    for _ in range(2):  # it may be tried again
        with pytest.raises(InsufficientMemoryError, match="2 TB") as caught:
            await engine.start()
        assert isinstance(caught.value.__cause__, MemoryError)
        assert engine.state is EngineState.NEW
    with pytest.raises(KeyError, match="no such thing"):
        await AsyncEngine(CountedModel(tmp_path / "b", be_wrong), isolation="process").start()
    with pytest.raises(ConfigError, match="num_blocks"):
        await AsyncEngine(ShadowModel(groups=(CacheGroup(),) * 3), isolation="process", num_blocks=2).start()


async def test_a_loader_that_cannot_cross_is_refused() -> None:
    async def load(*_: Any) -> Any: ...

    for loader in (load, lambda *_: None):
        with pytest.raises(ConfigError, match=r'isolation="process" sends the model loader .* by pickle'):
            await AsyncEngine(loader, isolation="process").start()  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="isolation must be one of thread, process"):
        AsyncEngine("x", isolation="fork")


@pytest.mark.usefixtures("nothing_left")
async def test_two_engines_and_several_loops() -> None:
    shadow = ShadowModel(latency=0.001)

    async def use(engine: AsyncEngine, n: int) -> None:
        assert list((await engine.generate([n], GREEDY)).token_ids) == shadow.expected([n], 20)

    async with (
        AsyncEngine(shadow, isolation="process") as one,
        AsyncEngine(shadow, isolation="process") as other,
        AsyncEngine(shadow) as third,
    ):
        assert child_of(one) != child_of(other)
        elsewhere = [asyncio.to_thread(lambda n=n: asyncio.run(use(one, n))) for n in range(3)]
        await asyncio.gather(use(one, 4), use(other, 5), use(third, 6), *elsewhere)


async def test_its_log_is_the_hosts(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="asyncllm"):
        async with AsyncEngine(ShadowModel(), isolation="process") as engine:
            with pytest.raises(HookFailed):
                await engine.generate([1], SamplingParams(on_token=lambda _: 1 / 0, max_tokens=2))
            hooked = SamplingParams(on_token=lambda _: 1 / 0, max_tokens=1)
            assert len((await engine.generate([1], hooked)).token_ids) == 1
            await eventually(lambda: "a request has ended, and then" in caplog.text)


async def test_dropping_the_engine_ends_the_process() -> None:
    engine = AsyncEngine(ShadowModel(), isolation="process")
    await engine.start()
    pid = child_of(engine)
    del engine
    gc.collect()
    await eventually(lambda: not is_there(pid), 10)
