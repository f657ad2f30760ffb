"""Alarm: has something done at a time, which may be changed until then. On the loop's thread."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable


class Alarm:
    """At most one time is set."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, context: contextvars.Context, ring: Callable[[], object]
    ) -> None:
        """`ring` is called in that context; no time is set then."""
        self._loop = loop
        self._context = context
        self._call = ring
        self._timer: asyncio.TimerHandle | None = None

    def set(self, when: float | None) -> None:
        """The time, on the loop's clock, in place of the one before; None: at no time."""
        if self._timer is not None and self._timer.when() != when:
            self._timer.cancel()
            self._timer = None
        if when is not None and self._timer is None:
            self._timer = self._loop.call_at(when, self._ring, context=self._context)

    def _ring(self) -> None:
        self._timer = None
        self._call()
