"""Whatever ends a stream with an error comes behind all that the request had come to.

Once with every order in which the stream's reads can meet the engine's writes, and once with whole engines whose
consumer sleeps while they work.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncllm import AsyncEngine, SamplingParams, TokenDelta, TokenStream
from asyncllm.config import EngineConfig
from asyncllm.engine.execution.runner import ModelFacts, StepTicket
from asyncllm.engine.isolation.messages import Died, News
from asyncllm.engine.isolation.outlet import ChildMailbox, Outlet
from asyncllm.engine.mailbox import ChoiceBox, ChoiceEnd, Ending, Mailbox, Stage
from asyncllm.engine.model import ServedModel
from asyncllm.engine.plan import NO_TOKEN, CacheGroup, LateTokens, StepPlan, StepResult
from asyncllm.engine.preparation import ChatOptions, Submission
from asyncllm.errors import EngineClosed, EngineCrashed, EngineDead, HookFailed, RequestFailed, SamplingFailed
from asyncllm.inputs.tokenizer import Tokenizer
from asyncllm.metrics import RequestMetrics
from asyncllm.outputs.detokenizer import Detokenizer
from asyncllm.results import FinishReason, Usage
from tests.engine.conftest import eventually
from tests.engine.constraints import Rounds, constrained
from tests.engine.hand_runner import HandDriven, settle

# --- every order of reads and writes ---


class Writes:
    """What the engine's thread writes, some of it whenever the stream reads."""

    def __init__(self, writes: Iterator[Callable[[], object]], bursts: Sequence[int]) -> None:
        self._writes = writes
        self._bursts = iter(bursts)  # how many come before each read; at last, one
        self._busy = False

    def go_on(self) -> None:
        if self._busy:
            return
        self._busy = True
        for _ in range(next(self._bursts, 1)):
            for write in self._writes:
                write()
                break
        self._busy = False


class Ids(list[int]):
    """The engine's thread may write before they are looked at."""

    writes: Writes | None = None

    def __len__(self) -> int:
        if self.writes is not None:
            self.writes.go_on()
        return super().__len__()


def watched(name: str) -> property:
    def read(box: Any) -> Any:
        box.writes.go_on()
        return box.__dict__.get(name)

    def write(box: Any, value: Any) -> None:
        box.__dict__[name] = value

    return property(read, write)


class WatchedBox(ChoiceBox):
    end = watched("end")  # type: ignore[assignment]

    def __init__(self, writes: Writes) -> None:
        self.writes = writes
        super().__init__()
        self.ids = Ids()
        self.ids.writes = writes


class WatchedMailbox(Mailbox):
    ending = watched("ending")  # type: ignore[assignment]
    failure = watched("failure")  # type: ignore[assignment]

    def __init__(self, writes: Writes, choices: int) -> None:
        self.writes = writes
        super().__init__("watched", choices)
        self.choices = tuple(WatchedBox(writes) for _ in range(choices))


@st.composite
def histories(draw: st.DrawFn) -> tuple[int, list[tuple[str, int]], bool]:
    """The number of choices; what is written, ("token" or "end", choice) each; and whether the request fails."""
    choices = draw(st.integers(1, 3))
    steps = draw(st.lists(st.tuples(st.sampled_from(["token", "token", "token", "end"]), st.integers(0, choices - 1))))
    fails = draw(st.booleans())
    written: list[tuple[str, int]] = []
    open_choices = set(range(choices))
    for what, choice in steps:
        if choice in open_choices and (what == "token" or not fails or len(open_choices) > 1):
            written.append((what, choice))
            open_choices -= {choice} if what == "end" else set()
    if not fails:
        written += [("end", choice) for choice in sorted(open_choices)]
    return choices, written, fails


