"""Guidance: the core's side of late requests. Engine thread only.

Their tokens go to their guides, and what the guides say goes to the scheduler: how the next token is to be sampled, the
tokens that come next in any case, or that this is the end.
"""

from __future__ import annotations

from collections.abc import Callable

from asyncllm.engine.delivery import Delivery
from asyncllm.engine.guide import Guide, Word
from asyncllm.engine.guide_work import GuideWork
from asyncllm.engine.live_requests import Branch, LiveRequests, Request
from asyncllm.engine.scheduling.reports import StepTokens
from asyncllm.engine.scheduling.scheduler import Scheduler
from asyncllm.errors import RequestError, RequestFailed
from asyncllm.results import FinishReason


class Guidance:
    """`fail` ends a request whose guide does not know on."""

    def __init__(
        self,
        scheduler: Scheduler,
        live: LiveRequests,
        delivery: Delivery,
        work: GuideWork,
        fail: Callable[[Request, RequestError], object],
    ) -> None:
        self._scheduler = scheduler
        self._live = live
        self._delivery = delivery
        self._work = work
        self._fail = fail

    def awaited(self) -> bool:
        """Whether a word may be there in time for the next plan."""
        return self._work.awaited

    def let_pass(self) -> None:
        """A plan is made without the rows whose word is still to come."""
        self._work.let_pass()

    def begin(self, branch: Branch, guide: Guide) -> None:
        """A late request was queued."""
        self._work.start(branch.id, guide)

    def end(self, request: int) -> None:
        """A request, late or not, has ended."""
        self._work.forget(request)

    def take_late(self, tokens: StepTokens) -> None:
        """Late tokens have come. Who goes on needs the next word while their step runs: so guides are told first."""
        for end in self._delivery.note_ended():
            self._work.forget(end.request)
        for request, token_id in zip(tokens.requests, tokens.token_ids, strict=True):
            self._work.tell(request, (token_id,))
        self._delivery.deliver_late(tokens)

    def take_words(self) -> None:
        """The guides have said something."""
        for answer in self._work.take():
            branch = self._live[answer.request]
            if branch.mailbox.done:
                continue
            if isinstance(answer.word, Exception):
                failure = answer.word
                if not isinstance(failure, RequestError):
                    failure = RequestFailed.caused("what constrains this request failed", failure)
                self._fail(branch.request, failure)
            else:
                self._pass_on(branch, answer.word)

    def _pass_on(self, branch: Branch, word: Word) -> None:
        if word.forced:
            taken = self._scheduler.force(branch.id, word.forced)
            self._delivery.deliver_forced(branch, taken[:-1])
            self._delivery.note_ended()  # the last of them may be a stop id
            self._delivery.deliver_forced(branch, taken[-1:])
        if word.adjustment is None:
            self._scheduler.finish(branch.id, FinishReason.STOP)
        else:
            self._scheduler.bind(branch.id, word.adjustment)
