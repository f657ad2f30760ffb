from __future__ import annotations

import asyncio
import contextvars
import gc
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, cast

import numpy as np
import pytest

from asyncllm.engine.command_queue import COMMANDS_A_TURN, CommandQueue
from asyncllm.engine.mailbox import Mailbox, Stage
from asyncllm.engine.preparation import QUICK_IDS
from asyncllm.errors import (
    ContextLengthError,
    DuplicateRequestError,
    EngineClosed,
    EngineDead,
    InvalidParamsError,
    InvalidPromptError,
    RequestFailed,
)
from asyncllm.inputs.tokenizer import Tokenizer
from asyncllm.params import SamplingParams
from asyncllm.results import FinishReason
from tests.engine.conftest import eventually
from tests.engine.hand_runner import HandDriven, InlineExecutor, settle
from tests.engine.unshown import Unshown


class ConsumerLoop(asyncio.AbstractEventLoop):
    """A consumers' loop that only notes who wakes it."""

    def __init__(self) -> None:
        self.wake_ups: list[list[Mailbox]] = []
        self.closed = False
        self.runs = True

    def call_soon_threadsafe(self, callback: Callable[..., object], *args: Any, context: object = None) -> Any:
        if self.closed:
            raise RuntimeError("Event loop is closed")
        self.wake_ups.append(args[0])
        if self.runs:
            callback(*args)

    def is_closed(self) -> bool:
        return self.closed

    def wait_at(self, *mailboxes: Mailbox) -> None:
        """As if a task waited for the next token of each."""
        for mailbox in mailboxes:
            mailbox.waiter = asyncio.get_running_loop().create_future()


# --- the order of a step ---


@pytest.mark.parametrize("run_ahead", [0, 1, 2])
async def test_steps_are_launched_ahead_and_before_delivery(run_ahead: int) -> None:
    hand = HandDriven(run_ahead=run_ahead)
    seen: list[tuple[int, int]] = []
    mailbox = await hand.open()
    hand.runner.on_launch = lambda plan: seen.append((plan.step, len(mailbox.choices[0].ids)))
    assert len(hand.runner.waiting) == run_ahead + 1
    await hand.runner.complete(3)
    assert len(mailbox.choices[0].ids) == 3
    # When step n + run_ahead + 1 was launched, n tokens had been delivered: step n's own came after.
    assert seen == [(n + run_ahead + 1, n) for n in range(3)]


async def test_a_step_wakes_each_loop_once() -> None:
    hand = HandDriven(max_num_seqs=64, num_blocks=128)
    loops = [ConsumerLoop(), ConsumerLoop()]
    mailboxes = [await hand.open((5, n), SamplingParams(max_tokens=20), loop=loops[n % 2]) for n in range(40)]
    while any(mailbox.stage is not Stage.RUNNING for mailbox in mailboxes):
        await hand.runner.complete()
    await hand.runner.complete(2)
    for loop in loops:
        loop.wake_ups.clear()
    for _ in range(5):
        for n, loop in enumerate(loops):
            loop.wait_at(*mailboxes[n::2])
        await hand.runner.complete()
    for n, loop in enumerate(loops):
        assert [sorted(map(id, batch)) for batch in loop.wake_ups] == [sorted(map(id, mailboxes[n::2]))] * 5


async def test_a_blocked_loop_is_not_woken_again_and_again() -> None:
    hand = HandDriven()
    loop = ConsumerLoop()
    mailboxes = [await hand.open((5, n), SamplingParams(max_tokens=50), loop=loop) for n in range(4)]
    loop.wait_at(*mailboxes)
    loop.runs = False
    await hand.runner.complete(30)
    assert sum(map(len, loop.wake_ups[-1:])) <= 4
    before = len(loop.wake_ups)
    await hand.runner.complete(10)
    assert len(loop.wake_ups) == before
    assert all(len(mailbox.choices[0].ids) > 30 for mailbox in mailboxes)  # nothing is lost meanwhile


