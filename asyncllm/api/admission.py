"""Admission: how much work is taken on at once, and the end of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from asyncllm.api.errors import ApiError


class Ticket:
    """The right to have some choices in work; give it back once."""

    __slots__ = ("_admission", "_choices")

    def __init__(self, admission: Admission, choices: int) -> None:
        self._admission = admission
        self._choices = choices

    def release(self) -> None:
        """The work is done, or given up. Idempotent."""
        choices, self._choices = self._choices, 0
        if choices:
            self._admission.give_back(choices)


class Admission:
    """Counts the choices in work. Used on one event loop."""

    def __init__(self, max_queue: int) -> None:
        self._max_queue = max_queue
        self._idle: list[asyncio.Future[None]] = []  # of those that wait for the end of all work
        self.choices = 0
        self.draining = False

    def enter(self, choices: int, rows: int) -> Ticket:
        """Take on a request of so many choices, for an engine that runs `rows` at once. Raises 429 and 503."""
        self.check_open()
        if self.choices + choices > rows + self._max_queue:
            raise ApiError(
                429,
                f"The server is busy: {self.choices} answers are in work, and it takes {rows + self._max_queue}.",
                code="queue_full",
                headers={"retry-after": "1"},
            )
        self.choices += choices
        return Ticket(self, choices)

    def check_open(self) -> None:
        """Raises 503 once the app shuts down."""
        if self.draining:
            raise ApiError(503, "The server is shutting down.", code="shutting_down", headers={"retry-after": "5"})

    def give_back(self, choices: int) -> None:
        """For tickets."""
        self.choices -= choices
        if self.choices == 0:
            for waiter in self._idle:
                if not waiter.done():
                    waiter.set_result(None)
            self._idle.clear()

    async def drain(self, seconds: float) -> bool:
        """Take nothing new, and wait for the end of what is in work. False when the time is up."""
        self.draining = True
        try:
            async with asyncio.timeout(seconds):
                while self.choices:
                    waiter = asyncio.get_running_loop().create_future()
                    self._idle.append(waiter)
                    await waiter
        except TimeoutError:
            return False
        return True


class Viewers:
    """Counts who watches the engine. Used on one event loop."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.count = 0

    def enter(self) -> Callable[[], None]:
        """One more; what it returns is called once when it leaves. Raises 429."""
        if self.count >= self._most:
            raise ApiError(
                429,
                f"{self.count} clients watch the engine already, as many as this server lets.",
                code="too_many_viewers",
                headers={"retry-after": "10"},
            )
        self.count += 1
        return self._leave

    def _leave(self) -> None:
        self.count -= 1
