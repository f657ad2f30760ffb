"""CommandQueue: what other threads want of the engine's, done there in turns."""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from collections.abc import Callable
from typing import Any

COMMANDS_A_TURN = 64
"""So that a thousand requests at once do not hold up the steps of those that run."""


class CommandQueue:
    """`turn` is called on the loop with what is to be done in it, whenever there are commands."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        context: contextvars.Context,
        turn: Callable[[Callable[[], object]], object],
    ) -> None:
        self._loop = loop
        self._context = context
        self._turn = turn
        self._commands: deque[tuple[Callable[[Any], None], Any]] = deque()
        self._called = False  # the loop is to look at them, and has not begun to
        self._yielding = False  # there are more commands than one turn takes

    def post(self, method: Callable[[Any], None], argument: Any) -> bool:
        """Have `method(argument)` called on the loop; False where that is closed. From any thread; takes no lock."""
        # The first of many wakes the loop, which clears the flag before it looks: a command is seen by this call of it
        # or makes the next. Nothing may come between flag and call, or the engine were deaf; a KeyboardInterrupt can
        # come in the call alone.
        self._commands.append((method, argument))
        if self._called:
            return True
        self._called = True
        try:
            self._loop.call_soon_threadsafe(self._run, context=self._context)
        except RuntimeError:  # the loop is closed: the engine has ended, and every stream with it
            self._called = False
            return False
        except BaseException:
            self._called = False
            raise
        return True

    def __len__(self) -> int:
        return len(self._commands)

    def take(self) -> tuple[Callable[[Any], None], Any] | None:
        """The next command; None where there is none."""
        return self._commands.popleft() if self._commands else None

    def _run(self) -> None:
        self._called = False
        if self._commands and not self._yielding:
            self._turn(self._take_some)

    def _take_some(self) -> None:
        for _ in range(min(COMMANDS_A_TURN, len(self._commands))):
            method, argument = self._commands.popleft()
            method(argument)
        if self._commands:
            self._yielding = True
            self._loop.call_soon(self._go_on, context=self._context)

    def _go_on(self) -> None:
        self._yielding = False
        self._run()