async def test_nobody_is_woken_for_streams_that_nobody_waits_at() -> None:
    hand = HandDriven()
    loop = ConsumerLoop()
    await hand.open(params=SamplingParams(max_tokens=50), loop=loop)
    await hand.runner.complete(2)
    before = len(loop.wake_ups)
    await hand.runner.complete(20)
    assert len(loop.wake_ups) == before


async def test_step_times_and_counts() -> None:
    hand = HandDriven()
    assert hand.core.statistics().blocks_free == 64
    first, second = await hand.open(), await hand.open()
    await asyncio.sleep(0.05)
    statistics = hand.core.statistics()
    assert (statistics.requests_running, statistics.requests_waiting) == (1, 1)
    while hand.runner.waiting:
        await hand.runner.complete()
    statistics = hand.core.statistics()
    assert first.done
    assert second.done
    assert statistics.step_times.steps == len(hand.runner.plans)
    assert statistics.step_times.wait_seconds > 0.04
    assert statistics.step_times.schedule_seconds > 0
    assert statistics.tokens_generated == 16
    assert statistics.requests_finished == 2
    assert statistics.requests_aborted == 0
    assert (statistics.blocks_used, statistics.rows_used, statistics.requests_running) == (0, 0, 0)
    assert statistics.memory_bytes == {"weights": 5}
    await asyncio.sleep(0.1)
    assert hand.core.statistics().step_times.wait_seconds == statistics.step_times.wait_seconds  # idle is not waiting


async def test_many_commands_do_not_hold_up_a_step() -> None:
    hand = HandDriven()
    running = await hand.open(params=SamplingParams(max_tokens=200))
    for n in range(5 * COMMANDS_A_TURN):
        hand.core.abort(f"nobody {n}")
    left: list[int] = []
    hand.runner.on_launch = lambda plan: left.append(len(hand.core._commands))
    await hand.runner.complete()
    assert running.choices[0].ids
    assert left[0] > COMMANDS_A_TURN
    assert not hand.core._commands


# --- endings ---


async def test_max_tokens_of_zero_is_an_empty_answer() -> None:
    hand = HandDriven()
    mailbox = await hand.open(params=SamplingParams(max_tokens=0))
    assert mailbox.ending is not None
    assert mailbox.choices[0].end.reason is FinishReason.LENGTH
    assert (mailbox.ending.usage.prompt_tokens, mailbox.ending.usage.completion_tokens) == (3, 0)
    assert mailbox.released
    assert not hand.runner.plans
    refused = await hand.open(range(3, 300), SamplingParams(max_tokens=0))
    assert isinstance(refused.failure, ContextLengthError)


async def test_stop_ids_and_eos(tokenizer: Tokenizer) -> None:
    hand = HandDriven(tokenizer)
    eos = await hand.open()
    own = await hand.open(params=SamplingParams(stop_token_ids=[7]))
    kept = await hand.open(params=SamplingParams(stop_token_ids=[7], include_stop_str_in_output=True))
    ignored = await hand.open(params=SamplingParams(ignore_eos=True, max_tokens=4))
    later = await hand.open(params=SamplingParams(min_tokens=3, max_tokens=9))
    plans = [join for plan in hand.runner.plans for join in plan.joins]
    while any(len(mailbox.choices[0].ids) < 1 for mailbox in (own, kept, later)):
        await hand.runner.complete()
    plans = [join for plan in hand.runner.plans for join in plan.joins]
    assert [join.sampling.suppress_before for join in plans] == [0, 0, 0, 0, 3 + 3]
    assert plans[-1].sampling.suppressed == (2,)
    hand.runner.token = 2
    while hand.runner.waiting:
        await hand.runner.complete()
    letter = tokenizer.decode([7])
    for mailbox, reason, stop_reason, text in (
        (eos, "stop", None, letter * (len(eos.choices[0].ids) - 1)),
        (own, "stop", 7, ""),
        (kept, "stop", 7, letter),
        (ignored, "length", None, letter * ignored.choices[0].ids.count(7)),
        (later, "stop", None, letter * (len(later.choices[0].ids) - later.choices[0].ids.count(2))),
    ):
        assert mailbox.ending is not None
        assert (mailbox.choices[0].end.reason, mailbox.choices[0].end.stop_reason) == (reason, stop_reason)
        assert "".join(mailbox.choices[0].texts) + mailbox.choices[0].tail == text
        assert mailbox.ending.usage.completion_tokens == len(mailbox.choices[0].ids)
    assert eos.choices[0].ids[-1] == 2


