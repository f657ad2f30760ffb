"""StepRelay: launched steps on their way to the CPU's thread, and their results on the way back.

Steps that only go on decoding the same rows need nothing from the interpreter. While the kernel computes one of them,
the next is asked of the kernel itself; it tells the engine's loop of each by the loop's semaphore (`EngineLoop.watch`).
So between two such steps no thread waits for the interpreter lock, and none runs Python code that the device waits for.
All other steps, and those that come too late, go through the thread's queue.

Whatever way they take, steps are executed in launch order, and their futures complete in it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from asyncllm.engine.event_loop import EngineLoop
from asyncllm.engine.execution.device_thread import DeviceThread, fail, succeed
from asyncllm.engine.execution.runner import StepTicket
from asyncllm.engine.plan import LateTokens, StepPlan, StepResult, TableEdits
from asyncllm.kernels.cpu.further import MOST_STEPS, FurtherSteps

MakeFurther = Callable[[int], FurtherSteps]
"""Of the step that is about to be computed; takes the address of the semaphore that is told."""
BeginRun = Callable[[MakeFurther], FurtherSteps | None]
"""Asked before a step for what may follow it in its call; None: nothing."""
Execute = Callable[[StepPlan, Callable[[LateTokens], object], BeginRun], StepResult]
"""`StepExecutor.execute`."""
EditTables = Callable[[TableEdits], object]
"""`RowState.edit_tables`."""


@dataclass(slots=True, eq=False)
class _Launched:
    """A step on its way."""

    plan: StepPlan
    follows: bool  # it does nothing but go on with what the step launched before it has decoded
    result: asyncio.Future[StepResult]
    late: asyncio.Future[LateTokens] | None


@dataclass(slots=True, eq=False)
class _Call:
    """A call of the kernel, and the steps that were asked of it, in order; the loop's thread adds to them."""

    steps: list[_Launched]
    further: FurtherSteps
    tokens: NDArray[np.int32]  # of each step that is done
    told: int = 0  # how many of them the loop knows to be done
    over: bool = False  # no more are done

    def ask(self, step: _Launched, last: _Launched, edit_tables: EditTables) -> bool:
        """Have this one computed behind the `last` launched one. False where that is none of these, or it is too
        late."""
        if self.steps[-1] is not last:
            return False
        edit_tables(step.plan.tables)  # no step before it reads what they set; where it is too late, they are set again
        self.steps.append(step)  # first, so that it is there when it is done
        if self.further.ask():
            return True
        self.steps.pop()
        return False

    def tell(self) -> bool:
        """Of the steps that are done. Returns whether no more will be."""
        over, done = self.over, self.further.done  # in this order
        while self.told < done:
            step = self.steps[self.told]
            succeed(step.result, StepResult(step.plan.step, self.tokens[self.told]))
            self.told += 1
        return over


class StepRelay:
    """Made on the engine's loop."""

    def __init__(self, thread: DeviceThread, execute: Execute, edit_tables: EditTables) -> None:
        self._thread = thread
        self._execute: Execute | None = execute
        self._edit_tables: EditTables | None = edit_tables
        self._loop = asyncio.get_running_loop()
        self._semaphore = self._loop.watch(self._collect) if isinstance(self._loop, EngineLoop) else None
        self._queued: deque[_Launched] = deque()  # of them the thread is told by a post each
        self._last: _Launched | None = None
        self._left: deque[_Launched] = deque()  # by the last call, of those asked of it; the thread's own
        self._call: _Call | None = None  # that goes on now
        self._outcomes: deque[_Call | Callable[[], object]] = deque()  # of steps, in launch order: see `_collect`
        self._aside = 0  # how much is computed beside steps

    # --- on the engine's loop ---

    def launch(self, plan: StepPlan) -> StepTicket:
        """As `Runner.launch`."""
        edit_tables = self._edit_tables
        if self._execute is None or edit_tables is None or self._thread.closing:
            raise RuntimeError("the runner is closed")
        last, call = self._last, self._call
        late = None if plan.late is None else self._loop.create_future()
        step = _Launched(plan, last is not None and _follows(plan, last.plan), self._loop.create_future(), late)
        self._last = step
        if last is None or call is None or not step.follows or not call.ask(step, last, edit_tables):
            self._queued.append(step)
            self._thread.post(self._next)
        return StepTicket(step.result, late)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """While it lasts, each step has a call of its own: others of the thread's calls come between them."""
        self._aside += 1
        if (call := self._call) is not None:
            call.further.end()
        try:
            yield
        finally:
            self._aside -= 1

    def close(self) -> None:
        """Launch no more. What is launched is still executed."""
        self._thread.close_soon()

    def forget(self) -> None:
        """Once the thread has ended: let go of all that executes steps."""
        self._collect()
        self._execute = self._edit_tables = self._last = None
        if isinstance(self._loop, EngineLoop):
            self._loop.unwatch(self._collect)

    def _collect(self) -> None:
        """Tell what has come of steps. In launch order, whatever way it came: so all of it is told here."""
        while self._outcomes:
            outcome = self._outcomes[0]
            if isinstance(outcome, _Call):
                if not outcome.tell():
                    break
            else:
                outcome()
            self._outcomes.popleft()

    # --- on the device thread ---

    def _next(self) -> None:
        """Execute the next step that is queued, unless an earlier call has."""
        if self._queued:
            self._run(self._queued.popleft())
        while self._left:
            self._run(self._left.popleft())

    def _run(self, step: _Launched) -> None:
        execute, late = self._execute, step.late
        assert execute is not None

        def tell_late(tokens: LateTokens) -> None:
            if late is not None:
                self._tell(partial(succeed, late, tokens))

        def begin(make: MakeFurther) -> FurtherSteps | None:
            return self._begin(step, make)

        try:
            result = execute(step.plan, tell_late, begin)
        except BaseException as error:
            self._end_call()
            if late is not None:
                self._tell(partial(fail, late, error))
            self._tell(partial(fail, step.result, error))
        else:
            if not self._end_call():
                self._tell(partial(succeed, step.result, result))

    def _tell(self, outcome: Callable[[], object]) -> None:
        self._outcomes.append(outcome)
        self._wake()

    def _wake(self) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._collect)

    def _begin(self, step: _Launched, make: MakeFurther) -> FurtherSteps | None:
        """With this step, those that are launched and follow it."""
        if self._semaphore is None or self._aside:
            return None
        edit_tables = self._edit_tables
        assert edit_tables is not None
        steps, further = [step], make(self._semaphore)  # which may fail: before a step leaves where it waits
        for waiting in (self._left, self._queued):
            while waiting and waiting[0].follows and len(steps) < MOST_STEPS and further.ask():
                steps.append(waiting.popleft())
                edit_tables(steps[-1].plan.tables)
            if waiting:
                break
        call = _Call(steps, further, further.tokens.numpy())
        self._outcomes.append(call)
        self._call = call
        return further

    def _end_call(self) -> int:
        """What was asked of the call and is not done, is left. Returns how many steps are done."""
        call = self._call
        if call is None:
            return 0
        call.further.end()
        self._call = None
        done = call.further.done
        self._left.extendleft(reversed(call.steps[max(1, done) : call.further.asked]))
        call.over = True
        self._wake()
        return done


def _follows(plan: StepPlan, last: StepPlan) -> bool:
    """Whether a step computes the next token of each of the rows that the `last` one has, and nothing else. Its table
    edits then give these rows blocks for the token's own position, which no step before it reads."""
    return plan.decode_rows is last.decode_rows and plan.only_decodes and not len(plan.copies)
