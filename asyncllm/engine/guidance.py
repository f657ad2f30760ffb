"""Guidance: the core's side of late requests. Engine thread only.

Their tokens go to their guides, and what the guides say goes to the scheduler: how the next token is to be sampled, the
tokens that come next in any case, or that this is the end. Where the host has functions of its own to be called in
between, it goes through their driver.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from asyncllm.engine.delivery import Delivery
from asyncllm.engine.guide import Word
from asyncllm.engine.guide_work import PATIENCE, GuideWork
from asyncllm.engine.hook_driver import HookDriver, HookedRequest, HostLogits
from asyncllm.engine.live_requests import Branch, LiveRequests, Request
from asyncllm.engine.plan import Adjustment
from asyncllm.engine.preparation import PreparedChoice
from asyncllm.engine.scheduling.reports import Ended, StepTokens
from asyncllm.engine.scheduling.scheduler import Scheduler
from asyncllm.errors import RequestError, RequestFailed
from asyncllm.results import FinishReason

logger = logging.getLogger("asyncllm")


@dataclass(frozen=True, slots=True)
class CoreTurns:
    """What guidance needs of the core."""

    loop: asyncio.AbstractEventLoop
    context: contextvars.Context  # of what the loop is to call
    run: Callable[[Callable[[], object]], object]  # does this in a turn, which takes words too
    fail: Callable[[Request, RequestError], object]  # in a turn: ends the request
    hook_timeout: float  # seconds that each call into the host may take


class Guidance:
    """Ends a request whose guide, or host, does not know on."""

    def __init__(
        self, scheduler: Scheduler, live: LiveRequests, delivery: Delivery, guides: Executor, turns: CoreTurns
    ) -> None:
        """`guides`: the threads that guides are at work on."""
        self._scheduler = scheduler
        self._live = live
        self._delivery = delivery
        self._work = GuideWork(guides, self._call)
        self._turns = turns
        self._watch: asyncio.TimerHandle | None = None  # as long as guides may be behind
        self._drivers: dict[int, HookDriver] = {}  # of the branches that have not ended
        self._tasks: dict[int, asyncio.Task[None]] = {}  # of all drivers

    def awaited(self) -> bool:
        """Whether a word may be there in time for the next plan."""
        return self._work.awaited

    def let_pass(self) -> None:
        """A plan is made without the rows whose word is still to come."""
        self._work.let_pass()

    def begin(self, branch: Branch, choice: PreparedChoice) -> None:
        """A request was queued; where it is a late one, its guide is asked from now on, and its hooks are called."""
        if choice.guide is None:
            return
        self._work.start(branch.id, choice.guide)
        self._watch_work()
        request = branch.request
        if choice.hooks is not None and request.place is not None:
            seconds = self._turns.hook_timeout
            hooked = HookedRequest(choice.hooks, choice.sampling, choice.guide.prompt_tokens, seconds)
            driver = HookDriver(hooked, request.place, partial(self._bind, branch.id))
            self._drivers[branch.id] = driver
            task = self._tasks[branch.id] = self._turns.loop.create_task(driver.drive())
            task.add_done_callback(partial(self._driven, branch))

    def end(self, ended: Ended) -> None:
        """A branch, late or not, has ended by itself; what came before is still told to the host."""
        self._work.forget(ended.request)
        driver = self._drivers.pop(ended.request, None)
        if driver is None:
            return
        if ended.reason in (FinishReason.STOP, FinishReason.LENGTH):
            driver.end()
        else:
            self._tasks[ended.request].cancel()

    def drop(self, branch: Branch) -> None:
        """A branch is no more."""
        self._work.forget(branch.id)
        if self._drivers.pop(branch.id, None) is not None:
            self._tasks[branch.id].cancel()

    async def aclose(self) -> None:
        """Call the host no more, once it was told all that came of requests that have ended by themselves.

        None is left of the others, unless the engine is dead.
        """
        for request in self._drivers:
            self._tasks[request].cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def take_late(self, tokens: StepTokens) -> None:
        """Late tokens have come. Who goes on needs the next word while their step runs: so guides are told first."""
        for end in self._delivery.note_ended():
            self._work.forget(end.request)
        words = [(request, (token_id,)) for request, token_id in zip(tokens.requests, tokens.token_ids, strict=True)]
        self._work.tell(words)
        self._watch_work()
        if self._drivers:
            for request, token_ids in words:
                if request in self._drivers:
                    self._drivers[request].take_tokens(token_ids)
        self._delivery.deliver_late(tokens)

    def take_logits(self, tokens: StepTokens) -> None:
        """A step has kept logits that the host reads."""
        for kept in tokens.logits:
            if kept.request in self._drivers:
                self._drivers[kept.request].take_logits(HostLogits(kept.position, kept.values))

    def take_words(self) -> None:
        """Take what the guides have said."""
        for answer in self._work.take():
            branch = self._live[answer.request]
            if branch.mailbox.done:
                continue
            if isinstance(answer.word, Exception):
                failure = answer.word
                if not isinstance(failure, RequestError):
                    failure = RequestFailed.caused("what constrains this request failed", failure)
                self._turns.fail(branch.request, failure)
            else:
                self._pass_on(branch, answer.word)

    def _call(self) -> None:
        """The guides have said all that they were asked. On any thread."""
        with suppress(RuntimeError):  # the loop is closed
            self._turns.loop.call_soon_threadsafe(self._turns.run, _nothing, context=self._turns.context)

    def _watch_work(self) -> None:
        if self._watch is None and self._work.behind:
            self._watch = self._turns.loop.call_later(PATIENCE, self._look_after, context=self._turns.context)

    def _look_after(self) -> None:
        """Some guide is slow, or there are many: what is there is taken, and others are not held up."""
        self._watch = None
        self._work.hurry()
        self._watch_work()
        if self._work.answered:
            self._turns.run(_nothing)

    def _pass_on(self, branch: Branch, word: Word) -> None:
        driver = self._drivers.get(branch.id)
        if word.forced:
            taken, known = self._scheduler.force(branch.id, word.forced), len(branch.box.ids)
            self._delivery.deliver_forced(branch, taken[:-1])
            self._delivery.note_ended()  # the last of them may be a stop id
            self._delivery.deliver_forced(branch, taken[-1:])
            if driver is not None:
                driver.take_tokens(branch.box.ids[known:])  # none of those behind a stop string
        if word.adjustment is None:
            self._scheduler.finish(branch.id, FinishReason.STOP)
        elif driver is not None:
            driver.take_adjustment(word.token_ids, word.adjustment)
        else:
            self._scheduler.bind(branch.id, word.adjustment)

    def _bind(self, request: int, adjustment: Adjustment) -> None:
        self._turns.run(lambda: self._scheduler.bind(request, adjustment))

    def _driven(self, branch: Branch, task: asyncio.Task[None]) -> None:
        del self._tasks[branch.id]
        driver = self._drivers.pop(branch.id, None)
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        if driver is None:
            return logger.warning("a request has ended, and then: %s", error)
        failure = error if isinstance(error, RequestError) else RequestFailed.caused("a hook failed", error)
        self._turns.run(lambda: self._turns.fail(branch.request, failure))


def _nothing() -> None:
    """A turn for what every turn does."""
