"""Functions of the host's that are called between two tokens, through the whole engine over the shadow device."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import gc
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from asyncllm import AsyncEngine, SamplingParams
from asyncllm.engine.execution.sampler import SampledRows, sample
from asyncllm.engine.hook_driver import HookDriver, HookedRequest, Hooks, HostLogits
from asyncllm.engine.hook_place import LoopPlace
from asyncllm.engine.plan import Adjustment, RowLogits, RowSampling
from asyncllm.errors import HookFailed, InvalidParamsError
from asyncllm.params import RepetitionDetection
from asyncllm.testing.shadow_engine import ShadowModel
from tests.engine.conftest import settled
from tests.engine.constraints import Rounds, constrained
from tests.engine.unshown import fail_unshown

VOCAB_SIZE = 512
RUN_AHEAD = pytest.mark.parametrize("run_ahead", [0, 1, 2])
NAME: contextvars.ContextVar[str] = contextvars.ContextVar("name", default="nobody")


def only(token_id: int, logits: np.ndarray) -> None:
    """Leave one token."""
    kept = logits[token_id]
    logits[:] = -np.inf
    logits[token_id] = 0.0 if kept == -np.inf else kept


def counting(token_ids: Sequence[int], logits: np.ndarray) -> None:
    only((7 * len(token_ids)) % VOCAB_SIZE, logits)


async def counting_slowly(token_ids: Sequence[int], logits: np.ndarray) -> None:
    await asyncio.sleep(0)
    counting(token_ids, logits)


def counted(prompt: Sequence[int], length: int) -> list[int]:
    return [(7 * n) % VOCAB_SIZE for n in range(len(prompt), len(prompt) + length)]


def params(length: int = 12, **changes: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": length, **changes})


@RUN_AHEAD
@pytest.mark.parametrize(
    "processor", [counting, counting_slowly, functools.partial(counting_slowly)], ids=["plain", "async", "partial"]
)
async def test_a_processor_decides(processor: Callable[..., Any], run_ahead: int) -> None:
    shadow = ShadowModel()
    async with AsyncEngine(shadow, run_ahead=run_ahead, max_num_seqs=4) as engine:

        async def one(n: int) -> None:
            prompt, length = [n] * (n + 1), 5 + n
            hooked = n % 2 == 0
            done = await engine.generate(prompt, params(length, logits_processors=[processor] if hooked else []))
            assert list(done.token_ids) == (counted(prompt, length) if hooked else shadow.expected(prompt, length))

        await asyncio.gather(*(one(n) for n in range(10)))
        await settled(engine, shadow)


@RUN_AHEAD
async def test_preempted_rows_are_processed_again(run_ahead: int) -> None:
    shadow = ShadowModel()
    async with AsyncEngine(shadow, run_ahead=run_ahead, num_blocks=6) as engine:
        done = await asyncio.gather(*(engine.generate([n], params(60, logits_processors=[counting])) for n in range(5)))
        assert [list(each.token_ids) for each in done] == [counted([n], 60) for n in range(5)]
        assert engine.statistics().preemptions > 0
        await settled(engine, shadow)


async def test_processors_follow_each_other_and_see_what_is_banned() -> None:
    seen: list[tuple[int, ...]] = []

    def first(token_ids: Sequence[int], logits: np.ndarray) -> np.ndarray:
        assert logits.dtype == np.float32
        assert logits.shape == (VOCAB_SIZE,)
        seen.append(tuple(np.flatnonzero(logits > -np.inf)))
        return np.where(np.arange(VOCAB_SIZE) % 2 == 0, logits, -np.inf)

    async def second(token_ids: Sequence[int], logits: np.ndarray) -> list[float]:
        left = np.flatnonzero(logits > -np.inf)
        assert (left % 2 == 0).all()
        return [float(i == left[-1]) for i in range(VOCAB_SIZE)]

    shadow = ShadowModel()
    async with AsyncEngine(shadow) as engine:
        hooked = params(3, logits_processors=[first, second], allowed_token_ids=[4, 5, 6, 8, 9])
        assert (await engine.generate([1], hooked)).token_ids == (8, 8, 8)
        assert seen == [(4, 5, 6, 8, 9)] * 3


async def test_an_infinite_logit_decides() -> None:
    """At any temperature, and through the sampler itself."""

    async def sure(token_ids: Sequence[int], logits: np.ndarray) -> None:
        logits[40] = np.inf
        logits[50] = np.finfo(np.float32).min

    bound: list[Adjustment] = []
    sampling = RowSampling(temperature=0.1, top_k=0, top_p=1.0, min_p=0.0, seed=0, late=True, reads_logits=True)
    place = LoopPlace(asyncio.get_running_loop(), contextvars.copy_context())
    driver = HookDriver(HookedRequest(Hooks([sure], None), sampling, 1, 5.0), place, bound.append)
    driver.take_logits(HostLogits(1, np.zeros(VOCAB_SIZE, np.float32)))
    driver.take_adjustment([1], Adjustment())
    driver.end()
    await driver.drive()
    (adjustment,) = bound
    assert isinstance(adjustment.bias, RowLogits)
    rows = SampledRows(
        temperature=np.array([0.1], np.float32),
        top_k=np.array([0], np.int64),
        top_p=np.array([1], np.float32),
        min_p=np.array([0], np.float32),
        seed=np.array([0], np.uint64),
        choice=np.array([0], np.int64),
        position=np.array([1], np.int64),
        biases=[(0, adjustment.bias)],
    )
    assert sample(torch.zeros(1, VOCAB_SIZE), rows).tolist() == [40]


async def test_slow_hooks_do_not_use_up_each_others_time() -> None:
    """Each of them has less time than all together would take on 32 threads."""

    def slow(*_: Any) -> None:
        time.sleep(0.6)

    shadow = ShadowModel()
    async with AsyncEngine(shadow, hook_timeout=1.1, max_num_seqs=64) as engine:
        hooked = params(1, logits_processors=[slow])
        done = await asyncio.gather(*(engine.generate([n + 1], hooked) for n in range(64)))
        assert [list(each.token_ids) for each in done] == [shadow.expected([n + 1], 1) for n in range(64)]
        await settled(engine, shadow)


def test_a_hook_that_never_returns_does_not_keep_the_interpreter() -> None:
    code = """