@settings(max_examples=300, deadline=None)
@given(history=histories(), bursts=st.lists(st.integers(0, 4), max_size=40), tails=st.booleans())
def test_nothing_is_lost_in_any_order(
    history: tuple[int, list[tuple[str, int]], bool], bursts: list[int], tails: bool
) -> None:
    choices, written, fails = history
    tail = "." if tails else ""
    told: list[list[int]] = [[] for _ in range(choices)]

    def writes() -> Iterator[Callable[[], object]]:
        for number, (what, choice) in enumerate(written):
            box = mailbox.choices[choice]
            if what == "token":
                told[choice].append(number)
                yield lambda box=box, number=number: box.texts.append(f"{number} ")  # type: ignore[misc]
                yield lambda box=box, number=number: box.ids.append(number)  # type: ignore[misc]
            else:
                yield lambda box=box: setattr(box, "tail", tail)  # type: ignore[misc]
                yield lambda box=box: setattr(box, "end", ChoiceEnd(FinishReason.LENGTH))  # type: ignore[misc]
        if fails:
            for box in mailbox.choices:
                if box.__dict__.get("end") is None:
                    yield lambda box=box: setattr(box, "tail", tail)  # type: ignore[misc]
            yield lambda: setattr(mailbox, "failure", SamplingFailed())
        else:
            yield lambda: setattr(mailbox, "ending", Ending(Usage(1, 0), RequestMetrics(0.0)))
        mailbox.stage = Stage.DONE

    engine = Writes(writes(), bursts)
    mailbox = WatchedMailbox(engine, choices)
    mailbox.accepted, mailbox.stage = True, Stage.QUEUED
    submission = Submission((1,), SamplingParams(n=choices), 0.0, ChatOptions())
    stream = TokenStream(mailbox, submission, lambda *_: lambda _: None)
    deltas: list[TokenDelta] = []

    async def read() -> None:
        await stream.start()
        async with asyncio.timeout(5):
            while not deltas or deltas[-1].usage is None:
                delta = stream.take()
                if delta is not None:
                    deltas.append(delta)
                else:
                    await asyncio.sleep(0)

    if fails:
        with pytest.raises(SamplingFailed):
            asyncio.run(read())
    else:
        asyncio.run(read())
    ended = {choice for what, choice in written if what == "end"}
    for choice in range(choices):
        own = [delta for delta in deltas if delta.index == choice]
        assert [token for delta in own for token in delta.token_ids] == told[choice]
        assert "".join(delta.text for delta in own) == "".join(f"{number} " for number in told[choice]) + tail
        assert [delta.finish_reason is not None for delta in own].count(True) == (choice in ended)
        if choice in ended:
            assert own[-1].finish_reason == "length"


# --- whole engines ---

AFTER = 5
"""Tokens that come before the end."""


SHORT = 0.1
"""Seconds: a deadline."""


def letter(place: int) -> int:
    """The token in that place."""
    return 65 + place % 20


class Trouble(Exception):
    """What goes wrong."""


class EndingRunner:
    """Answers at once: with the letters in their order, and behind `AFTER` of them with what `end` gives, or raises."""

    def __init__(self, end: Callable[[], int], launch: Callable[[], object]) -> None:
        self._end = end
        self._launch = launch
        self._loop = asyncio.get_running_loop()
        self._sampled = 0

    def launch(self, plan: StepPlan) -> StepTicket:
        if self._sampled == AFTER:
            self._launch()
        result: asyncio.Future[StepResult] = self._loop.create_future()
        late: asyncio.Future[LateTokens] | None = None
        try:
            if plan.late is not None:
                late = self._loop.create_future()
                late.set_result(LateTokens(plan.step, self._tokens(len(plan.late.rows))))
            result.set_result(StepResult(plan.step, self._tokens(plan.num_sampled)))
        except Exception as error:
            for future in (late, result):
                if future is not None and not future.done():
                    future.set_exception(error)
        return StepTicket(result, late)

    def _tokens(self, rows: int) -> Any:
        tokens = np.full(rows, letter(self._sampled), np.int32)
        if rows and self._sampled == AFTER:
            tokens[:] = self._end()
        self._sampled += bool(rows)
        return tokens

    async def aclose(self) -> None:
        """There is nothing to close."""


