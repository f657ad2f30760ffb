"""How many threads compute a kernel together (`source/team.h`).

The threads of a team wait for each other hundreds of times a step. Where others use the processors too, a thread that
does not run holds up all of them each time; a smaller team, or a thread alone, may then be faster. Whether it is, a few
calls tell.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

_WEIGHT = 0.2
"""Of one call in an average."""
_LOST = 0.4
"""A team that loses more of its time than this may be slower than half of it."""
_CALLS, _SECONDS, _GIVEN_UP = 6, 0.06, 200
"""So many calls that can be compared, which took so long before, make a trial; after so many of any kind it is given
up."""
_GAIN = 0.9
"""A size that takes this much of the time of another is better."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 1.6
"""Seconds between trials: twice as many after each that changed nothing."""
_MOST_KINDS = 1000
"""Kinds of calls whose averages are kept; before there are more, all are forgotten."""


class TeamTime(NamedTuple):
    """How a team's time was."""

    lost: float  # the share that threads have waited for one that did not run, from 0 to 1
    times: int = 1  # that the same was computed one after the other


@dataclass(slots=True)
class _Trial:
    """Calls with another size of the team, and what they took before, in seconds."""

    halvings: int
    calls: int = 0
    compared: int = 0
    seconds: float = 0.0
    before: float = 0.0


@dataclass(slots=True)
class TeamSize:
    """Chooses the size of the next team by what the last ones took.

    Several threads may call `run` at once, as engines of one process do.
    """

    clock: Callable[[], float] = time.perf_counter
    _halvings: int = 0
    _lost: float = 0.0  # average share of the time that threads have waited for one that did not run
    _seconds: dict[Hashable, float] = field(default_factory=dict)  # average by kind of call, with this size
    _trial: _Trial | None = None
    _pause: float = _FIRST_PAUSE
    _next_trial: float = 0.0

    @property
    def tries(self) -> bool:
        """Whether a trial goes on: whoever computes much at once does less."""
        return self._trial is not None

    def run(self, kernel: Callable[[int], TeamTime], kind: Hashable = None) -> None:
        """Call `kernel` with a number of threads.

        What calls of one `kind` compute takes the same time; those without one tell nothing.
        """
        trial = self._trial
        halvings = self._halvings if trial is None else trial.halvings
        start = self.clock()
        took = kernel(max(1, torch.get_num_threads() >> halvings))
        if kind is not None and trial is self._trial:  # else another thread's call has begun or ended one
            self._note(trial, kind, took, (self.clock() - start) / took.times)

    def _note(self, trial: _Trial | None, kind: Hashable, took: TeamTime, seconds: float) -> None:
        if trial is not None:
            self._compare(trial, kind, seconds)
            return
        if len(self._seconds) >= _MOST_KINDS:
            self._seconds.clear()
        before = (1.0 - _WEIGHT) ** took.times
        self._seconds[kind] = seconds + before * (self._seconds.get(kind, seconds) - seconds)
        self._lost = took.lost + before * (self._lost - took.lost)
        if self.clock() < self._next_trial:
            return
        if self._lost > _LOST:
            self._trial = _Trial(self._halvings + 1)
        elif self._halvings:
            self._trial = _Trial(self._halvings - 1)

    def _compare(self, trial: _Trial, kind: Hashable, seconds: float) -> None:
        trial.calls += 1
        if (before := self._seconds.get(kind)) is not None:
            trial.compared += 1
            trial.seconds += seconds
            trial.before += before
        whole = trial.compared >= _CALLS and trial.before >= _SECONDS
        if not whole and trial.calls < _GIVEN_UP:
            return
        better = whole and trial.seconds < _GAIN * trial.before
        self._pause = _FIRST_PAUSE if better else min(2 * self._pause, _LONGEST_PAUSE)
        if better:
            self._halvings = trial.halvings
            self._seconds.clear()
        self._trial, self._lost, self._next_trial = None, 0.0, self.clock() + self._pause
