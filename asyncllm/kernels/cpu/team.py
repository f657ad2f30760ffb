"""How many threads compute a kernel together (`source/team.h`).

The threads of a team wait for each other hundreds of times a step. Where others use the processors too, a thread that
does not run holds up all of them each time, and a smaller team, which waits less, or a thread alone, is much faster.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch

_MEMORY = 0.04
"""Seconds of computing after which the average has forgotten most of what was before."""
_MOST_WEIGHT = 0.2
"""Of one call in the average: others may have taken a processor for once."""
_LIMIT = 0.5
"""A team that loses more of its time than this is no faster than half of it."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 3.2
"""Seconds until a larger team is tried again: twice as long each time that it fails."""


class TeamSize:
    """Chooses the size of the next team by what the last ones have lost."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._halvings = 0
        self._lost = 0.0  # average share of the time that threads have waited for one that did not run
        self._pause = _FIRST_PAUSE
        self._changed = clock()

    def run(self, kernel: Callable[[int], float]) -> None:
        """Call `kernel` with a number of threads; it returns the share of its time that they have lost, from 0 to 1."""
        start = self._clock()
        lost = kernel(self.choose())
        self.note(lost, self._clock() - start)

    def choose(self) -> int:
        """As many threads as torch has, or fewer while these would wait for each other."""
        passed = self._clock() - self._changed
        if self._halvings and passed > self._pause:
            self._change(self._halvings - 1)
        elif passed > 2 * _LONGEST_PAUSE:
            self._pause = _FIRST_PAUSE  # nothing has failed for long
        return max(1, torch.get_num_threads() >> self._halvings)

    def note(self, lost: float, seconds: float) -> None:
        """A team has lost this share of the time that it took."""
        weight = min(_MOST_WEIGHT, 1.0 - math.exp(-seconds / _MEMORY))
        self._lost += weight * (lost - self._lost)
        if self._lost > _LIMIT:
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
            self._change(self._halvings + 1)

    def _change(self, halvings: int) -> None:
        self._halvings, self._lost, self._changed = halvings, 0.0, self._clock()
