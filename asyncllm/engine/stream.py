"""TokenStream: the caller's end of one request."""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import Self

import anyio

from asyncllm.engine import process
from asyncllm.engine.choice_reader import ChoiceReader
from asyncllm.engine.mailbox import Ending, Mailbox, Stage, Waiter
from asyncllm.engine.preparation import Submission
from asyncllm.errors import AsyncLLMError, EngineError, RequestError
from asyncllm.metrics import RequestMetrics
from asyncllm.outputs.reasoning import answers_of
from asyncllm.results import Choice, Completion, FinishReason, PositionLogprobs, TokenDelta

Abandon = Callable[[object], None]
"""Tells the engine that nobody reads a request any more; takes no lock. What it is called with has no meaning."""
Submit = Callable[[Mailbox, Submission, asyncio.AbstractEventLoop], Abandon]
"""Hands a request to the engine, for a stream of that loop; what it returns abandons the request."""


UNBEGUN = (Stage.NEW, Stage.PREPARING)


class TokenStream:
    """An async iterator of `TokenDelta`s, and an async context manager.

    Made by `AsyncEngine.stream()`, submitted when first iterated or entered, or by `start()`. From then on it belongs
    to the event loop it was submitted in, and one task may iterate it at a time. The request is aborted by leaving
    the `async with` block, by `aclose()`, by cancelling the task that waits in it, and by dropping it.

    Each delta has all that is new of its choice since that one's delta before, so a slow reader gets fewer and longer
    ones. Choices that have something new take turns. An error that ends the request is raised once all is read that
    came before it.
    """

    __slots__ = (
        "__weakref__", "_abandon", "_choices", "_hand_over", "_loop", "_mailbox", "_only", "_over", "_pid", "_readers",
        "_structured", "_submission",
    )  # fmt: skip

    def __init__(self, mailbox: Mailbox, submission: Submission, submit: Submit) -> None:
        self._mailbox = mailbox
        self._submission: Submission | None = submission  # until submitted
        self._structured = submission.params.structured_output
        self._hand_over = submit
        self._loop: asyncio.AbstractEventLoop | None = None  # where it was submitted
        self._pid = process.pid  # likewise
        self._abandon: Abandon | None = None  # as long as somebody reads on
        self._choices = [ChoiceReader(mailbox, index) for index in range(len(mailbox.choices))]
        self._only = self._choices[0] if len(self._choices) == 1 else None
        self._readers = deque(self._choices)  # of choices whose last delta is not read, the next one first
        self._over = False  # the last delta was read, or the stream was closed

    @property
    def request_id(self) -> str:
        """The name that `AsyncEngine.abort()` knows the request by."""
        return self._mailbox.request_id

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        """The ids of the prompt; empty until the stream has started."""
        return tuple(self._mailbox.prompt.tolist())

    @property
    def metrics(self) -> RequestMetrics | None:
        """When the request reached each stage; None until it has ended."""
        ending = self._mailbox.ending
        return None if ending is None else ending.metrics

    async def start(self) -> None:
        """Submit the request; return once it is validated and queued. Raises the error that refuses it; one that ends
        it later is raised to who reads it, behind what came before."""
        self._submit()
        self._check_loop()
        mailbox = self._mailbox
        try:
            await self._until(lambda: mailbox.stage not in UNBEGUN, lambda: mailbox.starters)
        except BaseException:
            self._leave()
            raise
        if mailbox.failure is not None and not mailbox.accepted:
            raise mailbox.failure

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TokenDelta:
        if self._over:
            raise StopAsyncIteration
        if self._loop is None:
            try:
                await self.start()
            except AsyncLLMError:
                self._over = self._loop is not None  # else it was not submitted, and may be yet
                raise
        delta: TokenDelta | None = None
        while delta is None:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            armed = self.arm(waiter)
            try:
                if armed:
                    await waiter
                else:
                    self._mailbox.waiter = None
                    if self._mailbox.ending is None:
                        await asyncio.sleep(0)  # the loop's turn: a reader slower than the engine never waits
            except BaseException:
                self._give_up(waiter)
                raise
            delta = self.take()
        return delta

    @property
    def failed(self) -> bool:
        """Whether the request has ended with an error; what came before it may still be taken."""
        return self._mailbox.failure is not None

    def take(self) -> TokenDelta | None:
        """The next delta of a stream that has started, where it is there already. On the stream's loop.

        Raises what reading on would: the request's error, once all that came before it is read; `StopAsyncIteration`
        once the stream is over.
        """
        mailbox, reader = self._mailbox, self._only
        if mailbox.failure is not None:  # before the ids are counted: it is set after the last of them
            return self._take_of_failed(mailbox.failure)
        if reader is None:
            return self._take_of_many()
        box = reader.box
        ending = mailbox.ending  # likewise
        read, known = reader.read, len(box.ids)
        if ending is not None or self._over:
            return self._last_delta(ending)
        if known == read + 1 and box.scores is None:  # what nearly all are
            reader.read = known
            return TokenDelta(box.texts[read] if box.texts else "", (box.ids[read],))
        return reader.next_delta() if known > read else None

    def take_text(self) -> str | None:
        """The text of the next delta, where that is one token of the only choice and has nothing beside it: what nearly
        all are. None where it is anything else, or is not there, or the request has failed: `take` tells.

        For who passes on nothing but the text, and spares the delta.
        """
        reader, mailbox = self._only, self._mailbox
        if reader is None or self._over or mailbox.ending is not None or mailbox.failure is not None:
            return None
        box, read = reader.box, reader.read
        if len(box.ids) != read + 1 or box.scores is not None or not box.texts:
            return None
        reader.read = read + 1
        return box.texts[read]

    def arm(self, waiter: Waiter) -> bool:
        """Have this one told, on the stream's loop, whenever there is something new to take, until it is done. False
        where there is something already.

        For who passes tokens on and needs no task for that.
        """
        self._check_loop()
        mailbox = self._mailbox
        if mailbox.waiter is not None and not mailbox.waiter.done():
            raise EngineError("another task waits for this stream's next token")
        mailbox.waiter = waiter
        return not self._is_more_there()  # after the engine could see the waiter

    async def result(self) -> Completion:
        """Everything that the request came to, what was read before included.

        Waits for the end, without waking up for each token; not for the row and the blocks, as `aclose` does.
        """
        mailbox = self._mailbox
        if not (self._over and self._loop is not None):
            self._submit()
        self._check_loop()
        try:
            await self._until(lambda: mailbox.done, lambda: mailbox.watchers)
        except BaseException:
            self._leave()
            raise
        if mailbox.ending is None:
            assert mailbox.failure is not None
            raise mailbox.failure
        self._finish()
        return Completion(
            request_id=mailbox.request_id,
            choices=tuple([self._outcome(reader.choice()) for reader in self._choices]),
            usage=mailbox.ending.usage,
            prompt_token_ids=tuple(mailbox.prompt.tolist()),
            metrics=mailbox.ending.metrics,
            prompt_logprobs=self._prompt_logprobs(),
        )

    async def aclose(self) -> None:
        """Abort the request, unless it has ended, and return when its row and blocks are free.

        Cancelling the task does not make it return before. Idempotent; a stream that is closed is over.
        """
        if self._loop is not None:
            process.check(self._pid)
        self._leave()
        mailbox = self._mailbox
        if self._loop is None or mailbox.released:  # mostly: a stream that was read to its end is free by then
            return
        self._check_loop()
        interruption: asyncio.CancelledError | None = None
        with anyio.CancelScope(shield=True):  # else a cancelled scope of the caller would cancel each wait anew
            while not mailbox.released:
                try:
                    await self._until(lambda: mailbox.released, lambda: mailbox.watchers)
                except asyncio.CancelledError as error:
                    interruption = error
        if interruption is not None:
            raise interruption

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    def _submit(self) -> None:
        if self._loop is not None:
            return process.check(self._pid)
        if self._over or self._submission is None:
            raise RequestError("this stream was closed before it was started")
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            raise EngineError("no asyncio event loop runs here: a stream is read in an asyncio task") from None
        abandon = self._hand_over(self._mailbox, self._submission, loop)
        self._loop, self._pid, self._submission = loop, process.pid, None
        # A collection may call it anywhere, so it takes no lock. The engine holds the mailbox for as long as there is
        # something to abandon, so the reference outlives the stream. (It costs a third of what a finalizer does.)
        self._abandon, self._mailbox.stream = abandon, weakref.ref(self, abandon)

    @staticmethod
    async def _until(came: Callable[[], bool], told: Callable[[], list[asyncio.Future[None]]]) -> None:
        """Return once it came. Who is told takes the list that `told` gives away, so each wait asks for it anew."""
        while not came():
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            told().append(waiter)
            if came():  # before the engine could see the waiter
                return
            await waiter

    def _give_up(self, waiter: asyncio.Future[None]) -> None:
        """The task that waited was cancelled."""
        if self._mailbox.waiter is waiter:
            self._mailbox.waiter = None
        self._leave()

    def _take_of_many(self) -> TokenDelta | None:
        """The same where there are several choices, and no failure: of the one whose turn it is."""
        ending, readers = self._mailbox.ending, self._readers  # the ending first: it is set last
        if not self._over:
            for _ in range(len(readers)):
                reader = readers[0]
                if reader.box.end is None:
                    readers.rotate(-1)
                    if reader.unread:
                        return reader.next_delta()
                elif len(readers) > 1:
                    return readers.popleft().last_delta(None)
        if ending is not None or self._over:
            return self._last_delta(ending)
        return None

    def _take_of_failed(self, failure: AsyncLLMError) -> TokenDelta:
        """What came of one more choice before the request failed; raises the failure behind the last of it."""
        if self._over:
            raise StopAsyncIteration
        while self._readers:
            delta = self._readers.popleft().rest()
            if delta is not None:
                return delta
        self._finish()
        raise failure

    def _last_delta(self, ending: Ending | None) -> TokenDelta:
        """What is left once no more will come."""
        if self._over or ending is None:
            raise StopAsyncIteration
        self._finish()
        return self._readers[0].last_delta(ending.usage)

    def _is_more_there(self) -> bool:
        """Whether `take` has something to say. The last end is told with the request's, which follows it."""
        mailbox, readers = self._mailbox, self._readers
        if mailbox.ending is not None or mailbox.failure is not None or self._over:
            return True
        if self._only is not None:
            return self._only.unread
        if any(reader.unread and reader.box.end is None for reader in readers):
            return True
        return len(readers) > 1 and any(reader.box.end is not None for reader in readers)

    def _outcome(self, choice: Choice) -> Choice:
        """With what `Choice.parsed` gives, or the error that it raises."""
        if self._structured is None or choice.finish_reason is not FinishReason.STOP:
            return choice
        if isinstance(choice.stop_reason, str):
            return choice
        outcome: object = None
        texts = answers_of(choice.text) if self._structured.after_reasoning else (choice.text,)
        for text in texts:
            try:
                return replace(choice, outcome=self._structured.parse(text))
            except ValueError as error:
                outcome = outcome or error
        return replace(choice, outcome=outcome)

    def _prompt_logprobs(self) -> tuple[PositionLogprobs | None, ...] | None:
        mailbox = self._mailbox
        if mailbox.prompt_scores is None or mailbox.reader is None:
            return None
        return (None, *mailbox.reader.read(mailbox.prompt_scores))

    def _check_loop(self) -> asyncio.AbstractEventLoop:
        """The running loop, which must be the one that the stream was submitted in."""
        if process.pid != self._pid:
            process.check(self._pid)
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            raise EngineError("this stream was started in another event loop")
        return loop

    def _leave(self) -> None:
        """Nobody will read on: abort the request, if it runs."""
        self._over = True
        if self._abandon is not None:
            abandon, self._abandon, self._mailbox.stream = self._abandon, None, None
            abandon(self)

    def _finish(self) -> None:
        """All is read: nothing is left to abort."""
        self._over = True
        self._abandon = self._mailbox.stream = None
