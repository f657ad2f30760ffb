"""LiveRequests: who is being served. Engine thread only.

A request lives here until its row and blocks are free; its `request_id` only until it has ended. Knows nothing of
steps: it is told what happened and tells the mailboxes.
"""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from asyncllm.engine.consumers import Consumers
from asyncllm.engine.hook_place import HookPlace, LoopPlace
from asyncllm.engine.mailbox import ChoiceBox, ChoiceEnd, Ending, Mailbox, Stage
from asyncllm.engine.preparation import ChatOptions, PreparedChoice, Submission
from asyncllm.engine.request_text import RequestText, WatchedText
from asyncllm.engine.scheduling.reports import Ended, StepTokens
from asyncllm.errors import AsyncLLMError, DuplicateRequestError
from asyncllm.metrics import RequestMetrics, RequestView
from asyncllm.outputs.repetition_detector import RepetitionDetector
from asyncllm.outputs.stop_matcher import StopMatcher
from asyncllm.params import SamplingParams
from asyncllm.results import REPETITION, FinishReason, Usage

clock = time.monotonic


class Request:
    """One live request."""

    __slots__ = (
        "arrival",
        "branches",
        "cached_tokens",
        "first_token",
        "id",
        "loop",
        "mailbox",
        "open",
        "params",
        "place",
        "preemptions",
        "queued",
        "scheduled",
    )

    def __init__(
        self,
        request: int,
        mailbox: Mailbox,
        submission: Submission,
        loop: asyncio.AbstractEventLoop,
        place: HookPlace | None = None,
    ) -> None:
        """`place`: where functions of the host's are called; else in that loop, with the context of this moment."""
        self.id = request
        self.mailbox = mailbox
        self.loop = loop
        if place is None and submission.params.has_hooks:
            place = LoopPlace(loop, contextvars.copy_context())
        self.place = place
        self.params: SamplingParams = submission.params
        self.arrival = submission.arrival
        self.branches: tuple[Branch, ...] = ()  # its choices, once it is handed to the scheduler
        self.open = 0  # how many of them have not ended
        self.queued: float | None = None  # when it was handed to the scheduler
        self.scheduled: float | None = None
        self.first_token: float | None = None
        self.cached_tokens = 0
        self.preemptions = 0


class Branch:
    """One choice of a live request; a request of its own for the scheduler."""

    __slots__ = ("box", "detector", "flush", "id", "mailbox", "matcher", "push", "request", "spoiled")

    def __init__(self, branch: int, request: Request, box: ChoiceBox) -> None:
        self.id = branch
        self.request = request
        self.mailbox = request.mailbox
        self.box = box
        self.push: Callable[[Sequence[int]], str] | None = None  # ids to text; None without a tokenizer
        self.flush: Callable[[], str] | None = None
        self.spoiled = False
        self.matcher: StopMatcher | None = None
        self.detector: RepetitionDetector | None = None

    @property
    def stop_reason(self) -> str | None:
        """What was found in the text, or in the ids, that ends the branch."""
        if self.matcher is not None and self.matcher.matched is not None:
            return self.matcher.matched
        return REPETITION if self.detector is not None and self.detector.found else None

    @property
    def addressee(self) -> Branch:
        """Who gets the tokens: nobody where none were asked for, and the request runs for its prompt's sake."""
        return self if self.request.params.max_tokens != 0 else _NOBODY

    def take_text(self, prepared: PreparedChoice, min_tokens: int, found: list[int]) -> None:
        """Begin to turn ids into text. The branch is named in `found` when its stop string, or a loop, has come."""
        detokenizer, matcher, detector = prepared.detokenizer, prepared.matcher, prepared.detector
        if detokenizer is not None:
            self.push, self.flush = detokenizer.push, detokenizer.flush
            if matcher is not None:
                text = RequestText(self.id, detokenizer, matcher, min_tokens=min_tokens, found=found)
                self.push, self.flush, self.matcher = text.push, text.flush, matcher
        if detector is not None:
            self.push, self.detector = WatchedText(self.id, self.push, detector, found).push, detector

    def keep_tail(self) -> None:
        """No more will come: the stream gets what was held back. Raises what the detokenizer does."""
        if self.flush is not None:
            self.box.tail = self.flush()

    def spoil(self, error: Exception) -> None:
        """The text has failed with this error, and does so again."""

        def fail(*ids: Sequence[int]) -> str:
            raise error

        self.push = self.flush = fail
        self.spoiled = True

    def mute(self) -> None:
        """Show no text for the id that comes next."""
        if self.push is not None and not self.spoiled:
            self.push = _no_text


def _no_text(ids: Sequence[int]) -> str:
    return ""


class _Lost(list[int]):
    """Keeps nothing."""

    def append(self, item: int) -> None:
        """Forget it."""


def _nobody() -> Branch:
    mailbox = Mailbox("")
    mailbox.choices[0].ids = _Lost()
    submission = Submission((), SamplingParams(), 0.0, ChatOptions())
    loop = asyncio.BaseEventLoop()  # never run
    loop.close()
    return Branch(-1, Request(-1, mailbox, submission, loop), mailbox.choices[0])


_NOBODY = _nobody()


