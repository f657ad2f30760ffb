"""TokenEvents: what streams of tokens say, as prepared bytes.

Tokens are rendered in the very call that tells of them, before any task runs. Where the server takes bytes without a
task too, they are sent in that call (`pour`); else the task that sends wakes up once for all that has come together,
and finds its bytes (`async for`). One more token of a stream whose events differ in their text alone takes a way of its
own, without a delta: `set_result`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Generator
from dataclasses import replace
from types import coroutine
from typing import Any, Self

from asyncllm.api.generation import Generation
from asyncllm.api.sse import Frame, escape
from asyncllm.engine.async_engine import TokenStream
from asyncllm.results import TokenDelta

Send = Callable[[bytes], Coroutine[Any, Any, None] | None]
"""Sends these bytes. What it returns is what is left to do, if there is anything: it has not begun then."""


class TokenEvents:
    """The events of a request's streams, for one task that sends them. They end behind the last token of all streams,
    or behind an error, which follows all that has come before it."""

    __slots__ = (
        "_alone", "_begun", "_called", "_closed", "_count", "_fail", "_find_frame", "_first", "_frame", "_last",
        "_limit", "_loop", "_more", "_render", "_seen", "_send", "_sender", "_streams",
    )  # fmt: skip

    def __init__(  # noqa: PLR0913  # what is rare by keyword
        self,
        generation: Generation,
        render: Callable[[TokenDelta, int], str],
        fail: Callable[[Exception], str],
        *,
        n: int = 1,
        first: str = "",
        last: Callable[[], Awaitable[str]] | None = None,
        frame: Callable[[], Frame | None] | None = None,
    ) -> None:
        """`render`: the events of a delta, with the position of its stream. `fail`: those of an error, and of what was
        held back until then. `n`: choices of each stream. `first`: what comes before all deltas, and `last` behind
        them, unless there was an error.

        `frame`: asked after a delta of the only choice whether each that follows, up to the last, is the event of its
        text in this frame, and nothing where it has none; it is asked again where it says None."""
        self._seen = generation.seen
        self._count = generation.counter(0)
        self._render = render
        self._fail = fail
        self._limit: Exception | None = None  # the server's own, which ends all streams: what is told behind the last
        self._streams = dict(enumerate(generation.streams))  # those that have not ended, by their positions
        self._alone = generation.streams[0] if n == len(generation.streams) == 1 else None
        self._find_frame = frame
        self._frame: Frame | None = None
        self._first = first
        self._last = last
        self._loop = asyncio.get_running_loop()
        self._send: Send | None = None  # None: the task sends
        self._sender: asyncio.Future[Any] = asyncio.Future(loop=self._loop)  # what the task waits for
        self._begun = False
        self._more = False  # something came while the sender was busy
        self._called = False  # a call that delivers is on its way
        self._closed = False

    def __aiter__(self) -> Self:
        return self

    def __anext__(self) -> asyncio.Future[bytes]:
        if self._last is not None and not self._streams:
            return self._loop.create_task(self._take_last())
        self._sender = asyncio.Future(loop=self._loop)
        self._ask()
        return self._sender

    async def pour(self, send: Send) -> None:
        """Send everything. `send` is called where tokens arrive, outside of any task; only for what it cannot send at
        once it is gone on with here."""
        self._send = send
        try:
            while True:
                self._sender = asyncio.Future(loop=self._loop)
                self._ask()
                await _rest(*await self._sender)
        except StopAsyncIteration:
            if self._last is not None:
                rest = send(await self._take_last())
                if rest is not None:
                    await rest
        except asyncio.CancelledError:
            if self._sender.done() and not self._sender.cancelled() and self._sender.exception() is None:
                self._sender.result()[0].close()  # begun, and maybe not yet gone on with
            raise

    async def _take_last(self) -> bytes:
        last, self._last = self._last, None
        assert last is not None
        try:
            return (await last()).encode()
        except Exception as error:
            return self._fail(error).encode()

    async def aclose(self) -> None:
        """Nobody sends any more."""
        self._closed = True
        self._streams.clear()

    # --- as the streams' `Waiter` ---

    def done(self) -> bool:
        """It is told until it is closed."""
        return self._closed

    def set_result(self, result: None, /) -> bool:
        """A stream has something to take. Where others may have too, all goes out at the end of the loop's turn."""
        alone, frame = self._alone, self._frame
        if self._sender.done():
            self._more = True
        elif alone is None:
            self._deliver_soon()
        elif frame is None or (text := alone.take_text()) is None:
            self._deliver()
        else:
            self._count(1)
            if text:
                self._hand_out(f"{frame[0]}{escape(text)}{frame[1]}")
        return not self._closed

    def _ask(self) -> None:
        """The sender is free."""
        if not self._begun:
            self._begun = True
            for stream in self._streams.values():
                self._more |= not stream.arm(self)
            if self._first:
                return self._hand_out(self._first)
        if self._more:
            self._deliver_soon()  # not at once: a sender that is slower than the engine lets others have their turn
        elif not self._streams:
            self._sender.set_exception(StopAsyncIteration())
        return None

    def _deliver_soon(self) -> None:
        if not self._called:
            self._called = True
            self._loop.call_soon(self._deliver)

    def _deliver(self) -> None:
        self._called = False
        if self._sender.done():  # it was cancelled
            return
        self._more = False
        text = self._take_all() if self._alone is None else self._take(self._alone)
        if text:
            self._hand_out(text)
        elif not self._streams:
            self._sender.set_exception(StopAsyncIteration())

    def _take(self, stream: TokenStream) -> str:
        """The events of what the only stream has; one delta has all that is new."""
        text = ""
        failure: Exception | None = None
        try:
            while (delta := stream.take()) is not None:
                text += self._tell(delta, 0)
                if self._frame is None and self._find_frame is not None:
                    self._frame = self._find_frame()
                if delta.usage is not None:
                    self._streams.clear()
                    break
                if not stream.failed:  # else both came together, and nobody will tell of the second
                    break
        except Exception as error:
            failure = error
        return self._ended(text, failure)

    def _take_all(self) -> str:
        """The events of what all streams have; a failure of one is told behind what the others have."""
        text = ""
        failure: Exception | None = None
        for position, stream in tuple(self._streams.items()):
            try:
                while position in self._streams and (delta := stream.take()) is not None:
                    text += self._tell(delta, position)
                    if delta.usage is not None:
                        del self._streams[position]
            except Exception as error:
                failure = failure or error
        return self._ended(text, failure)

    def _tell(self, delta: TokenDelta, position: int) -> str:
        """The events of a delta."""
        limit = self._seen(delta, position)
        if limit is None:
            return self._render(delta, position)
        self._limit = limit
        return self._render(replace(delta, finish_reason=None, stop_reason=None, usage=None), position)

    def _ended(self, text: str, failure: Exception | None) -> str:
        """These events, and behind them what a failure has to say, if there is one."""
        if failure is None and not self._streams:
            failure = self._limit
        if failure is None:
            return text
        self._streams.clear()
        self._last = None
        return text + self._fail(failure)

    def _hand_out(self, text: str) -> None:
        if self._send is None:
            return self._sender.set_result(text.encode())
        try:
            sending = self._send(text.encode())
            if sending is not None:
                self._sender.set_result((sending, sending.send(None)))
                return None
        except StopIteration:  # all is sent
            pass
        except Exception as error:
            return self._sender.set_exception(error)
        if self._more or not self._streams:
            self._ask()
        return None


@coroutine
def _rest(sending: Coroutine[Any, Any, None], awaited: Any) -> Generator[Any, Any, None]:
    """Go on with a coroutine that was begun elsewhere, and has come to where it waits."""
    try:
        while True:
            try:
                given = yield awaited
            except BaseException as error:
                awaited = sending.throw(error)
            else:
                awaited = sending.send(given)
    except StopIteration:
        return
