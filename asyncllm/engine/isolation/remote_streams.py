"""RemoteStreams: the streams whose requests are in another process, and what comes of them. From any thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from asyncllm.engine.consumers import LoopConsumers
from asyncllm.engine.isolation.messages import NewOfChoice, NewOfRequest, News
from asyncllm.engine.isolation.remote_hooks import HookedStream
from asyncllm.engine.logprob_reader import LogprobReader
from asyncllm.engine.mailbox import ChoiceEnd, Ending, Mailbox, Stage
from asyncllm.engine.preparation import Submission
from asyncllm.errors import AsyncLLMError
from asyncllm.metrics import RequestMetrics
from asyncllm.results import FinishReason, Usage


@dataclass(eq=False, slots=True)
class RemoteStream:
    """One of them."""

    number: int
    mailbox: Mailbox
    submission: Submission | None  # until it is sent
    loop: asyncio.AbstractEventLoop
    hooks: HookedStream | None


class RemoteStreams:
    """Writes mailboxes, and wakes the loops that listen."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a finalizer may end a stream anywhere
        self._consumers = LoopConsumers()
        self._streams: dict[int, RemoteStream] = {}  # until released
        self._hooks: dict[int, HookedStream] = {}  # until called for the last time, which may be later
        self._token_bytes: dict[int, bytes] = {}
        self._reader = LogprobReader(lambda token_id: self._token_bytes.get(token_id, b""))

    def numbers(self) -> list[int]:
        """Those of all that are live, or have functions that may still be called."""
        return list({**self._streams, **self._hooks})

    def hooks(self, number: int) -> HookedStream | None:
        """The functions of a request."""
        return self._hooks.get(number)

    def begin(self, stream: RemoteStream) -> None:
        """It is to be told what comes of it."""
        with self._lock:
            if stream.hooks is not None:
                self._hooks[stream.number] = stream.hooks
            self._streams[stream.number] = stream
            self._consumers.listen(stream.number, stream.mailbox, stream.loop)

    def send(self) -> list[int]:
        """Wake each loop that has something to look at, once. Returns the numbers of streams whose loop is closed."""
        with self._lock:
            return self._consumers.send()

    def take(self, news: News) -> None:
        """Leave what a turn has brought in the mailboxes."""
        with self._lock:
            if news.token_bytes:
                self._token_bytes.update(news.token_bytes)
            for number, token_id, text in zip(news.numbers, news.token_ids, news.texts, strict=True):
                stream = self._streams.get(number)
                if stream is not None:
                    mailbox = stream.mailbox
                    box = mailbox.choices[0]
                    if text is not None:
                        box.texts.append(text)
                    box.ids.append(token_id)
                    if mailbox.waiter is not None:
                        mailbox.notify()
            for new in news.requests:
                stream = self._streams.get(new.number)
                if stream is not None:
                    self._take_request(stream, new)
            for number in news.hooks_over:
                self._hooks.pop(number, None)

    def fail(self, numbers: Iterable[int], make_error: Callable[[], AsyncLLMError]) -> None:
        """End streams with an error, one for each since each gets its own traceback."""
        with self._lock:
            for number in numbers:
                stream = self._streams.get(number)
                if stream is not None:
                    if not stream.mailbox.done:
                        stream.mailbox.failure = make_error()
                    self._release(stream)
                self._hooks.pop(number, None)

    def end(self, number: int, reason: FinishReason) -> None:
        """End a stream that no child knows of."""
        with self._lock:
            stream = self._streams.get(number)
            if stream is None or stream.submission is None:
                return
            for box in stream.mailbox.choices:
                box.end = ChoiceEnd(reason)
            stream.mailbox.ending = Ending(Usage(0, 0), RequestMetrics(stream.submission.arrival))
            self._release(stream)
            self._hooks.pop(number, None)

    def _take_request(self, stream: RemoteStream, new: NewOfRequest) -> None:
        mailbox = stream.mailbox
        if new.opened is not None:
            mailbox.accepted = new.opened.accepted
            mailbox.prompt = new.opened.prompt
            mailbox.reader = self._reader
            if new.opened.prompt_scored:
                mailbox.prompt_scores = []
            if new.opened.scored:
                for box in mailbox.choices:
                    box.scores = []
        if mailbox.prompt_scores is not None:
            mailbox.prompt_scores += new.prompt_scores
        for choice in new.choices:
            _take_choice(mailbox, choice)
        if new.failure is not None and not mailbox.done:
            failure = new.failure.restore()
            assert isinstance(failure, AsyncLLMError)
            if stream.hooks is not None:
                stream.hooks.explain(failure)
            mailbox.failure = failure
        mailbox.ending = new.ending
        mailbox.stage = new.stage  # after what it announces
        if new.released:
            self._release(stream)
        else:
            mailbox.notify()

    def _release(self, stream: RemoteStream) -> None:
        mailbox = stream.mailbox
        mailbox.stage = Stage.DONE
        mailbox.released = True
        mailbox.notify()
        del self._streams[stream.number]
        self._consumers.forget(stream.number, mailbox)


def _take_choice(mailbox: Mailbox, new: NewOfChoice) -> None:
    box = mailbox.choices[new.index]
    if box.scores is not None and new.scores is not None:
        box.scores += new.scores
    box.texts += new.texts
    box.ids += new.token_ids
    box.tail = new.tail
    if new.end is not None:
        box.end = new.end