async def test_a_stop_string_ends_the_request_and_what_is_on_its_way_is_dropped(tokenizer: Tokenizer) -> None:
    a, b, c = (tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "abc")
    for include, text in ((False, "a"), (True, "abb")):
        hand = HandDriven(tokenizer, run_ahead=2)
        params = SamplingParams(stop=["bb", "zz"], include_stop_str_in_output=include)
        mailbox = await hand.open(params=params)
        for token in (a, b, b, c, c, c):
            hand.runner.token = token
            if hand.runner.waiting:
                await hand.runner.complete()
        assert mailbox.ending is not None
        assert (mailbox.choices[0].end.reason, mailbox.choices[0].end.stop_reason) == ("stop", "bb")
        assert mailbox.choices[0].ids == [a, b, b]
        assert "".join(mailbox.choices[0].texts) + mailbox.choices[0].tail == text
        assert mailbox.released


async def test_a_stop_string_wins_over_the_length(tokenizer: Tokenizer) -> None:
    hand = HandDriven(tokenizer)
    (hand.runner.token,) = tokenizer.encode("b", add_special_tokens=False)
    mailbox = await hand.open(params=SamplingParams(stop="bb", max_tokens=2))
    while hand.runner.waiting:
        await hand.runner.complete()
    assert mailbox.ending is not None
    assert (mailbox.choices[0].end.reason, mailbox.choices[0].end.stop_reason) == ("stop", "bb")


async def test_no_stop_string_in_the_first_min_tokens(tokenizer: Tokenizer) -> None:
    hand = HandDriven(tokenizer)
    (hand.runner.token,) = tokenizer.encode("b", add_special_tokens=False)
    mailbox = await hand.open(params=SamplingParams(stop="bb", min_tokens=5, max_tokens=20))
    while hand.runner.waiting:
        await hand.runner.complete()
    assert mailbox.ending is not None
    assert (mailbox.choices[0].end.reason, mailbox.choices[0].end.stop_reason) == ("stop", "bb")
    assert "".join(mailbox.choices[0].texts) + mailbox.choices[0].tail == "b" * 5
    assert len(mailbox.choices[0].ids) == 7


async def test_withheld_text_comes_at_the_end(tokenizer: Tokenizer) -> None:
    hand = HandDriven(tokenizer)
    (hand.runner.token,) = tokenizer.encode("b", add_special_tokens=False)
    mailbox = await hand.open(params=SamplingParams(stop="bbbc", max_tokens=4))
    while hand.runner.waiting:
        await hand.runner.complete()
    assert "".join(mailbox.choices[0].texts) == "b"
    assert mailbox.ending is not None
    assert mailbox.choices[0].tail == "bbb"
    assert mailbox.choices[0].end.reason is FinishReason.LENGTH


async def test_deadlines() -> None:
    hand = HandDriven(max_num_seqs=1)
    running = await hand.open(deadline=0.03)
    waiting = await hand.open(deadline=0.03)
    late = await hand.open(deadline=-1.0)
    assert late.ending is not None
    await asyncio.sleep(0.05)
    while hand.runner.waiting:
        await hand.runner.complete()
    for mailbox in (running, waiting, late):
        assert mailbox.ending is not None
        assert mailbox.choices[0].end.reason is FinishReason.DEADLINE
        assert mailbox.released
    assert running.choices[0].ids
    assert waiting.ending is not None
    assert waiting.ending.metrics.scheduled is None