import asyncio, threading
from asyncllm import AsyncEngine, SamplingParams
from asyncllm.errors import HookFailed
from asyncllm.testing.shadow_engine import ShadowModel

async def main():
    async with AsyncEngine(ShadowModel(), hook_timeout=0.05) as engine:
        hooked = SamplingParams(logits_processors=[lambda *_: threading.Event().wait()])
        try:
            await engine.generate([5], hooked)
        except HookFailed:
            print("failed")

asyncio.run(main())
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout == "failed\n"
    assert not ended.stderr


async def test_where_hooks_run() -> None:
    """Async ones on the request's loop with its context, which they share; plain ones elsewhere, with a copy."""
    loop, main = asyncio.get_running_loop(), threading.current_thread()
    names: list[str] = []

    async def on_loop(token_ids: Sequence[int], logits: np.ndarray) -> None:
        assert asyncio.get_running_loop() is loop
        names.append(NAME.get())
        NAME.set(NAME.get() + "!")

    def elsewhere(token_ids: Sequence[int], logits: np.ndarray) -> None:
        assert threading.current_thread() is not main
        names.append(NAME.get())

    async with AsyncEngine(ShadowModel()) as engine:
        NAME.set("somebody")
        stream = engine.stream([1], params(2, logits_processors=[elsewhere, on_loop]))
        await stream.start()
        NAME.set("another")
        await stream.result()
    assert names == ["somebody", "somebody", "somebody!", "somebody!"]
    assert NAME.get() == "another"


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_slow_hook_stalls_only_its_row(is_async: bool) -> None:
    async def slow(token_ids: Sequence[int], logits: np.ndarray) -> None:
        await asyncio.sleep(0.4)

    def plain(token_ids: Sequence[int], logits: np.ndarray) -> None:
        time.sleep(0.4)

    shadow = ShadowModel(latency=0.002)
    async with AsyncEngine(shadow) as engine:
        hooked = asyncio.create_task(engine.generate([5], params(2, logits_processors=[slow if is_async else plain])))
        await asyncio.sleep(0.05)
        start = time.monotonic()
        await engine.generate([1, 2], params(50))
        assert time.monotonic() - start < 0.35
        assert not hooked.done()
        assert list((await hooked).token_ids) == shadow.expected([5], 2)
        await settled(engine, shadow)


def fail(*_: Any) -> None:
    raise ZeroDivisionError("no idea")


async def fail_later(*_: Any) -> None:
    await asyncio.sleep(0)
    raise ZeroDivisionError("no idea")


def leave(*_: Any) -> None:
    raise SystemExit("no idea")


def stop_iteration(*_: Any) -> None:
    raise StopIteration("no idea")


def time_out(*_: Any) -> None:
    raise TimeoutError("no idea")


class Nameless:
    """A function that cannot be shown."""

    def __repr__(self) -> str:
        raise ZeroDivisionError

    def __call__(self, *_: Any) -> None:
        raise ValueError("no idea")


