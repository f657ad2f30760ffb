"""StepPace: how long the launched steps will keep the device busy, by how long earlier ones of their size took."""

from __future__ import annotations

from collections import deque

RECENT = 0.3
"""How much the last step of a size counts against those before it."""


class StepPace:
    """Told of each step when it is launched and when it is done. Times are those of one clock, in seconds."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}  # of a step, by the size of its tokens
        self._sizes: deque[int] = deque()  # of the launched steps, oldest first
        self._begun = 0.0  # when the oldest of them began, as far as can be known

    def launched(self, tokens: int, now: float) -> None:
        """A step is launched."""
        if not self._sizes:
            self._begun = now
        self._sizes.append(tokens.bit_length())

    def done(self, now: float) -> None:
        """The oldest launched step is done; the next one begins."""
        size = self._sizes.popleft()
        took, before = now - self._begun, self._seconds.get(size)
        # The shorter of two guesses is the safer one: who waits too long leaves the device idle.
        self._seconds[size] = took if before is None else min(took, before + RECENT * (took - before))
        self._begun = now

    def busy_until(self) -> float:
        """When the launched steps are expected to be done; a size that was never seen counts as no time at all."""
        return self._begun + sum(self._seconds.get(size, 0.0) for size in self._sizes)