async def test_a_deadline_passes_while_no_step_runs() -> None:
    hand = HandDriven()
    scheduler = hand.core._scheduler
    schedule, end = scheduler.schedule, asyncio.get_running_loop().time() + 0.05
    scheduler.schedule = lambda now: schedule(now) if now >= end else None  # type: ignore[method-assign]
    mailbox = await hand.open(deadline=0.05)
    assert not hand.runner.plans
    await asyncio.sleep(0.1)
    assert mailbox.ending is not None
    assert mailbox.choices[0].end.reason is FinishReason.DEADLINE


# --- aborts ---


async def test_abort_in_every_stage(tokenizer: Tokenizer) -> None:
    with ThreadPoolExecutor(1) as workers:
        release = asyncio.Event()
        hand = HandDriven(tokenizer, workers=workers, max_num_seqs=1)
        started = asyncio.Event()
        loop = asyncio.get_running_loop()
        prepare = hand.core._preparation.prepare

        def slow(submission: Any) -> Any:
            loop.call_soon_threadsafe(started.set)
            asyncio.run_coroutine_threadsafe(release.wait(), loop).result()
            return prepare(submission)

        hand.core._preparation.prepare = slow  # type: ignore[method-assign]
        preparing = await hand.open("a text, which a worker prepares", request_id="a")
        await started.wait()
        assert preparing.stage is Stage.PREPARING
        hand.core.abort("a")
        await settle()
        assert preparing.released
        release.set()
        await asyncio.sleep(0.05)  # its preparation is done now, and dropped
        assert not hand.runner.plans
        hand.core._preparation.prepare = prepare  # type: ignore[method-assign]
        running, queued = await hand.open(request_id="b"), await hand.open(request_id="c")
        await eventually(lambda: queued.stage is Stage.QUEUED)
        assert running.stage is Stage.RUNNING
        hand.core.abort("c")
        hand.core.abort("b")
        await settle()
        assert queued.released
        assert running.done
        assert not running.released  # its launched steps may still write
        while hand.runner.waiting:
            await hand.runner.complete()
        assert running.released
        assert running.choices[0].ids == []
        for mailbox in (preparing, queued, running):
            assert mailbox.ending is not None
            assert mailbox.choices[0].end.reason is FinishReason.ABORT
        hand.core.abort("b")  # over: nothing happens
        await settle()
        assert hand.core.statistics().requests_aborted == 3
        assert hand.core.statistics().blocks_used == 0


async def test_the_requests_of_a_closed_loop_are_aborted_and_no_others() -> None:
    hand = HandDriven()
    gone, other = ConsumerLoop(), ConsumerLoop()
    orphans = [await hand.open(params=SamplingParams(max_tokens=100), loop=gone) for _ in range(3)]
    served = await hand.open(loop=other)
    await hand.runner.complete(2)
    gone.closed = True
    while hand.runner.waiting:
        await hand.runner.complete()
    assert all(mailbox.released and len(mailbox.choices[0].ids) < 5 for mailbox in orphans)
    assert len(served.choices[0].ids) == 8
    assert hand.core.statistics().requests_aborted == 3
    assert not hand.core._live._consumers


# --- faults ---


async def test_what_cannot_be_served_is_refused_and_others_go_on(tokenizer: Tokenizer) -> None:
    hand = HandDriven(tokenizer, num_blocks=8)
    good = await hand.open(request_id="good")
    for prompt, params, error in (
        ([], SamplingParams(), InvalidPromptError),
        ([-1], SamplingParams(), InvalidPromptError),
        ([512], SamplingParams(), InvalidPromptError),
        ([2**70], SamplingParams(), InvalidPromptError),
        ([1.5], SamplingParams(), InvalidPromptError),
        ([[1]], SamplingParams(), InvalidPromptError),
        ([True], SamplingParams(), InvalidPromptError),
        (None, SamplingParams(), InvalidPromptError),
        (5, SamplingParams(), InvalidPromptError),
        (b"bytes", SamplingParams(), InvalidPromptError),
        ("", SamplingParams(), InvalidPromptError),
        (list(range(200)), SamplingParams(), ContextLengthError),
        (list(range(128)), SamplingParams(), ContextLengthError),
        ([3], SamplingParams(stop_token_ids=[512]), InvalidParamsError),
    ):
        prompt_: Any = prompt
        mailbox = await hand.open(prompt_, params)
        assert isinstance(mailbox.failure, error), (prompt, mailbox.failure)
        assert mailbox.released
    duplicate = await hand.open(request_id="good")
    assert isinstance(duplicate.failure, DuplicateRequestError)
    while hand.runner.waiting:
        await hand.runner.complete()
    assert len(good.choices[0].ids) == 8
    again = await hand.open(request_id="good")
    assert again.failure is None