def halve(token_ids: Sequence[int], logits: np.ndarray) -> None:
    logits.resize((len(logits) // 2,), refcheck=False)


def not_a_number(token_ids: Sequence[int], logits: np.ndarray) -> np.ndarray:
    return logits * np.nan


FAULTS: dict[str, tuple[Callable[..., Any], str]] = {
    "plain": (fail, "ZeroDivisionError.*no idea"),
    "async": (fail_later, "ZeroDivisionError.*no idea"),
    "exit": (leave, "SystemExit.*no idea"),
    "stop iteration": (stop_iteration, "StopIteration.*no idea"),
    "own timeout": (time_out, "TimeoutError.*no idea"),
    "shape": (lambda token_ids, logits: logits[:-1], "shape"),
    "nothing left": (lambda token_ids, logits: logits.fill(-np.inf), "left no token"),
    "not a number": (not_a_number, "left no token"),
    "no array": (lambda token_ids, logits: "abc", "abc"),
    "unshown": (fail_unshown, "Unshown object"),
    "nameless": (Nameless(), "Nameless object.*no idea"),
    "resized": (halve, r"shape \(512,\), got \(256,\)"),
    "too large": (lambda token_ids, logits: [10**400] * len(logits), "must return logits"),
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_failing_processor_ends_its_request_alone(fault: str) -> None:
    processor, message = FAULTS[fault]
    shadow = ShadowModel()
    async with AsyncEngine(shadow) as engine:
        mate = asyncio.create_task(engine.generate([1, 2], params(40)))
        with pytest.raises(HookFailed, match=message):
            await engine.generate([5], params(logits_processors=[processor]))
        assert list((await mate).token_ids) == shadow.expected([1, 2], 40)
        await settled(engine, shadow)


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_hook_that_takes_too_long(is_async: bool) -> None:
    cancelled = asyncio.Event()
    release = threading.Event()

    async def hang(*_: Any) -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    shadow = ShadowModel()
    async with AsyncEngine(shadow, hook_timeout=0.05) as engine:
        processor = hang if is_async else lambda *_: release.wait(60)
        with pytest.raises(HookFailed, match=r"more than 0\.05 seconds"):
            await engine.generate([5], params(logits_processors=[processor]))
        if is_async:
            await asyncio.wait_for(cancelled.wait(), 5)
        await settled(engine, shadow)
    release.set()


@RUN_AHEAD
async def test_on_token_sees_every_token_before_the_next_one(run_ahead: int) -> None:
    """Forced ones and the last one too."""
    seen: list[int] = []
    delivered: list[int] = []

    async def on_token(token_id: int) -> None:
        seen.append(token_id)
        await asyncio.sleep(0.001)
        assert len(seen) >= len(delivered) - 5  # five are forced at once

    shadow = ShadowModel()
    forcing = Rounds(VOCAB_SIZE, [None], forces={0: (9, 8), 4: tuple(range(70, 75))})
    async with AsyncEngine(constrained(shadow, lambda params: forcing.copy()), run_ahead=run_ahead) as engine:
        async for delta in engine.stream([5], params(14, on_token=on_token)):
            delivered += delta.token_ids
        await settled(engine, shadow)
    assert seen == delivered
    assert len(seen) == 14


@pytest.mark.parametrize("stop", [["big"], ["world"], []])
async def test_on_token_sees_no_forced_token_behind_a_stop_string(tokenizer: Any, stop: list[str]) -> None:
    seen: list[int] = []
    word = tuple(tokenizer.encode("Hello big world", add_special_tokens=False))
    forcing = Rounds(VOCAB_SIZE, [[65]], forces={2: word})
    shadow = ShadowModel(tokenizer=tokenizer)
    async with AsyncEngine(constrained(shadow, lambda params: forcing.copy())) as engine:
        done = await engine.generate([5, 6], params(2 + len(word), on_token=seen.append, stop=stop))
        await settled(engine, shadow)
    assert tuple(seen) == done.token_ids
    assert (done.finish_reason == "stop") == bool(stop)


async def test_hooks_are_not_called_where_no_tokens_are_asked_for() -> None:
    seen: list[Any] = []
    hooks = {"on_token": seen.append, "logits_processors": [lambda *args: seen.append(args)]}
    async with AsyncEngine(ShadowModel()) as engine:
        done = await engine.generate([5, 6, 7], params(0, prompt_logprobs=1, **hooks))
        assert done.token_ids == ()
    assert not seen


@pytest.mark.parametrize("is_async", [False, True])
async def test_on_token_hears_of_the_last_token_though_the_engine_closes(is_async: bool) -> None:
    seen: list[int] = []

    async def slow(token_id: int) -> None:
        await asyncio.sleep(0.2)
        seen.append(token_id)

    def plain(token_id: int) -> None:
        time.sleep(0.2)
        seen.append(token_id)

    async with AsyncEngine(ShadowModel()) as engine:
        done = await engine.generate([5], params(2, on_token=slow if is_async else plain))
    assert tuple(seen) == done.token_ids


async def test_on_token_that_raises_ends_its_request() -> None:
    seen: list[int] = []

    def on_token(token_id: int) -> None:
        seen.append(token_id)
        if len(seen) == 3:
            raise ZeroDivisionError("enough")

    shadow = ShadowModel()
    async with AsyncEngine(shadow) as engine:
        with pytest.raises(HookFailed, match="enough"):
            await engine.generate([5], params(30, on_token=on_token))
        assert seen == shadow.expected([5], 3)
        await settled(engine, shadow)


@pytest.mark.parametrize("way", ["abort", "drop", "close engine"])
async def test_nothing_is_left_of_a_hook(way: str) -> None:
    begun, cancelled = asyncio.Event(), asyncio.Event()

    async def hang(*_: Any) -> None:
        begun.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    shadow = ShadowModel()
    async with AsyncEngine(shadow) as engine:
        stream = engine.stream([5], params(logits_processors=[hang]), request_id="r")
        await stream.start()
        await asyncio.wait_for(begun.wait(), 5)
        if way == "abort":
            engine.abort("r")
            assert (await stream.result()).finish_reason == "abort"
        elif way == "drop":
            del stream
            gc.collect()
        if way != "close engine":
            await asyncio.wait_for(cancelled.wait(), 5)
            await settled(engine, shadow)
    await asyncio.wait_for(cancelled.wait(), 5)
    assert [task for task in asyncio.all_tasks() if "hang" in repr(task)] == []


async def test_each_choice_is_processed() -> None:
    shadow = ShadowModel()
    async with AsyncEngine(shadow, max_num_seqs=2) as engine:
        done = await engine.generate([5], params(9, n=3, logits_processors=[counting]))
        assert [list(choice.token_ids) for choice in done.choices] == [counted([5], 9)] * 3
        await settled(engine, shadow)


# --- what works through the same mechanism ---


async def test_words_of_several_tokens_never_come(tokenizer: Any) -> None:
    shadow = ShadowModel(tokenizer=tokenizer)
    async with AsyncEngine(shadow) as engine:
        free = await engine.generate([3, 4], params(40))
        pairs = list(zip(free.token_ids, free.token_ids[1:], strict=False))
        word = next(w for a, b in pairs if len(tokenizer.encode(w := tokenizer.decode([a, b]))) == 2)
        banned = await engine.generate([3, 4], params(40, bad_words=[word]))
        assert word in free.text
        assert word not in banned.text
        await settled(engine, shadow)


@RUN_AHEAD
async def test_a_loop_is_ended(run_ahead: int) -> None:
    """Of the tokens 1 2 3 1 2 3 …, the third round is the last."""
    shadow = ShadowModel()
    loop = Rounds(VOCAB_SIZE, [[40], [1], [2], [3], [1], [2], [3], [1], [2], [3], [1], [2], [3]])
    load = constrained(shadow, lambda params: loop.copy())
    detection = {"max_pattern_size": 8, "min_pattern_size": 2, "min_count": 3}
    async with AsyncEngine(load, run_ahead=run_ahead) as engine:
        done = await engine.generate([5], params(40, repetition_detection=RepetitionDetection(**detection)))
        assert done.token_ids == (40, 1, 2, 3, 1, 2, 3, 1, 2, 3)
        assert (done.finish_reason, done.stop_reason) == ("stop", "repetition")
        await settled(engine, shadow)


async def test_a_budget_for_thinking_must_be_able_to_end_it(tokenizer: Any) -> None:
    shadow = ShadowModel(tokenizer=tokenizer, chat_template="{{ '<think></think>' }}")
    end = tokenizer.encode("</think>", add_special_tokens=False)
    prompt = tokenizer.encode("<think>", add_special_tokens=False)
    letter = tokenizer.decode([end[2]])
    async with AsyncEngine(shadow) as engine:
        for changes, name in (
            ({"allowed_token_ids": [*range(40, 60), *end[1:]]}, "allowed_token_ids"),
            ({"bad_words": [letter]}, "bad_words"),
            ({"bad_words": ["</think>"]}, "bad_words"),
        ):
            for more in ({}, {"logprobs": 1}):
                with pytest.raises(InvalidParamsError, match=f"thinking_token_budget with {name}"):
                    await engine.generate(prompt, params(9, thinking_token_budget=1, **changes, **more))
        legal = {"allowed_token_ids": [*range(40, 60), *end], "bad_words": ["Z", "xyz"], "logprobs": 1}
        done = await engine.generate(prompt, params(20, thinking_token_budget=1, **legal))
        assert list(done.token_ids[1 : 1 + len(end)]) == end
        await settled(engine, shadow)


async def test_a_budget_for_thinking_needs_a_model_that_thinks() -> None:
    async with AsyncEngine(ShadowModel()) as engine:
        with pytest.raises(InvalidParamsError, match="thinking_token_budget"):
            await engine.generate([5], params(thinking_token_budget=5))