class LiveRequests:
    """Requests and their branches by internal id. The first branch of a request has the request's."""

    def __init__(self, consumers: Consumers) -> None:
        self._consumers = consumers
        self._requests: dict[int, Request] = {}
        self._branches: dict[int, Branch] = {}  # until their blocks are free
        self._names: dict[str, int] = {}  # request_id to internal id, of requests that have not ended
        self.finished = 0
        self.aborted = 0

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(tuple(self._requests.values()))

    def __getitem__(self, branch: int) -> Branch:
        return self._branches[branch]

    def branch(self, branch: int) -> Branch | None:
        """The branch, unless its end is past and its blocks are free."""
        return self._branches.get(branch)

    def get(self, request: int) -> Request | None:
        """The request, unless its end is past and its blocks are free."""
        return self._requests.get(request)

    def views(self, limit: int) -> tuple[RequestView, ...]:
        """The oldest requests, at most `limit`. From any thread."""
        now = clock()
        return tuple(
            RequestView(
                number=request.id,
                stage=request.mailbox.stage.name.lower(),
                age=now - request.arrival,
                prompt_tokens=len(request.mailbox.prompt),
                generated_tokens=sum(len(box.ids) for box in request.mailbox.choices),
            )
            for request in list(self._requests.values())[:limit]
        )

    def named(self, request_id: str) -> Request | None:
        """The request that has not ended and carries this id."""
        request = self._names.get(request_id)
        return None if request is None else self._requests[request]

    def admit(self, request: Request) -> None:
        """Take a request in. Raises `DuplicateRequestError`, and has it even so."""
        mailbox = request.mailbox
        self._consumers.listen(request.id, mailbox, request.loop)
        mailbox.stage = Stage.PREPARING
        self._requests[request.id] = request
        if mailbox.request_id in self._names:
            raise DuplicateRequestError(f"request_id {mailbox.request_id!r} belongs to a live request")
        self._names[mailbox.request_id] = request.id

    def begin(self, request: Request, branches: Sequence[int]) -> tuple[Branch, ...]:
        """The request is handed to the scheduler, with a branch of these ids for each of its choices."""
        boxes = request.mailbox.choices
        request.branches = tuple([Branch(id, request, box) for id, box in zip(branches, boxes, strict=True)])
        request.open = len(request.branches)
        self._branches.update(zip(branches, request.branches, strict=True))
        return request.branches

    def fail(self, request: Request, error: AsyncLLMError) -> None:
        """The request ends with an error, unless it has ended already. Behind all that it has come to."""
        if request.mailbox.done:
            return
        for branch in request.branches:
            if branch.box.end is None:
                with suppress(Exception):  # which may be what fails it
                    branch.keep_tail()
        request.mailbox.failure = error
        self._close(request)

    def conclude(self, branch: Branch, ended: Ended) -> None:
        """The scheduler says that a branch has ended: its stream gets what was held back, and how it came out.

        Raises what the detokenizer does.
        """
        mailbox, request = branch.mailbox, branch.request
        if mailbox.done:
            return
        branch.keep_tail()
        reason: FinishReason = ended.reason
        stop_reason: str | int | None = None
        if request.params.max_tokens == 0:
            reason = FinishReason.LENGTH if reason is FinishReason.STOP else reason
        elif branch.stop_reason is not None:
            reason, stop_reason = FinishReason.STOP, branch.stop_reason
        elif ended.stop_token_id in request.params.stop_token_ids:
            stop_reason = ended.stop_token_id
        branch.box.end = ChoiceEnd(reason, stop_reason)
        request.preemptions += ended.preemptions
        if branch is request.branches[0]:
            request.scheduled, request.cached_tokens = ended.first_scheduled, ended.cached_tokens
        request.open -= 1
        if request.open:
            mailbox.notify()
        else:
            self._end(request)

    def take_scores(self, tokens: StepTokens) -> None:
        """Leave the log-probabilities of a step with those who asked, before its ids: who sees an id sees its own."""
        for request, scores in tokens.scores:
            kept = self._branches[request].box.scores
            if kept is not None:
                kept.append(scores)
        for part in tokens.prompts:
            self._branches[part.request].mailbox.take_prompt(part.start, part.scores)

    def end_unscheduled(self, request: Request, reason: FinishReason) -> None:
        """A request that the scheduler never had ends, and there is nothing to wait for."""
        if not request.mailbox.done:
            for box in request.mailbox.choices:
                box.end = ChoiceEnd(reason)
            self._end(request)
        self.release(request)

    def release_branch(self, branch: int) -> None:
        """A branch holds no row and no block any more."""
        released = self._branches.pop(branch, None)
        if released is not None and not any(other.id in self._branches for other in released.request.branches):
            self.release(released.request)

    def release(self, request: Request) -> None:
        """The request holds no row and no block any more."""
        if self._requests.pop(request.id, None) is not None:
            mailbox, request.place = request.mailbox, None
            mailbox.released = True
            mailbox.notify()
            self._consumers.forget(request.id, mailbox)

    def send(self) -> list[Request]:
        """Tell everybody what there is to look at. Returns the requests whose consumer is gone."""
        return [self._requests[request] for request in self._consumers.send()]

    def _end(self, request: Request) -> None:
        """All choices of the request have their ends."""
        boxes, mailbox = request.mailbox.choices, request.mailbox
        tokens = sum([len(box.ids) for box in boxes])
        metrics = RequestMetrics(
            arrival=request.arrival,
            queued=request.queued,
            scheduled=request.scheduled,
            first_token=request.first_token,
            last_token=clock() if tokens else None,
            preemptions=request.preemptions,
        )
        mailbox.ending = Ending(Usage(len(mailbox.prompt), tokens, request.cached_tokens), metrics)
        self.finished += 1
        self.aborted += any(box.end is not None and box.end.reason is FinishReason.ABORT for box in boxes)
        self._close(request)

    def _close(self, request: Request) -> None:
        mailbox = request.mailbox
        mailbox.stage = Stage.DONE
        if self._names.get(mailbox.request_id) == request.id:
            del self._names[mailbox.request_id]
        mailbox.notify()
