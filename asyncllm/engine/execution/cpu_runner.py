"""The CPU runner: executes plans on one thread.

Knows how to run a step, and nothing else: what to run is the scheduler's, how a layer works is the layers'.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from asyncllm.engine.execution.device_thread import Answer, DeviceThread
from asyncllm.engine.execution.kv_cache import CacheLayout, copy_blocks
from asyncllm.engine.execution.late_logits import adjust_logits
from asyncllm.engine.execution.row_state import Int64Array, RowState
from asyncllm.engine.execution.runner import StepTicket
from asyncllm.engine.execution.sampler import sample
from asyncllm.engine.execution.step_batch import BatchBuilder, lay_out_tokens
from asyncllm.engine.execution.step_outputs import lay_out_outputs
from asyncllm.engine.plan import LateSamples, LateTokens, StepPlan, StepResult
from asyncllm.models.llama import Llama


class StepExecutor:
    """Runs steps one after another on the calling thread, which must be in inference mode."""

    def __init__(self, model: Llama, layout: CacheLayout, cache: Tensor, rows: RowState) -> None:
        self._model = model
        self._cache = cache
        self._rows = rows
        self._builder = BatchBuilder(layout, cache, needs_lengths=model.rotary.length_dependent)
        self._broken_rows: set[int] = set()

    def execute(self, plan: StepPlan, tell_late: Callable[[LateTokens], object]) -> StepResult:
        """Run a step; `tell_late` is called in the midst of it. After a failure its rows are broken, and fail every
        step that needs them, until joined anew."""
        planned = {*plan.decode_rows.tolist(), *(chunk.row for chunk in plan.chunks), *(f.row for f in plan.forks)}
        if plan.late is not None:
            planned.update(plan.late.rows.tolist())
        self._broken_rows.difference_update(join.row for join in plan.joins)
        try:
            if broken := planned & self._broken_rows:
                raise RuntimeError(f"an earlier step failed, and with it the state of rows {sorted(broken)}")
            return self._execute(plan, tell_late)
        except BaseException:
            self._broken_rows |= planned
            raise

    def _execute(self, plan: StepPlan, tell_late: Callable[[LateTokens], object]) -> StepResult:
        rows = self._rows
        for join in plan.joins:
            rows.join(join)
        rows.edit_tables(plan.tables)
        if len(plan.copies):
            copy_blocks(self._cache, plan.copies)
        if plan.late is not None:
            tell_late(LateTokens(plan.step, self._sample_late(plan.late).astype(np.int32)))
        if not plan.num_tokens:
            return StepResult(plan.step, np.zeros(0, np.int32))
        tokens = lay_out_tokens(plan, rows)
        logits = self._model.forward(self._builder.build(tokens, rows))
        rows.position[tokens.rows] = tokens.positions + 1  # of equal rows the last, and largest, stays
        outputs = lay_out_outputs(plan)
        for fork in plan.forks:
            chunk = plan.chunks[fork.chunk]
            rows.position[fork.row] = chunk.start + len(chunk.token_ids)
        for row, place in outputs.kept:
            rows.kept[row] = logits[place].to(torch.float32, copy=True)  # not a view of the whole step
        if outputs.kept or plan.forks:
            logits = logits[torch.from_numpy(outputs.places)]
        token_ids = np.zeros(0, np.int64)
        if len(outputs.rows):
            token_ids = sample(logits.float(), rows.sampling(outputs.rows, rows.position[outputs.rows]))
            rows.last_token[outputs.rows] = token_ids
        read = [rows.kept[row].numpy().copy() for row, _ in outputs.kept if rows.reads_logits[row]]
        return StepResult(plan.step, token_ids.astype(np.int32), logits=np.stack(read) if read else None)

    def _sample_late(self, late: LateSamples) -> Int64Array:
        rows, where = self._rows, late.rows.astype(np.int64)
        logits = torch.stack([rows.kept.pop(row) for row in late.rows.tolist()])
        adjust_logits(logits, late)
        token_ids = sample(logits, rows.sampling(where, rows.position[where]))
        rows.last_token[where] = token_ids
        return token_ids


class CpuRunner:
    """A `Runner` over a `StepExecutor` and the thread it lives on."""

    def __init__(self, thread: DeviceThread, executor: StepExecutor) -> None:
        self._thread = thread
        self._executor: StepExecutor | None = executor

    def launch(self, plan: StepPlan) -> StepTicket:
        """See `Runner.launch`."""
        if self._executor is None:
            raise RuntimeError("the runner is closed")
        late: Answer[LateTokens] | None = None if plan.late is None else Answer()
        result = self._thread.submit(partial(_execute, self._executor, plan, late))
        return StepTicket(result, None if late is None else late.future)

    async def aclose(self) -> None:
        """See `Runner.aclose`."""
        self._executor = None  # launched steps hold it until they are done
        await self._thread.aclose()


def _execute(executor: StepExecutor, plan: StepPlan, late: Answer[LateTokens] | None) -> StepResult:
    if late is None:
        return executor.execute(plan, lambda tokens: None)
    try:
        return executor.execute(plan, late.succeed)
    except BaseException as error:
        late.fail(error)
        raise