class Ends:
    """A model, and how its only request ends; `engine` is set once there is one."""

    def __init__(self, tokenizer: Tokenizer, kind: str) -> None:
        self.kind = kind
        self.engine: AsyncEngine | None = None
        self._tokenizer = tokenizer

    async def load(self, config: EngineConfig, workers: Executor) -> ServedModel:
        facts = ModelFacts(
            vocab_size=512,
            max_model_len=1024,
            block_size=16,
            num_blocks=100,
            groups=(CacheGroup(),),
            max_num_seqs=8,
            max_batched_tokens=256,
            memory_bytes={},
            dtype="none",
            device="ending",
        )
        return ServedModel(EndingRunner(self._end, self._launch), facts, self._tokenizer)

    def _end(self) -> int:
        """On the engine's thread."""
        match self.kind:
            case "no token":
                return NO_TOKEN
            case "step":
                raise Trouble
            case "death":
                raise EngineDead("the device is gone")
            case "closed":
                assert self.engine is not None
                assert self.engine._home is not None
                self.engine._home.stop()
            case "abort":
                assert self.engine is not None
                self.engine.abort("it")
            case "deadline":
                time.sleep(2 * SHORT)
            case "text":
                return 300
        return letter(AFTER)

    def _launch(self) -> None:
        if self.kind == "launch":
            raise Trouble
        if self.kind == "death at a launch":
            raise EngineDead("the device is gone")

    def params(self, heard: list[int]) -> SamplingParams:
        def on_token(token_id: int) -> None:
            heard.append(token_id)
            if len(heard) == AFTER:
                raise Trouble

        hook = on_token if self.kind == "hook" else None
        stop = ["EFG\nnever"] if self.kind == "no token" else []  # which holds text back
        return SamplingParams(max_tokens=400, ignore_eos=True, on_token=hook, stop=stop)


ERRORS: dict[str, type[Exception] | None] = {
    "no token": SamplingFailed,
    "step": RequestFailed,
    "launch": RequestFailed,
    "death": EngineDead,
    "death at a launch": EngineDead,
    "closed": EngineClosed,
    "hook": HookFailed,
    "guide": RequestFailed,
    "text": RequestFailed,
    "abort": None,
    "deadline": None,
}


