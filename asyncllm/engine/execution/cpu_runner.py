"""The CPU runner: executes plans on one thread.

Knows how to run a step, and nothing else: what to run is the scheduler's, how a layer works is the layers'.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from asyncllm.engine.execution.device_thread import DeviceThread
from asyncllm.engine.execution.kv_cache import CacheLayout, copy_blocks
from asyncllm.engine.execution.prompt_scores import PromptReader, extended
from asyncllm.engine.execution.row_state import RowState
from asyncllm.engine.execution.sampler import processed, sample
from asyncllm.engine.execution.step_batch import BatchBuilder, StepTokens, lay_out_tokens
from asyncllm.engine.execution.token_scores import NO_SCORES, score_tokens
from asyncllm.engine.plan import PromptLogprobs, StepLogprobs, StepPlan, StepResult
from asyncllm.models.llama import Llama


class StepExecutor:
    """Runs steps one after another on the calling thread, which must be in inference mode."""

    def __init__(
        self, model: Llama, layout: CacheLayout, cache: Tensor, rows: RowState, *, processed_logprobs: bool = False
    ) -> None:
        """`processed_logprobs`: log-probabilities are those of what is drawn from, not of the model's own logits."""
        self._model = model
        self._processed = processed_logprobs
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
        rows.take_chunks(plan.chunks)
        tokens = lay_out_tokens(plan, rows)
        batch = self._builder.build(tokens, rows)
        prompts: tuple[PromptLogprobs, ...] = ()
        if parts := rows.prompt_parts(plan.chunks):
            reader, count = PromptReader(parts, tokens.chunk_firsts), len(tokens.sampled)
            features = self._model.features(replace(batch, sampled=extended(tokens.sampled, reader)))
            logits = self._model.head(features[:count])
            prompts = reader.read(features[count:], self._model.head)
        else:
            logits = self._model.forward(batch)
        rows.position[tokens.rows] = tokens.positions + 1  # of equal rows the last, and largest, stays
        return self._sample(plan.step, logits, tokens, prompts)

    def _sample(self, step: int, logits: Tensor, tokens: StepTokens, prompts: tuple[PromptLogprobs, ...]) -> StepResult:
        rows = self._rows
        if not len(tokens.sampled):
            scores = StepLogprobs(np.zeros(0, np.int32), NO_SCORES, prompts) if prompts else None
            return StepResult(step, np.zeros(0, np.int32), scores)
        sampled_rows, positions = tokens.rows[tokens.sampled], tokens.positions[tokens.sampled] + 1
        logits, settings, asking = logits.float(), rows.sampling(sampled_rows, positions), rows.logprobs(sampled_rows)
        some = np.array([index for index, _ in asking], np.int64)
        raw = logits[torch.from_numpy(some)] if asking else None
        token_ids = sample(logits, settings)
        rows.take_tokens(sampled_rows, positions, token_ids)
        scores = None
        if asking or prompts:
            if raw is not None and self._processed:
                raw = processed(logits, settings, some)
            found = NO_SCORES if raw is None else score_tokens(raw, token_ids[some], [asked for _, asked in asking])
            scores = StepLogprobs(some.astype(np.int32), found, prompts)
        return StepResult(step, token_ids.astype(np.int32), scores)


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
