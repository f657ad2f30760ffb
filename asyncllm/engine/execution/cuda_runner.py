"""The GPU runner: launches steps from the engine's thread and waits for them on another.

A launch writes the step's few words, launches a graph and records an event; nothing is done for a row that did not
change. Waiting is one blocking wait a step, without the interpreter lock. What a step does is the executor's, and what
to run the scheduler's.
"""

from __future__ import annotations

import asyncio
import threading
from functools import partial

import torch

from asyncllm.engine.execution.cuda_device import is_device_fault
from asyncllm.engine.execution.cuda_embedder import DeviceText
from asyncllm.engine.execution.cuda_executor import CudaExecutor, Launched, read_late, read_result
from asyncllm.engine.execution.device_thread import DeviceThread
from asyncllm.engine.execution.runner import StepTicket
from asyncllm.engine.execution.step_ring import StepRing
from asyncllm.engine.plan import Float32Array, Int32Array, LateTokens, StepPlan, StepResult
from asyncllm.errors import EngineDead

STEPS = 4
"""Lines of the ring: more than an engine ever has in flight, which is run_ahead + 1. Further launches wait."""


class Ticket:
    """A launched step, and what belongs to it until it is complete: a line of the ring among others."""

    def __init__(self) -> None:
        self.complete = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.late_complete = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # of the late samples
        self.idle = threading.Event()
        self.idle.set()
        # With pinned memory that its launches read and write. Dropped by the launching thread, which does not capture
        # then: torch may record an event on the stream for it.
        self.launched: Launched | None = None


class CudaRunner:
    """A `Runner` over a `CudaExecutor`."""

    def __init__(self, executor: CudaExecutor, ring: StepRing, turn: int) -> None:
        """`turn`: the ring's line of the next step."""
        self._executor: CudaExecutor | None = executor
        self._ring: StepRing | None = ring
        self._turn = turn
        self._tickets = [Ticket() for _ in range(STEPS)]
        self._waiter = DeviceThread("asyncllm-cuda")
        self._fault: EngineDead | None = None
        self._embedding = asyncio.Lock()

    def launch(self, plan: StepPlan) -> StepTicket:
        """See `Runner.launch`. A step that cannot be launched raises, and leaves every row of it undefined."""
        executor, ticket = self._open_executor(), self._tickets[self._turn]
        ticket.idle.wait()
        try:
            stream = executor.stream
            ticket.launched = executor.enqueue(plan, self._turn, lambda: ticket.late_complete.record(stream))
            ticket.complete.record(stream)
        except Exception as error:
            self._raise_fault(error)
            self._recover(executor)
            raise
        ticket.idle.clear()
        late: asyncio.Future[LateTokens] | None = None
        if plan.late is not None:
            late = self._waiter.submit(partial(self._complete_late, ticket, self._turn, plan))
        future = self._waiter.submit(partial(self._complete, ticket, self._turn, plan))
        self._turn = (self._turn + 1) % STEPS
        executor.capture()
        return StepTicket(future, late)

    async def embed(self, token_ids: Int32Array) -> Float32Array:
        """See `Embeds.embed`. Texts are computed one after another, so that one cache of a text is there at most."""
        async with self._embedding:
            text = self._open_executor().text(token_ids)
            try:
                while True:
                    is_last = self._launch_text(text)
                    await self._waiter.submit(self._mark().synchronize)
                    if is_last:
                        return text.read()
            except Exception as error:
                self._raise_fault(error)
                raise
            finally:
                text.close()

    def _launch_text(self, text: DeviceText) -> bool:
        """The next chunk; says whether it was the last one. Nobody waits: what it writes is the text's alone."""
        self._open_executor()
        return text.launch()

    def _mark(self) -> torch.cuda.Event:
        """Complete when all that is launched so far is."""
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        event.record(self._open_executor().stream)
        return event

    def _open_executor(self) -> CudaExecutor:
        if self._executor is None:
            raise RuntimeError("the runner is closed")
        if self._fault is not None:
            raise self._fault
        return self._executor

    async def aclose(self) -> None:
        """See `Runner.aclose`."""
        executor, self._executor = self._executor, None
        async with self._embedding:  # a text sees that it is over, and lets go of its memory
            pass
        await self._waiter.aclose()
        if executor is not None:
            for ticket in self._tickets:
                ticket.launched = None
            self._ring = None
            executor.close(faulty=self._fault is not None)

    def _complete_late(self, ticket: Ticket, turn: int, plan: StepPlan) -> LateTokens:
        """On the waiting thread, and before the rest of the step."""
        assert self._ring is not None
        assert ticket.launched is not None
        try:
            ticket.late_complete.synchronize()
            return read_late(plan, ticket.launched, self._ring, turn)
        except Exception as error:
            self._raise_fault(error)
            raise

    def _complete(self, ticket: Ticket, turn: int, plan: StepPlan) -> StepResult:
        """On the waiting thread."""
        assert self._ring is not None
        assert ticket.launched is not None
        try:
            ticket.complete.synchronize()
            return read_result(plan, ticket.launched, self._ring, turn)
        except Exception as error:
            self._raise_fault(error)
            raise
        finally:
            ticket.idle.set()

    def _recover(self, executor: CudaExecutor) -> None:
        try:
            executor.recover(self._turn)
        except Exception as error:
            self._raise_fault(error)
            raise

    def _raise_fault(self, error: Exception) -> None:
        """Raise `EngineDead` where the error means that the device is of no more use."""
        if is_device_fault(error):
            self._fault = EngineDead(f"the GPU failed, and with it every engine of this process on it: {error}")
            raise self._fault from error
