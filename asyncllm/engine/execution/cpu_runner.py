"""The CPU runner: executes plans on one thread.

Knows how to run a step, and nothing else: what to run is the scheduler's, how a layer works is the layers'.
"""

from __future__ import annotations

import asyncio
from functools import partial

import numpy as np
from torch import Tensor

from asyncllm.engine.execution.device_thread import DeviceThread
from asyncllm.engine.execution.kv_cache import CacheLayout, copy_blocks
from asyncllm.engine.execution.row_state import RowState
from asyncllm.engine.execution.sampler import sample
from asyncllm.engine.execution.step_batch import BatchBuilder, lay_out_tokens
from asyncllm.engine.plan import StepPlan, StepResult
from asyncllm.models.llama import Llama


class StepExecutor:
    """Runs steps one after another on the calling thread, which must be in inference mode."""

    def __init__(self, model: Llama, layout: CacheLayout, cache: Tensor, rows: RowState) -> None:
        self._model = model
        self._cache = cache
        self._rows = rows
        self._builder = BatchBuilder(layout, cache, needs_lengths=model.rotary.length_dependent)
        self._broken_rows: set[int] = set()

    def execute(self, plan: StepPlan) -> StepResult:
        """Run a step. After a failure its rows are broken, and fail every step that needs them, until joined anew."""
        planned = {*plan.decode_rows.tolist(), *(chunk.row for chunk in plan.chunks)}
        self._broken_rows.difference_update(join.row for join in plan.joins)
        try:
            if broken := planned & self._broken_rows:
                raise RuntimeError(f"an earlier step failed, and with it the state of rows {sorted(broken)}")
            return self._execute(plan)
        except BaseException:
            self._broken_rows |= planned
            raise

    def _execute(self, plan: StepPlan) -> StepResult:
        rows = self._rows
        for join in plan.joins:
            rows.join(join)
        rows.edit_tables(plan.tables)
        if len(plan.copies):
            copy_blocks(self._cache, plan.copies)
        tokens = lay_out_tokens(plan, rows)
        logits = self._model.forward(self._builder.build(tokens, rows))
        rows.position[tokens.rows] = tokens.positions + 1  # of equal rows the last, and largest, stays
        token_ids = np.zeros(0, np.int64)
        if len(tokens.sampled):
            sampled_rows = tokens.rows[tokens.sampled]
            settings = rows.sampling(sampled_rows, tokens.positions[tokens.sampled] + 1)
            token_ids = sample(logits.float(), settings)
            rows.last_token[sampled_rows] = token_ids
        return StepResult(plan.step, token_ids.astype(np.int32))


class CpuRunner:
    """A `Runner` over a `StepExecutor` and the thread it lives on."""

    def __init__(self, thread: DeviceThread, executor: StepExecutor) -> None:
        self._thread = thread
        self._executor: StepExecutor | None = executor

    def launch(self, plan: StepPlan) -> asyncio.Future[StepResult]:
        """See `Runner.launch`."""
        if self._executor is None:
            raise RuntimeError("the runner is closed")
        return self._thread.submit(partial(self._executor.execute, plan))

    async def aclose(self) -> None:
        """See `Runner.aclose`."""
        self._executor = None  # launched steps hold it until they are done
        await self._thread.aclose()
