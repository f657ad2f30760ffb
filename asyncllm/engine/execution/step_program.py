"""What one step does on the GPU, as a sequence of launches that depends on nothing but the step's size and kind.

So the same launches, captured once in a CUDA graph, are right for every later step of that size and kind: what else
there is to know of a step, they read from its line of the `StepRing`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from asyncllm.engine.execution.device_adjustments import SamplerUse
from asyncllm.engine.execution.device_rows import DeviceRows
from asyncllm.engine.execution.device_scores import StepScorer
from asyncllm.engine.execution.kv_cache import CacheLayout
from asyncllm.engine.execution.prompt_scores import PromptReader
from asyncllm.engine.execution.step_ring import StepRing
from asyncllm.engine.execution.told_logits import StepTold, tell_prompts
from asyncllm.kernels.attention_plan import (
    LEAST_SHARED,
    AttentionPlan,
    AttentionShape,
    make_attention_plan,
    plan_attention,
)
from asyncllm.kernels.logit_adjustment import adjust_logits, count_tokens
from asyncllm.kernels.rare_filters import filter_rare_rows
from asyncllm.kernels.sampling import AdjustedLogits, make_sampling_workspace, sample
from asyncllm.kernels.step_layout import lay_out_step, make_step_arrays
from asyncllm.kernels.token_output import put_out_tokens
from asyncllm.layers.paged_attention import PagedBatch
from asyncllm.models.forward_batch import ForwardBatch
from asyncllm.models.llama import Llama


class StepKind(NamedTuple):
    """All that the launches of a step depend on."""

    tokens: int  # the matrix products have this many rows; the step's own tokens come first
    chunks: bool  # the step may have chunks
    use: SamplerUse = SamplerUse.FILTERED  # what its rows may ask of the sampler, at most


class StepProgram:
    """Runs on the current stream. What it works on is allocated once, but for what passes between layers."""

    def __init__(  # noqa: PLR0913 (what a step works on, made one after another)
        self,
        model: Llama,
        layout: CacheLayout,
        cache: Tensor,
        rows: DeviceRows,
        ring: StepRing,
        *,
        deterministic: bool = False,
    ) -> None:
        self._model = model
        self._layout = layout
        self._cache = cache
        self._rows = rows
        self._ring = ring
        device, num_rows, max_tokens = cache.device, ring.layout.rows, ring.layout.tokens
        self.turn = torch.zeros(1, dtype=torch.int32, device=device)  # the ring's line of the next step
        self._arrays = make_step_arrays(ring.layout, max_tokens, device)
        self._plans = _attention_plans(model, layout, cache, ring, deterministic=deterministic)
        self._token_ids = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self._workspace = make_sampling_workspace(num_rows, model.config.vocab_size, device)

    def sampled(self, kind: StepKind) -> int:
        """How many rows of logits a step of this kind computes."""
        return min(kind.tokens, self._ring.layout.rows)

    def run(self, kind: StepKind, told: StepTold | None = None, reader: PromptReader | None = None) -> None:
        """Launch the step whose turn it is. Not for a graph: what is `told` of whole rows, and of prompts."""
        arrays, rows, ring = self._arrays, self._rows, self._ring
        lay_out_step(
            ring.words,
            self.turn,
            ring.layout,
            arrays,
            tables=rows.tables,
            next_positions=rows.next_positions,
            last_tokens=rows.last_tokens,
            chunks=self.sampled(kind) if kind.chunks else 0,
        )
        for window, plan in self._plans.items():
            # prefixes are shared where all layers of a plan look up the same table
            users = [group for group, each in enumerate(self._layout.groups) if each.window == window]
            table = rows.tables[users[0]] if len(users) == 1 else None
            plan_attention(plan, arrays.sequences, tokens=kind.tokens, block_table=table, overlap=True)
        batch = self._batch(kind)
        if told is None or reader is None:
            logits = self._model.forward(batch)
        else:
            logits = self._forward_telling(batch, self.sampled(kind), told, reader)
        self._sample(logits, kind.use, told)
        put_out_tokens(ring.tokens, self.turn, self._token_ids, arrays.num_sampled)

    def _forward_telling(self, batch: ForwardBatch, count: int, told: StepTold, reader: PromptReader) -> Tensor:
        """The logits of the step's samples; what there is to tell of prompts is read off those of other tokens."""
        others = told.places(reader.places, self._cache.device)
        sampled = torch.cat((self._arrays.sampled[:count], others))
        features = self._model.features(replace(batch, sampled=sampled))
        told.prompts = tell_prompts(reader.parts, features[count:], self._model.head)
        return self._model.head(features[:count])

    def _sample(self, logits: Tensor, use: SamplerUse, told: StepTold | None) -> None:
        arrays, rows = self._arrays, self._rows
        where = {"rows": arrays.sampled_rows, "positions": arrays.sampled_positions, "num_rows": arrays.num_sampled}
        size, count, special = self._model.config.vocab_size, len(logits), rows.adjustments
        scorer, adjusted = self._scorer(use, where["rows"], where["num_rows"]), None
        if use >= SamplerUse.ADJUSTED and special.rows is not None and special.logits is not None:
            some = special.logits[:count]
            adjust_logits(some, logits, rows.settings, special.rows, vocabulary=size, **where)
            filter_rare_rows(some, rows.settings, special.rows, vocabulary=size, **where)
            adjusted = AdjustedLogits(special.rows.integers("duties"), some)
        told_logits, heat = logits, None
        if special.processed_logprobs and adjusted is not None:
            told_logits, heat = adjusted.logits, rows.settings.temperature
        if scorer is not None:
            scorer.score_most_likely(told_logits, heat)
        if told is not None and (places := told.whole_places()):
            told.tell_whole(told_logits[:, :size], places, arrays.sampled_rows, heat)
        sample(
            logits,
            rows.settings,
            self._workspace,
            **where,
            vocabulary=size,
            token_ids=self._token_ids,
            row_token_ids=rows.last_tokens,
            adjusted=adjusted,
            filters=use > SamplerUse.PLAIN,
        )
        if adjusted is not None and special.rows is not None:
            count_tokens(special.rows, self._token_ids[:count], **where)
        if scorer is not None:
            scorer.score_named(told_logits, heat, self._token_ids[:count])

    def _scorer(self, use: SamplerUse, rows: Tensor, num_rows: Tensor) -> StepScorer | None:
        if use < SamplerUse.SCORED:
            return None
        return self._rows.scores.scorer(self.turn, rows, num_rows)

    def _batch(self, kind: StepKind) -> ForwardBatch:
        arrays, some = self._arrays, slice(kind.tokens)
        positions, rows = arrays.positions[some], arrays.rows[some]
        lengths: Tensor | None = None
        if self._model.rotary.length_dependent:
            lengths = torch.maximum(self._rows.prompt_tokens.index_select(0, rows), positions + 1)
        groups = zip(self._layout.groups, self._rows.tables, strict=True)
        return ForwardBatch(
            token_ids=arrays.token_ids[some],
            positions=positions,
            lengths=lengths,
            sampled=self._sampled(kind),
            attention=tuple(
                PagedBatch(positions, rows, arrays.num_tokens, table, self._plans[group.window], kind.chunks)
                for group, table in groups
            ),
            cache=self._cache,
        )

    def _sampled(self, kind: StepKind) -> Tensor | None:
        count = self.sampled(kind)
        # without chunks every token is a decoding row's, or fills the step up
        return self._arrays.sampled[:count] if kind.chunks or count < kind.tokens else None


def _attention_plans(
    model: Llama, layout: CacheLayout, cache: Tensor, ring: StepRing, *, deterministic: bool
) -> dict[int | None, AttentionPlan]:
    """A plan for each window that a cache group has. They share what one layer's launch alone needs."""
    plans: dict[int | None, AttentionPlan] = {}
    for window in dict.fromkeys(group.window for group in layout.groups):
        shape = AttentionShape(model.config.num_heads, layout.num_kv_heads, layout.head_dim, layout.block_size, window)
        plans[window] = make_attention_plan(
            shape,
            cache.dtype,
            cache.device,
            max_tokens=ring.layout.tokens,
            max_sequences=ring.layout.rows,
            least_shared=LEAST_SHARED,
            deterministic=deterministic,
        )
    largest = max(plans.values(), key=lambda plan: len(plan.partial))
    shared = {name: getattr(largest, name) for name in ("partial", "statistics", "arrivals")}
    return {window: replace(plan, **shared) for window, plan in plans.items()}
