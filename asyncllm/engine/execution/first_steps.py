"""The first steps on a GPU: they have every kernel compiled, then run, and are captured.

They are launched once without running our kernels, to learn which there are. These are compiled side by side, in
processes of their own, while the weights load. Those that only rare requests ask for come last: the first steps do not
wait for them, but whoever starts an engine does, so that no request ever waits for a compiler.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import torch

from asyncllm.engine.execution.cuda_executor import CudaExecutor
from asyncllm.engine.execution.cuda_runner import STEPS
from asyncllm.engine.execution.device_rows import RowSizes
from asyncllm.engine.execution.device_thread import DeviceThread
from asyncllm.engine.execution.graph_sizes import first_graph_sizes
from asyncllm.engine.execution.head_start import HeadStart
from asyncllm.engine.execution.rare_kernels import launch_rare_kernels
from asyncllm.engine.plan import Chunk, RowJoin, RowSampling, StepPlan, TableEdits
from asyncllm.kernels.compilation import Compilation, load_kernel
from asyncllm.kernels.triton_key import hash_triton

logger = logging.getLogger("asyncllm")

LEAST_LENGTH = 32
"""Positions that the first steps need of a row."""


class FirstSteps:
    """Compiles for these plans, and runs them. Used by the thread that loads a model, which may be told to end."""

    def __init__(self, executor: CudaExecutor, plans: Sequence[StepPlan], thread: DeviceThread) -> None:
        self._executor = executor
        self._plans = plans
        self._thread = thread
        self._needed: list[Future[None]] = []

    @contextmanager
    def compiling(self, head_start: HeadStart, sizes: RowSizes, *, processed_logprobs: bool) -> Iterator[None]:
        """Begin to compile; at the end all is compiled, what rare requests need too."""
        started, processes = time.monotonic(), head_start.processes
        head_start.wait()
        hash_triton()  # not at once on many threads
        pool = ThreadPoolExecutor(
            processes.count, "asyncllm-compile", torch.cuda.set_device, (self._executor.stream.device,)
        )
        try:
            compilation = Compilation(pool, processes, load_kernel)
            # What takes longest to compile comes first: sampling, in one token's step and then of rare requests.
            with compilation.launches() as needed:
                self._executor.enqueue(min(self._plans, key=lambda plan: plan.num_tokens), 0)
            with compilation.launches() as rare:
                launch_rare_kernels(self._executor, sizes, processed_logprobs=processed_logprobs)
            with compilation.launches() as others:
                for plan in self._plans:
                    self._executor.enqueue(plan, 0)
            self._needed = [*needed, *others]
            logger.debug(
                "kernels of %d kinds launched in %.2f s, to be compiled by %d processes",
                len(compilation.kinds),
                time.monotonic() - started,
                processes.count,
            )
            yield
            self._wait_for(rare, "rare requests' kernels")
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def run(self) -> int:
        """Capture them, once they are compiled, and run the largest of each kind: smaller ones launch the same kernels,
        and are captured unrun. Returns the ring's line of the next step."""
        self._wait_for(self._needed, "the first steps' kernels")
        executor, started, turn = self._executor, time.monotonic(), 0
        largest = {bool(plan.chunks): plan for plan in reversed(self._plans)}
        running = {id(plan) for plan in (*largest.values(), self._plans[-1])}
        for plan in self._thread.interruptible(self._plans):
            if id(plan) not in running:
                executor.capture_unrun(plan)
                continue
            kept = executor.enqueue(plan, turn)
            executor.capture()
            executor.stream.synchronize()
            del kept
            turn = (turn + 1) % STEPS
        logger.debug("captured %d first steps in %.2f s", len(self._plans), time.monotonic() - started)
        return turn

    def _wait_for(self, kernels: Sequence[Future[None]], name: str) -> None:
        started = time.monotonic()
        for kernel in self._thread.interruptible(kernels):
            kernel.result()
        logger.debug("waited %.2f s for %s", time.monotonic() - started, name)


def first_plans(num_rows: int, max_tokens: int, length: int) -> list[StepPlan]:
    """Steps of each size that gets a graph at the start; they run every kernel, and write to the null block only.

    They take rows for no request; whoever joins next finds nothing of them. `length` is at least `LEAST_LENGTH`.
    """
    longest = length - LEAST_LENGTH // 2
    plans = []
    for size in first_graph_sizes(min(max_tokens, num_rows * longest), chunks=True):
        counts = [min(longest, size - start) for start in range(0, size, longest)]
        plans.append(_plan(counts, 0))
    plans += [_plan([], size) for size in first_graph_sizes(min(num_rows, max_tokens), chunks=False)]
    # last, so that nothing is left of the filters: graphs of steps without any are made when they are first worth it
    plain = RowSampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)
    return [*plans, _plan([], 1, plain)]


_FILTERED = RowSampling(temperature=1.0, top_k=2, top_p=0.5, min_p=0.1, seed=0)


def _plan(counts: list[int], decoding: int, sampling: RowSampling = _FILTERED) -> StepPlan:
    none = np.zeros(0, np.int32)
    return StepPlan(
        step=0,
        joins=(RowJoin(0, 0, sampling),),
        tables=TableEdits(none, none, none, none),
        copies=np.zeros((0, 2), np.int32),
        chunks=tuple(Chunk(row, 0, np.zeros(count, np.int32), samples=True) for row, count in enumerate(counts)),
        decode_rows=np.arange(decoding, dtype=np.int32),
        decode_changed=True,
    )
