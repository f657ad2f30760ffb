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
        render: Callable[[int, TokenDelta], str],
        fail: Callable[[Exception], str],
        *,
        n: int = 1,
        first: str = "",
    ) -> None:
        """`render`: the events of a delta; with its stream's position. `fail`: the event of an error.
        `n`: choices of each stream. `first`: what comes before all deltas."""
        self._generation = generation
        self._render = render
        self._fail = fail
        self._streams = dict(enumerate(generation.streams))  # those that have not ended, by their positions
        self._alone = n == len(self._streams) == 1  # then one delta has all that is new
        self._first = first
        self._loop = asyncio.get_running_loop()
        self._bytes: asyncio.Future[bytes] = self._loop.create_future()  # what is waited for
        self._called = False  # a call that delivers is on its way

    def __aiter__(self) -> Self:
        return self

    def __anext__(self) -> asyncio.Future[bytes]:
        self._bytes = self._loop.create_future()
        if self._first:
            self._bytes.set_result(self._first.encode())
            self._first = ""
        else:
            self._wait()
        return self._bytes

    # --- as the streams' `Waiter` ---

    def done(self) -> bool:
        """Whether nobody waits: the task that sends was cancelled."""
        return self._bytes.done()

    def set_result(self, result: None, /) -> None:
        """A stream has something to take. Where others may have too, all goes out at the end of the loop's turn."""
        if self._alone:
            self._deliver()
        else:
            self._deliver_soon()

    def _deliver_soon(self) -> None:
        if not self._called:
            self._called = True
            self._loop.call_soon(self._deliver)

    def _deliver(self) -> None:
        self._called = False
        if self._bytes.done():
            return
        if text := self._take():
            self._bytes.set_result(text.encode())
        else:
            self._wait()

    def _wait(self) -> None:
        if not self._streams:
            return self._bytes.set_exception(StopAsyncIteration())
        for stream in self._streams.values():
            if not stream.arm(self):
                self._deliver_soon()  # not at once: a reader that is slower than the engine lets others have their turn
        return None

    def _take(self) -> str:
        """All events of what is there."""
        text = ""
        try:
            for position, stream in tuple(self._streams.items()):
                while (delta := stream.take()) is not None:
                    text += self._render(position, delta)
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