@pytest.mark.parametrize("run_ahead", [0, 1, 2])
async def test_a_failed_step_fails_its_requests_alone(run_ahead: int) -> None:
    hand = HandDriven(max_num_seqs=2, run_ahead=run_ahead)
    failing = [await hand.open() for _ in range(2)]
    waiting = await hand.open()
    await hand.runner.complete()
    cause = ValueError("a bad step")
    await hand.runner.fail(cause)
    while waiting.stage is not Stage.RUNNING:
        await hand.runner.fail(RuntimeError("what it left is of no use"))
    for mailbox in failing:
        assert isinstance(mailbox.failure, RequestFailed)
        assert mailbox.failure.__cause__ is cause
        assert mailbox.released
    assert failing[0].failure is not failing[1].failure
    while hand.runner.waiting:
        await hand.runner.complete()
    assert len(waiting.choices[0].ids) == 8
    assert hand.core.statistics().blocks_used == 0


async def test_results_behind_a_failed_step_are_dropped() -> None:
    hand = HandDriven(run_ahead=2)
    mailbox = await hand.open()
    await hand.runner.complete()
    await hand.runner.fail(ValueError("a bad step"))
    launched = len(hand.runner.plans)
    await hand.runner.complete()
    await hand.runner.complete()
    assert len(hand.runner.plans) == launched  # nothing is launched until all are in
    assert len(mailbox.choices[0].ids) == 1
    assert isinstance(mailbox.failure, RequestFailed)
    assert mailbox.released


@pytest.mark.parametrize("run_ahead", [0, 1, 2])
async def test_a_launch_that_raises_fails_its_step_and_not_the_one_before(run_ahead: int) -> None:
    hand = HandDriven(run_ahead=run_ahead)
    mailbox = await hand.open()
    await hand.runner.complete()

    def refuse(plan: object) -> None:
        raise OSError("no device")

    hand.runner.on_launch = refuse
    before = len(hand.runner.waiting)
    while hand.runner.waiting:
        await hand.runner.complete()
    assert len(mailbox.choices[0].ids) == 1 + before
    assert isinstance(mailbox.failure, RequestFailed)
    hand.runner.on_launch = lambda plan: None
    after = await hand.open()
    while hand.runner.waiting:
        await hand.runner.complete()
    assert len(after.choices[0].ids) == 8


async def test_a_text_that_fails_fails_alone(tokenizer: Tokenizer) -> None:
    hand = HandDriven(tokenizer)
    bad, good, at_end = await hand.open(), await hand.open(), await hand.open()

    def fault(*ids: object) -> str:
        raise ArithmeticError("a bad table")

    live = {request.mailbox: request.branches[0] for request in hand.core._live}
    live[bad].push = fault
    live[at_end].flush = fault
    while hand.runner.waiting:
        await hand.runner.complete()
    for mailbox in (bad, at_end):
        assert isinstance(mailbox.failure, RequestFailed)
        assert isinstance(mailbox.failure.__cause__, ArithmeticError)
        assert mailbox.released
    assert len(good.choices[0].ids) == 8
    assert hand.core.statistics().blocks_used == 0


