"""What one step does on the GPU, as a sequence of launches that depends on nothing but the step's size and kind.

So the same launches, captured once in a CUDA graph, are right for every later step of that size and kind: what else
there is to know of a step, they read from its line of the `StepRing`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from asyncllm.engine.execution.device_rows import DeviceRows
from asyncllm.engine.execution.kv_cache import CacheLayout
from asyncllm.engine.execution.step_ring import StepRing
from asyncllm.kernels.attention_plan import (
    LEAST_SHARED,
    AttentionPlan,
    AttentionShape,
    make_attention_plan,
    plan_attention,
)
from asyncllm.kernels.sampling import make_sampling_workspace, sample
from asyncllm.kernels.step_layout import lay_out_step, make_step_arrays
from asyncllm.kernels.token_output import put_out_tokens
from asyncllm.layers.paged_attention import PagedBatch
from asyncllm.models.forward_batch import ForwardBatch
from asyncllm.models.llama import Llama


class StepKind(NamedTuple):
    """All that the launches of a step depend on."""

    tokens: int  # the matrix products have this many rows; the step's own tokens come first
    chunks: bool  # the step may have chunks


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

    def run(self, kind: StepKind) -> None:
        """Launch the step whose turn it is."""
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
        logits = self._model.forward(self._batch(kind))
        sample(
            logits,
            rows.settings,
            self._workspace,
            rows=arrays.sampled_rows,
            positions=arrays.sampled_positions,
            num_rows=arrays.num_sampled,
            vocabulary=self._model.config.vocab_size,
            token_ids=self._token_ids,
            row_token_ids=rows.last_tokens,
        )
        put_out_tokens(ring.tokens, self.turn, self._token_ids, arrays.num_sampled)

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