@pytest.fixture
def breaking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Text that cannot be made of one token."""
    push = Detokenizer.push

    def broken(self: Detokenizer, ids: Sequence[int]) -> str:
        if 300 in ids:
            raise Trouble
        return push(self, ids)

    monkeypatch.setattr(Detokenizer, "push", broken)


@pytest.mark.parametrize("run_ahead", [0, 2])
@pytest.mark.parametrize("asleep", ["never", "at the start", "at each token"])
@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.usefixtures("breaking")
async def test_the_end_comes_last(tokenizer: Tokenizer, kind: str, asleep: str, run_ahead: int) -> None:
    ends = Ends(tokenizer, kind)
    load = ends.load
    if kind == "guide":
        load = constrained(load, lambda params: Rounds(512, [None], breaks=AFTER))  # type: ignore[assignment]
    came: list[TokenDelta] = []
    async with AsyncEngine(load, run_ahead=run_ahead) as engine:
        ends.engine = engine
        deadline = SHORT if kind == "deadline" else None
        stream = engine.stream([1, 2, 3], ends.params([]), request_id="it", deadline=deadline)

        async def read() -> None:
            async for delta in stream:
                came.append(delta)
                if asleep == "at each token":
                    time.sleep(0.02)  # noqa: ASYNC251  # the loop is to be busy

        reading = asyncio.create_task(read())
        if asleep == "at the start":
            await asyncio.sleep(0)
            time.sleep(0.05)  # noqa: ASYNC251  # likewise
        expected = ERRORS[kind]
        if expected is None:
            await reading
            assert came[-1].finish_reason == kind
        else:
            with pytest.raises(expected):
                await reading
            with pytest.raises(expected):
                await stream.result()
        ids = [token for delta in came for token in delta.token_ids]
        assert ids == [letter(place) for place in range(len(ids))]
        assert len(ids) == engine.statistics().tokens_generated - (kind == "text")
        if kind not in ("closed", "abort", "deadline"):
            assert len(ids) == AFTER
        assert "".join(delta.text for delta in came) == tokenizer.decode(ids)


@pytest.mark.usefixtures("breaking")
async def test_nothing_follows_a_token_whose_text_has_failed(tokenizer: Tokenizer) -> None:
    forced = (letter(3), letter(4), 300, 70)
    load = constrained(Ends(tokenizer, "").load, lambda params: Rounds(512, [None], forces={3: forced}))
    came: list[int] = []
    async with AsyncEngine(load) as engine:
        with pytest.raises(RequestFailed, match="turned into text"):  # noqa: PT012
            async for delta in engine.stream([1, 2, 3], SamplingParams(max_tokens=9, stop_token_ids=[70])):
                came.extend(delta.token_ids)
    assert came == [letter(place) for place in range(5)]


@pytest.mark.parametrize("asleep", [False, True])
@pytest.mark.parametrize("kind", ["no token", "step", "death", "death at a launch", "hook"])
async def test_the_end_of_another_process_comes_last(tokenizer: Tokenizer, kind: str, asleep: bool) -> None:
    ends = Ends(tokenizer, kind)
    came: list[int] = []
    error = EngineCrashed if "death" in kind else ERRORS[kind]
    assert error is not None
    async with AsyncEngine(ends.load, isolation="process") as engine:

        async def read() -> None:
            async for delta in engine.stream([1, 2, 3], ends.params([])):
                came.extend(delta.token_ids)

        reading = asyncio.create_task(read())
        if asleep:
            await asyncio.sleep(0)
            time.sleep(0.1)  # noqa: ASYNC251  # the loop is to be busy
        with pytest.raises(error):
            await reading
    assert came[:AFTER] == [letter(place) for place in range(AFTER)]
    assert len(came) == AFTER or kind == "hook"  # which is called while further tokens come


async def test_choices_that_have_ended_keep_their_end() -> None:
    hand = HandDriven()
    mailbox = Mailbox("two", 2)
    submission = Submission((5, 6, 7), SamplingParams(n=2, max_tokens=9, stop_token_ids=[8]), 0.0, ChatOptions())
    hand.core.open(mailbox, submission, asyncio.get_running_loop())
    await settle()
    await hand.runner.complete(2)
    plan, ticket = hand.runner.waiting.popleft()
    assert plan.num_sampled == 2
    ticket.result.set_result(StepResult(plan.step, np.array([8, NO_TOKEN], np.int32)))
    await settle()
    assert isinstance(mailbox.failure, SamplingFailed)
    ended, failed = mailbox.choices
    assert ended.end is not None
    assert ended.end.reason == "stop"
    assert ended.ids[-1] == 8
    assert failed.end is None
    assert len(failed.ids) == len(ended.ids) - 1


async def test_a_late_token_ends_a_request_while_its_step_still_runs() -> None:
    """Its blocks come back with that step, not before: it may still write them."""
    hand = HandDriven(run_ahead=2)
    mailbox = await hand.open(params=SamplingParams(max_tokens=2, on_token=lambda _: None))
    while not mailbox.done:
        await eventually(lambda: bool(hand.runner.waiting))
        await hand.runner.complete_late()
        if not mailbox.done:
            await hand.runner.complete()
    statistics = hand.core.statistics()
    assert (statistics.rows_used, statistics.blocks_used, mailbox.released) == (0, 1, False)
    await hand.runner.complete(len(hand.runner.waiting))
    assert hand.core.statistics().blocks_used == 0
    assert mailbox.released


class FullSender:
    """Its host does not read."""

    busy = True

    def __init__(self) -> None:
        self.sent: list[object] = []

    def send(self, message: object) -> None:
        self.sent.append(message)


async def test_a_host_that_lags_behind_is_told_of_tokens_before_the_death() -> None:
    sender = FullSender()
    outlet = Outlet(sender, lambda number: None)  # type: ignore[arg-type]  # all of one that it uses
    hand = HandDriven()
    hand.core._live._consumers = outlet
    outlet.attach(hand.core)
    mailboxes = [ChildMailbox(number, f"r{number}", 1) for number in range(2)]
    for mailbox in mailboxes:
        submission = Submission((5, 6, 7), SamplingParams(max_tokens=9), 0.0, ChatOptions())
        hand.core.open(mailbox, submission, asyncio.get_running_loop())
    await settle()
    await hand.runner.complete(2)
    assert not sender.sent
    sender.busy = False
    await hand.runner.fail(EngineDead("the device is gone"))
    news, death = sender.sent
    assert isinstance(news, News)
    assert isinstance(death, Died)
    for told, mailbox in zip(news.requests, mailboxes, strict=True):
        assert isinstance(mailbox.failure, EngineDead)
        assert told.opened is not None
        assert told.opened.accepted
        assert [list(choice.token_ids) for choice in told.choices] == [[7, 7]]
        assert (told.failure, told.ending, told.released) == (None, None, False)  # the host says it, once it is gone
