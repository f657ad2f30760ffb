"""LiveRequests: who is being served, and the event loops that listen. Engine thread only.

A request lives here until its row and blocks are free; its `request_id` only until it has ended. Knows nothing of
steps: it is told what happened and tells the mailboxes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence

from asyncllm.engine.mailbox import ConsumerLoop, Ending, Mailbox, Stage
from asyncllm.engine.preparation import ChatOptions, Prepared, Submission
from asyncllm.engine.request_text import RequestText
from asyncllm.engine.scheduling.reports import Ended, StepTokens
from asyncllm.errors import AsyncLLMError, DuplicateRequestError
from asyncllm.metrics import RequestMetrics, RequestView
from asyncllm.outputs.stop_matcher import StopMatcher
from asyncllm.params import SamplingParams
from asyncllm.results import FinishReason, Usage

clock = time.monotonic


class Request:
    """One live request."""

    __slots__ = ("arrival", "first_token", "flush", "id", "mailbox", "matcher", "params", "push", "queued")

    def __init__(self, request: int, mailbox: Mailbox, submission: Submission) -> None:
        self.id = request
        self.mailbox = mailbox
        self.params: SamplingParams = submission.params
        self.arrival = submission.arrival
        self.queued: float | None = None  # when it was handed to the scheduler
        self.first_token: float | None = None
        self.push: Callable[[Sequence[int]], str] | None = None  # ids to text; None without a tokenizer
        self.flush: Callable[[], str] | None = None
        self.matcher: StopMatcher | None = None

    @property
    def addressee(self) -> Request:
        """Who gets the request's tokens: nobody where none were asked for, and it runs for its prompt's sake."""
        return self if self.params.max_tokens != 0 else _NOBODY

    def take_text(self, prepared: Prepared, found: list[int]) -> None:
        """Begin to turn ids into text. The request is named in `found` when its stop string has come."""
        self.mailbox.take_logprobs(prepared.logprobs, prepared.sampling)
        detokenizer, matcher = prepared.detokenizer, prepared.matcher
        if detokenizer is None:
            return
        self.push, self.flush = detokenizer.push, detokenizer.flush
        if matcher is not None:
            text = RequestText(self.id, detokenizer, matcher, min_tokens=prepared.min_tokens, found=found)
            self.push, self.flush, self.matcher = text.push, text.flush, matcher

    def mute(self) -> None:
        """Show no text for the id that comes next."""
        if self.push is not None:
            self.push = _no_text


def _no_text(ids: Sequence[int]) -> str:
    return ""


class _Lost(list[int]):
    """Keeps nothing."""

    def append(self, item: int) -> None:
        """Forget it."""


def _nobody() -> Request:
    mailbox = Mailbox("")
    mailbox.ids = _Lost()
    submission = Submission((), SamplingParams(), 0.0, ChatOptions())
    return Request(-1, mailbox, submission)


_NOBODY = _nobody()


class LiveRequests:
    """Requests by internal id."""

    def __init__(self) -> None:
        self._requests: dict[int, Request] = {}
        self._names: dict[str, int] = {}  # request_id to internal id, of requests that have not ended
        self._consumers: dict[asyncio.AbstractEventLoop, ConsumerLoop] = {}
        self.finished = 0
        self.aborted = 0

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(tuple(self._requests.values()))

    def __getitem__(self, request: int) -> Request:
        return self._requests[request]

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
                generated_tokens=len(request.mailbox.ids),
            )
            for request in list(self._requests.values())[:limit]
        )

    def named(self, request_id: str) -> Request | None:
        """The request that has not ended and carries this id."""
        request = self._names.get(request_id)
        return None if request is None else self._requests[request]

    def admit(self, request: Request, loop: asyncio.AbstractEventLoop) -> None:
        """Take a request in; its mailbox is answered on `loop`. Raises `DuplicateRequestError`, and has it even so."""
        mailbox = request.mailbox
        consumer = self._consumers.get(loop)
        if consumer is None:
            consumer = self._consumers[loop] = ConsumerLoop(loop)
        consumer.mailboxes[request.id] = mailbox
        mailbox.consumer = consumer
        mailbox.stage = Stage.PREPARING
        self._requests[request.id] = request
        if mailbox.request_id in self._names:
            raise DuplicateRequestError(f"request_id {mailbox.request_id!r} belongs to a live request")
        self._names[mailbox.request_id] = request.id

    def fail(self, request: Request, error: AsyncLLMError) -> None:
        """The request ends with an error, unless it has ended already."""
        if not request.mailbox.done:
            request.mailbox.failure = error
            self._close(request)

    def end(self, request: Request, ending: Ending) -> None:
        """The request ends, unless it has ended already."""
        if not request.mailbox.done:
            request.mailbox.ending = ending
            self.finished += 1
            self.aborted += ending.reason is FinishReason.ABORT
            self._close(request)

    def conclude(self, request: Request, ended: Ended) -> None:
        """The scheduler says that a request has ended: its stream gets what was held back, and how it came out.

        Raises what the detokenizer does.
        """
        mailbox = request.mailbox
        if mailbox.done:
            return
        tail = "" if request.flush is None else request.flush()
        reason: FinishReason = ended.reason
        stop_reason: str | int | None = None
        if request.params.max_tokens == 0:
            reason = FinishReason.LENGTH if reason is FinishReason.STOP else reason
        elif request.matcher is not None and request.matcher.matched is not None:
            reason, stop_reason = FinishReason.STOP, request.matcher.matched
        elif ended.stop_token_id in request.params.stop_token_ids:
            stop_reason = ended.stop_token_id
        metrics = RequestMetrics(
            arrival=request.arrival,
            queued=request.queued,
            scheduled=ended.first_scheduled,
            first_token=request.first_token,
            last_token=clock() if mailbox.ids else None,
            preemptions=ended.preemptions,
        )
        usage = Usage(len(mailbox.prompt), len(mailbox.ids), ended.cached_tokens)
        self.end(request, Ending(reason, stop_reason, tail, usage, metrics))

    def take_scores(self, tokens: StepTokens) -> None:
        """Leave the log-probabilities of a step with those who asked, before its ids: who sees an id sees its own."""
        for request, scores in tokens.scores:
            mailbox = self._requests[request].mailbox
            if mailbox.scores is not None:
                mailbox.scores.append(scores)
        for part in tokens.prompts:
            self._requests[part.request].mailbox.take_prompt(part.start, part.scores)

    def end_unscheduled(self, request: Request, reason: FinishReason) -> None:
        """A request that the scheduler never had ends, and there is nothing to wait for."""
        usage = Usage(len(request.mailbox.prompt), 0)
        metrics = RequestMetrics(request.arrival, request.queued)
        self.end(request, Ending(reason, None, "", usage, metrics))
        self.release(request.id)

    def release(self, request: int) -> None:
        """The request holds no row and no block any more."""
        released = self._requests.pop(request, None)
        if released is not None:
            mailbox = released.mailbox
            mailbox.released = True
            mailbox.notify()
            if mailbox.consumer is not None:
                del mailbox.consumer.mailboxes[request]

    def send(self) -> list[Request]:
        """Wake each loop that has something to look at, once. Returns the requests whose loop is closed."""
        orphans: list[Request] = []
        for consumer in tuple(self._consumers.values()):
            is_open = consumer.send()
            if not is_open:
                orphans += [self._requests[request] for request in consumer.mailboxes]
            if not is_open or not consumer.mailboxes:
                del self._consumers[consumer.loop]
        return orphans

    def _close(self, request: Request) -> None:
        mailbox = request.mailbox
        mailbox.stage = Stage.DONE
        if self._names.get(mailbox.request_id) == request.id:
            del self._names[mailbox.request_id]
        mailbox.notify()
