"""StepPipeline: the launched steps, in order. Plans ahead, applies results, sorts out failed steps, keeps the times.

A late row that is to be in the next plan needs the host's word first. So while words are awaited, the next plan is put
off for as long as the device is busy anyway, and no longer.

Engine thread only. Knows nothing of streams.
"""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from asyncllm.engine.execution.runner import Runner
from asyncllm.engine.plan import LateTokens, StepResult
from asyncllm.engine.scheduling.reports import StepTokens
from asyncllm.engine.scheduling.scheduler import Scheduler
from asyncllm.engine.step_pace import StepPace
from asyncllm.errors import EngineDead
from asyncllm.metrics import StepTimes

clock = time.monotonic  # the event loop's, so that deadlines and timers agree


LEAST_MARGIN = 0.0003
"""Seconds: a plan that was put off is made at least so long before the device runs out of work."""


@dataclass(frozen=True, slots=True)
class LostStep:
    """A step that failed."""

    step: int
    cause: Exception


@dataclass(frozen=True, slots=True)
class LostRequests:
    """Requests that had a part in a failed step, and are ended."""

    requests: Sequence[int]
    cause: Exception


class StepPipeline:
    """`done` is called, on the engine's loop, for each launched step in launch order; it must call `take`. Before it,
    for a step with late samples, `late_done`, which must call `take_late`."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        *,
        done: Callable[[asyncio.Future[StepResult]], object],
        late_done: Callable[[asyncio.Future[LateTokens]], object],
        context: contextvars.Context,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._done = done
        self._late_done = late_done
        self._context = context
        self._in_flight: deque[int] = deque()
        self._late: deque[int] = deque()  # those of them whose late tokens have not come
        self._pace = StepPace()
        self._lost: LostStep | None = None  # nothing is launched until every launched step is in
        self._rested = clock()
        self._steps = 0
        self._launches = 0
        self._schedule_seconds = 0.0
        self._launch_seconds = 0.0
        self._wait_seconds = 0.0
        self._apply_seconds = 0.0
        self._deliver_seconds = 0.0

    @property
    def launches(self) -> int:
        """How many steps were launched."""
        return self._launches

    @property
    def busy(self) -> bool:
        """Whether a step is launched and not taken."""
        return bool(self._in_flight)

    def hold_until(self, awaited: bool) -> float | None:
        """Until when to put the next plan off: words are `awaited`, or the tokens that they will be about, and the
        device has something to do. None: not at all."""
        if not self._in_flight or not (awaited or self._late):
            return None
        planning = (self._schedule_seconds + self._launch_seconds) / max(1, self._launches)
        until = self._pace.busy_until() - max(LEAST_MARGIN, 2 * planning)
        return until if until > clock() else None

    def launch(self, awaited: Callable[[], bool]) -> list[int]:
        """Plan and launch as far ahead as the scheduler goes, or to where it is better to wait for words that are
        `awaited`, see `hold_until`. Returns the requests that took a row.

        A launch that raises loses its step, see `take_lost`.
        """
        joined: list[int] = []
        while self._lost is None and self.hold_until(awaited()) is None:
            start = clock()
            plan = self._scheduler.schedule(start)
            planned = clock()
            self._schedule_seconds += planned - start
            if plan is None:
                break
            joined += [join.request for join in plan.joins]
            try:
                ticket = self._runner.launch(plan)
            except Exception as error:
                self._lost = LostStep(plan.step, error)
                break
            if not self._in_flight:
                self._rested = planned  # it was idle before, which is not waiting
            self._in_flight.append(plan.step)
            if ticket.late is not None:
                self._late.append(plan.step)
                ticket.late.add_done_callback(self._late_done, context=self._context)
            ticket.result.add_done_callback(self._done, context=self._context)
            self._launches += 1
            launched = clock()
            self._launch_seconds += launched - planned
            self._pace.launched(plan.num_tokens, launched)
            if self._scheduler.full:
                break
        return joined

    def take_late(self, future: asyncio.Future[LateTokens]) -> StepTokens | None:
        """Apply the late tokens of the oldest launched step. None where it, or one before it, failed: its result says
        so too."""
        step = self._late.popleft()
        if _error_of(future) is not None or (self._lost is not None and step >= self._lost.step):
            return None
        return self._scheduler.apply_late(future.result())

    def take(self, future: asyncio.Future[StepResult]) -> StepTokens | None:
        """Apply the oldest launched step, which is done. None where it, or one before it, failed.

        Raises `EngineDead` where the runner says so.
        """
        start = clock()
        self._wait_seconds += start - self._rested
        step = self._in_flight.popleft()
        self._pace.done(start)
        error = _error_of(future)
        if isinstance(error, EngineDead):
            raise error
        if error is not None and (self._lost is None or step < self._lost.step):
            self._lost = LostStep(step, error)
        if self._lost is not None and step >= self._lost.step:
            return None
        tokens = self._scheduler.apply(future.result())
        self._steps += 1
        self._apply_seconds += clock() - start
        return tokens

    @property
    def is_lost(self) -> bool:
        """Whether a step has failed, and no launched step may still write its requests' blocks."""
        return self._lost is not None and not self._in_flight

    def take_lost(self) -> LostRequests | None:
        """The requests that a failed step took with it, once it `is_lost`.

        Raises `EngineDead` where the runner said so when it was to launch the step.
        """
        if self._lost is None or self._in_flight:
            return None
        lost, self._lost = self._lost, None
        if isinstance(lost.cause, EngineDead):
            raise lost.cause
        return LostRequests(self._scheduler.fail(lost.step), lost.cause)

    def rest(self, delivering_since: float) -> None:
        """The turn of a step ends: what follows is waiting."""
        self._rested = clock()
        self._deliver_seconds += self._rested - delivering_since

    def times(self) -> StepTimes:
        """The totals so far. From any thread; they may be a step apart from each other."""
        return StepTimes(
            steps=self._steps,
            schedule_seconds=self._schedule_seconds,
            launch_seconds=self._launch_seconds,
            wait_seconds=self._wait_seconds,
            apply_seconds=self._apply_seconds,
            deliver_seconds=self._deliver_seconds,
        )


def _error_of(future: asyncio.Future[Any]) -> Exception | None:
    if future.cancelled():
        return RuntimeError("the step was cancelled")
    error = future.exception()
    return error if error is None or isinstance(error, Exception) else RuntimeError(repr(error))