@pytest.mark.parametrize(
    ("prompt", "fields", "quick"),
    [
        ((5, 6, 7), {}, True),
        ([5] * QUICK_IDS, {"seed": 3, "min_tokens": 2, "stop_token_ids": [9], "logprobs": 2}, True),
        ([5] * (QUICK_IDS + 1), {}, False),
        (np.array([5, 6], np.int32), {}, False),
        ([5, np.int64(6)], {}, False),
        ([], {}, False),
        ("text", {}, False),
        ([{"role": "user", "content": "text"}], {}, False),
        ([5], {"n": 2}, False),
        ([5], {"stop": "x"}, False),
        ([5], {"bad_words": ["x"]}, False),
        ([5], {"allowed_token_ids": [7, 8]}, False),
        ([5], {"logit_bias": dict.fromkeys(range(400), 1.0)}, False),
        ([5], {"on_token": print}, False),
        ([5], {"dry_multiplier": 1.0}, False),
    ],
    ids=str,
)
async def test_only_what_is_quick_is_prepared_without_a_worker(
    tokenizer: Tokenizer, prompt: Any, fields: dict[str, Any], quick: bool
) -> None:
    class Counted(InlineExecutor):
        calls = 0

        def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
            self.calls += 1
            return super().submit(fn, *args, **kwargs)

    workers = Counted()
    hand = HandDriven(tokenizer, workers=workers, max_model_len=1024, num_blocks=128, max_batched_tokens=1024)
    mailbox = await hand.open(prompt, SamplingParams(max_tokens=4, **fields))
    assert mailbox.stage is not Stage.PREPARING
    assert (workers.calls == 0) is quick


async def test_many_commands_wake_the_loop_once_and_a_failed_call_is_made_good() -> None:
    loop, done = asyncio.get_running_loop(), list[int]()
    calls = 0

    class Loop:
        def call_soon_threadsafe(self, callback: Callable[[], object], context: object) -> None:
            nonlocal calls
            calls += 1
            if calls == 1:
                raise KeyboardInterrupt
            loop.call_soon_threadsafe(callback)

    queue = CommandQueue(cast(asyncio.AbstractEventLoop, Loop()), contextvars.Context(), lambda work: work())
    with pytest.raises(KeyboardInterrupt):
        queue.post(done.append, 0)
    assert all(queue.post(done.append, n) for n in range(1, 5))
    assert calls == 2
    await settle()
    assert done == [*range(5)]
    queue.post(done.append, 5)
    await settle()
    assert (done[-1], calls) == (5, 3)


async def test_a_prompt_whose_error_cannot_be_shown_fails_alone() -> None:
    class Prompt(list[int]):
        def __len__(self) -> int:
            raise Unshown

    hand = HandDriven()
    refused = await hand.open(Prompt([5, 6]))
    mailbox = await hand.open([5, 6])
    assert "could not be prepared: " in str(refused.failure)
    assert "Unshown object" in str(refused.failure)
    assert mailbox.failure is None


async def test_a_panic_while_preparing_fails_alone(tokenizer: Tokenizer) -> None:
    class Panic(BaseException):
        """As pyo3's, which is no Exception."""

    def panic(submission: object) -> Any:
        raise Panic("index out of bounds")

    hand = HandDriven(tokenizer)
    prepare, hand.core._preparation.prepare = hand.core._preparation.prepare, panic  # type: ignore[method-assign]
    bad = await hand.open()
    assert isinstance(bad.failure, RequestFailed)
    assert isinstance(bad.failure.__cause__, Panic)
    hand.core._preparation.prepare = prepare  # type: ignore[method-assign]
    assert (await hand.open()).failure is None


async def test_a_dead_runner_ends_every_stream() -> None:
    hand = HandDriven(max_num_seqs=2)
    mailboxes = [await hand.open() for _ in range(4)]
    await hand.runner.complete()
    cause = OSError("illegal memory access")
    death = EngineDead("the device is gone")
    death.__cause__ = cause
    await hand.runner.fail(death)
    for mailbox in mailboxes:
        assert isinstance(mailbox.failure, EngineDead)
        assert mailbox.failure.__cause__ is death
        assert mailbox.released
    assert len({id(mailbox.failure) for mailbox in mailboxes}) == 4
    while hand.runner.waiting:
        await hand.runner.complete()
    refused = await hand.open()
    assert isinstance(refused.failure, EngineDead)
    hand.core.close(0)
    await asyncio.wait_for(hand.core.serve(), 1)


