"""TokenEvents: what streams of tokens say, as prepared bytes.

Tokens are rendered in the very call that tells of them, before any task runs: the task that sends them wakes up once
for all that has come together, and finds its bytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Self

from asyncllm.api.generation import Generation
from asyncllm.results import TokenDelta


class TokenEvents:
    """An async iterator of bytes, for one task. Ends behind the last token of all streams, or behind an error.

    Not an async generator: what `__anext__` returns is a future that has the bytes, so that a token resumes no frame
    but the sender's.
    """

    def __init__(
        self,
        generation: Generation,
        render: Callable[[TokenDelta, int], str],
        fail: Callable[[Exception], str],
        *,
        n: int = 1,
        first: str = "",
    ) -> None:
        """`render`: the events of a delta, with the position of its stream. `fail`: the event of an error. `n`: choices
        of each stream. `first`: what comes before all deltas."""
        self._generation = generation
        self._render = render
        self._fail = fail
        self._streams = dict(enumerate(generation.streams))  # those that have not ended, by their positions
        self._alone = n == len(self._streams) == 1  # then one delta has all that is new
        self._first = first
        self._begun = False
        self._loop = asyncio.get_running_loop()
        self._bytes: asyncio.Future[bytes] = asyncio.Future(loop=self._loop)  # what the sender waits for
        self._more = False  # something came while the sender was busy
        self._called = False  # a call that delivers is on its way

    def __aiter__(self) -> Self:
        return self

    def __anext__(self) -> asyncio.Future[bytes]:
        self._bytes = asyncio.Future(loop=self._loop)
        if self._more:
            self._deliver_soon()  # not at once: a sender that is slower than the engine lets others have their turn
        elif not self._begun:
            self._begin()
        elif not self._streams:
            self._bytes.set_exception(StopAsyncIteration())
        return self._bytes

    def _begin(self) -> None:
        self._begun = True
        for stream in self._streams.values():
            self._more |= not stream.arm(self)
        if self._first:
            self._bytes.set_result(self._first.encode())
        elif self._more:
            self._deliver_soon()

    # --- as the streams' `Waiter` ---

    def done(self) -> bool:
        """It is told to the end."""
        return False

    def set_result(self, result: None, /) -> None:
        """A stream has something to take. Where others may have too, all goes out at the end of the loop's turn."""
        if self._bytes.done():
            self._more = True
        elif self._alone:
            self._deliver()
        else:
            self._deliver_soon()

    def _deliver_soon(self) -> None:
        if not self._called:
            self._called = True
            self._loop.call_soon(self._deliver)

    def _deliver(self) -> None:
        self._called = False
        if self._bytes.done():  # it was cancelled
            return
        self._more = False
        if text := self._take():
            self._bytes.set_result(text.encode())
        elif not self._streams:
            self._bytes.set_exception(StopAsyncIteration())

    def _take(self) -> str:
        """All events of what is there."""
        text = ""
        try:
            for position, stream in tuple(self._streams.items()):
                while (delta := stream.take()) is not None:
                    text += self._render(delta, position)
                    self._generation.seen(delta, position)
                    if delta.usage is not None:
                        del self._streams[position]
                        break
                    if self._alone:
                        break
        except Exception as error:
            self._streams.clear()
            text += self._fail(error)
        return text
