"""The CPU runner: executes plans on one thread.

Knows how to run a step, and nothing else: what to run is the scheduler's, how a layer works is the layers'.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from asyncllm.engine.execution.cpu_embedder import TextFeatures
from asyncllm.engine.execution.device_thread import DeviceThread
from asyncllm.engine.execution.kernel_batch import DecodeRun, make_batch_builder
from asyncllm.engine.execution.kv_cache import CacheLayout, copy_blocks
from asyncllm.engine.execution.prompt_scores import PromptReader, extended
from asyncllm.engine.execution.row_state import Int64Array, RowState
from asyncllm.engine.execution.runner import StepTicket
from asyncllm.engine.execution.sampler import SampledRows, SamplerForm, processed, sample
from asyncllm.engine.execution.step_batch import lay_out_tokens
from asyncllm.engine.execution.step_outputs import lay_out_outputs
from asyncllm.engine.execution.step_relay import BeginRun, StepRelay
from asyncllm.engine.execution.token_scores import NO_SCORES, score_tokens
from asyncllm.engine.plan import (
    NO_TOKEN,
    Float32Array,
    Int32Array,
    LateSamples,
    LateTokens,
    PromptLogprobs,
    StepLogprobs,
    StepPlan,
    StepResult,
    TableEdits,
)
from asyncllm.kernels.cpu.decoder import Draws
from asyncllm.kernels.cpu.further import FurtherSteps
from asyncllm.models.llama import Llama

_NO_ROWS = np.zeros(0, np.int32)


class StepExecutor:
    """Runs steps one after another on the calling thread, which must be in inference mode."""

    def __init__(self, model: Llama, layout: CacheLayout, cache: Tensor, rows: RowState, sampling: SamplerForm) -> None:
        self._sampling = sampling
        self._model = model
        self._layout = layout
        self._cache = cache
        self._rows = rows
        self._builder = make_batch_builder(model, layout, cache)
        self._broken_rows: set[int] = set()
        self._run: DecodeRun | None = None  # of which the last step was one: it knows what its rows do not know yet

    def edit_tables(self, edits: TableEdits) -> None:
        """Set block-table entries that no step which is computed now reads. From any thread."""
        self._rows.edit_tables(edits)

    def text_features(self, token_ids: Int32Array) -> TextFeatures:
        """What computes the embedding of a text."""
        return TextFeatures(self._model, self._layout, self._cache.dtype, token_ids)

    def execute(
        self, plan: StepPlan, tell_late: Callable[[LateTokens], object], begin: BeginRun | None = None
    ) -> StepResult:
        """Run a step; `tell_late` is called in the midst of it. After a failure its rows are broken, and fail every
        step that needs them, until joined anew.

        `begin` is asked, before a step of a run is computed, for those that may follow it without a call of their own.
        """
        try:
            run, self._run = self._run, None
            if run is not None and not run.takes(plan):
                run.settle(self._rows)
                run = None
            self._broken_rows.difference_update([join.row for join in plan.joins])
            if self._broken_rows and (broken := self._broken_rows & _rows_of(plan)):
                raise RuntimeError(f"an earlier step failed, and with it the state of rows {sorted(broken)}")
            return self._execute(plan, run, tell_late, begin)
        except BaseException:
            self._broken_rows |= _rows_of(plan)
            raise

    def _execute(
        self,
        plan: StepPlan,
        run: DecodeRun | None,
        tell_late: Callable[[LateTokens], object],
        begin: BeginRun | None,
    ) -> StepResult:
        """`run`: of which the step is one more."""
        rows = self._rows
        for join in plan.joins:
            rows.join(join)
        rows.edit_tables(plan.tables)
        if len(plan.copies):
            copy_blocks(self._cache, plan.copies)
        if run is not None:
            run.advance(rows)
            return self._draw(plan.step, run, begin, goes_on=True)
        if plan.late is not None:
            tell_late(self._sample_late(plan.step, plan.late))
        if not plan.num_tokens:
            return StepResult(plan.step, np.zeros(0, np.int32))
        rows.take_chunks(plan.chunks)
        tokens, outputs, parts = lay_out_tokens(plan, rows), lay_out_outputs(plan), rows.prompt_parts(plan.chunks)
        draws: Draws | None = None
        if self._model.draws_tokens and len(outputs.rows) and not (outputs.kept or plan.forks or parts):
            draws = rows.draws(outputs.rows, tokens.positions[tokens.sampled] + 1)
        batch = self._builder.build(tokens, rows, draws)
        if draws is not None:
            run = DecodeRun(plan.decode_rows, outputs.rows, tokens, batch, draws)
            return self._draw(plan.step, run, begin, goes_on=not plan.chunks and plan.late is None)
        prompts: tuple[PromptLogprobs, ...] = ()
        if parts:
            reader, count = PromptReader(parts, tokens.chunk_firsts), len(tokens.sampled)
            features = self._model.features(replace(batch, sampled=extended(tokens.sampled, reader)))
            logits = self._model.head(features[:count])
            prompts = reader.read(features[count:], self._model.head)
        else:
            logits = self._model.forward(batch)
        rows.position[tokens.rows] = tokens.positions + 1  # of equal rows the last, and largest, stays
        for fork in plan.forks:
            chunk = plan.chunks[fork.chunk]
            rows.position[fork.row] = chunk.start + len(chunk.token_ids)
        kept = [logits[place].to(torch.float32, copy=True) for _, place in outputs.kept]  # not a view of the whole step
        if outputs.kept or plan.forks:
            logits = logits[torch.from_numpy(outputs.places)]
        scores: StepLogprobs | None = None
        token_ids: Int64Array = np.zeros(0, np.int64)
        if len(outputs.rows):
            settings = rows.sampling(outputs.rows, rows.position[outputs.rows])
            token_ids, scores = self._sample(logits.float(), outputs.rows, settings)
        if prompts:
            scores = StepLogprobs(_NO_ROWS, NO_SCORES, prompts) if scores is None else replace(scores, prompts=prompts)
        read = rows.keep([row for row, _ in outputs.kept], kept)
        return StepResult(plan.step, token_ids.astype(np.int32), scores, read)

    def _draw(self, step: int, run: DecodeRun, begin: BeginRun | None, *, goes_on: bool) -> StepResult:
        """Compute a step, with the tokens that the model draws. It `goes_on` if the next one may be of its run."""
        rows, sampled, decoder = self._rows, run.sampled, self._model.decoder
        further: FurtherSteps | None = None
        if begin is not None and goes_on and decoder is not None and decoder.goes_on:
            further = begin(partial(run.further, decoder))
        run.draw(self._model, further)
        if further is not None and further.done:
            self._run = run
            return StepResult(step, further.tokens[0].numpy())
        if NO_TOKEN in run.token_ids.tolist():  # of what is no number, `sample` knows what it counts as
            logits = run.logits(self._model)
            run.settle(rows)
            token_ids, _ = self._sample(logits, sampled, rows.sampling(sampled, rows.position[sampled]))
            return StepResult(step, token_ids.astype(np.int32))
        if goes_on:
            self._run = run
        else:
            run.settle(rows)
        return StepResult(step, run.token_ids.copy())

    def _sample_late(self, step: int, late: LateSamples) -> LateTokens:
        rows, where = self._rows, late.rows.astype(np.int64)
        settings = replace(
            rows.sampling(where, rows.position[where]),
            masks=late.masks,
            biases=[(index, bias) for index, bias in enumerate(late.biases) if bias is not None],
        )
        token_ids, scores = self._sample(rows.take_kept(late.rows), where, settings)
        return LateTokens(step, token_ids.astype(np.int32), scores)

    def _sample(
        self, logits: Tensor, rows: Int32Array | Int64Array, settings: SampledRows
    ) -> tuple[Int64Array, StepLogprobs | None]:
        """The tokens of these rows, and what those of them that ask are told. `logits` are overwritten."""
        asking = self._rows.logprobs(rows)
        some = np.array([index for index, _ in asking], np.int64)
        raw = logits[torch.from_numpy(some)] if asking else None
        token_ids = sample(logits, settings, self._sampling.library)
        self._rows.take_tokens(rows, settings.position, token_ids)
        if raw is None:
            return token_ids, None
        if self._sampling.processed_logprobs:
            raw = processed(logits, settings, some)
        scores = score_tokens(raw, np.maximum(token_ids[some], 0), [asked for _, asked in asking])
        return token_ids, StepLogprobs(some.astype(np.int32), scores)


def _rows_of(plan: StepPlan) -> set[int]:
    """All rows that a plan computes or samples, or gives blocks to: some of them it only copies to."""
    late = [] if plan.late is None else plan.late.rows.tolist()
    computed = (*plan.decode_rows.tolist(), *(chunk.row for chunk in plan.chunks), *(f.row for f in plan.forks))
    return {*computed, *late, *plan.tables.rows.tolist()}


class CpuRunner:
    """A `Runner` over a `StepExecutor` and the thread it lives on."""

    def __init__(self, thread: DeviceThread, executor: StepExecutor) -> None:
        """Called on the engine's loop."""
        self._thread = thread
        self._executor: StepExecutor | None = executor
        self._relay = StepRelay(thread, executor.execute, executor.edit_tables)

    def launch(self, plan: StepPlan) -> StepTicket:
        """See `Runner.launch`."""
        return self._relay.launch(plan)

    async def embed(self, token_ids: Int32Array) -> Float32Array:
        """See `Embeds.embed`."""
        if self._executor is None:
            raise RuntimeError("the runner is closed")
        with self._relay.aside():
            text = await self._thread.submit(partial(self._executor.text_features, token_ids))
            while (features := await self._thread.submit(text.advance)) is None:
                pass
            return features

    async def aclose(self) -> None:
        """See `Runner.aclose`."""
        self._executor = None
        self._relay.close()
        await self._thread.aclose()
        self._relay.forget()