async def test_a_runner_that_is_dead_at_launch_ends_every_stream() -> None:
    hand = HandDriven()

    def refuse(plan: object) -> None:
        raise EngineDead("no device")

    hand.runner.on_launch = refuse
    mailbox = await hand.open()
    assert isinstance(mailbox.failure, EngineDead)
    assert isinstance((await hand.open()).failure, EngineDead)


@pytest.mark.parametrize("method", ["schedule", "apply", "take_released"])
async def test_a_fault_of_the_engine_itself_ends_every_stream(method: str) -> None:
    hand = HandDriven()
    mailbox = await hand.open()

    def fault(*args: object) -> Any:
        raise AssertionError("an invariant is broken")

    setattr(hand.core._scheduler, method, fault)
    await hand.runner.complete()
    assert isinstance(mailbox.failure, EngineDead)
    assert isinstance((await hand.open()).failure, EngineDead)
    hand.core.statistics()
    hand.core.close(0)
    await asyncio.wait_for(hand.core.serve(), 1)


# --- closing ---


async def test_close_ends_streams_once_the_drain_is_over() -> None:
    hand = HandDriven()
    running = await hand.open(params=SamplingParams(max_tokens=100))
    hand.core.close(0.05)
    await settle()
    assert isinstance((await hand.open()).failure, EngineClosed)
    await hand.runner.complete(3)
    assert not running.done
    served = asyncio.create_task(hand.core.serve())
    await asyncio.sleep(0.1)
    assert isinstance(running.failure, EngineClosed)
    assert not served.done()  # its launched steps may still write
    while hand.runner.waiting:
        await hand.runner.complete()
    await asyncio.wait_for(served, 1)
    assert len(running.choices[0].ids) == 3


async def test_close_returns_as_soon_as_everything_has_ended() -> None:
    hand = HandDriven()
    mailbox = await hand.open()
    hand.core.close(60)
    served = asyncio.create_task(hand.core.serve())
    while hand.runner.waiting:
        await hand.runner.complete()
    await asyncio.wait_for(served, 1)
    assert mailbox.ending is not None


async def test_a_second_close_may_cut_the_drain_short() -> None:
    hand = HandDriven()
    mailbox = await hand.open()
    hand.core.close(60)
    hand.core.close(0)
    while hand.runner.waiting:
        await hand.runner.complete()
    await asyncio.wait_for(hand.core.serve(), 1)
    assert isinstance(mailbox.failure, EngineClosed)


# --- what the engine must not hold ---


async def test_a_callers_context_does_not_live_on() -> None:
    class Session:
        pass

    variable: contextvars.ContextVar[Session] = contextvars.ContextVar("session")
    hand = HandDriven()

    async def caller() -> weakref.ref[Session]:
        session = Session()
        variable.set(session)
        await hand.open(params=SamplingParams(max_tokens=100))
        return weakref.ref(session)

    session = await asyncio.create_task(caller())
    await hand.runner.complete(3)
    gc.collect()
    assert session() is None


async def test_nothing_is_left_of_ended_requests() -> None:
    hand = HandDriven()
    mailboxes = [weakref.ref(await hand.open()) for _ in range(5)]
    while hand.runner.waiting:
        await hand.runner.complete()
    other = await hand.open((9, 9), SamplingParams(max_tokens=1))
    while hand.runner.waiting:
        await hand.runner.complete()
    gc.collect()
    assert not len(hand.core._live)
    assert not hand.core._live._names
    assert not hand.core._live._consumers
    assert [mailbox() for mailbox in mailboxes] == [None] * 5
    assert other.done
