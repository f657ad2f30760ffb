"""What one step does on the GPU, as a sequence of launches that depends on nothing but the step's size and kind.

So the same launches, captured once in a CUDA graph, are right for every later step of that size and kind: what else
there is to know of a step, they read from its line of the `StepRing`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from asyncllm.engine.execution.device_adjustments import SamplerUse
from asyncllm.engine.execution.device_rows import DeviceRows
from asyncllm.engine.execution.kv_cache import CacheLayout
from asyncllm.engine.execution.logit_sampler import HostWords, LogitSampler, Told, places_on
from asyncllm.engine.execution.prompt_scores import PromptReader
from asyncllm.engine.execution.step_ring import StepRing
from asyncllm.engine.execution.told_logits import StepTold, tell_prompts
from asyncllm.engine.plan import LateSamples
from asyncllm.kernels.attention_plan import (
    LEAST_SHARED,
    AttentionPlan,
    AttentionShape,
    Sequences,
    make_attention_plan,
    plan_attention,
)
from asyncllm.kernels.late_logits import keep_logits
from asyncllm.kernels.sampled_rows import LogitRows
from asyncllm.kernels.step_layout import lay_out_step, make_step_arrays
from asyncllm.kernels.token_output import put_out_tokens
from asyncllm.kernels.token_scores import ScoreRing
from asyncllm.layers.paged_attention import PagedBatch
from asyncllm.models.forward_batch import ForwardBatch
from asyncllm.models.llama import Llama


class StepKind(NamedTuple):
    """All that the launches of a step depend on."""

    tokens: int  # the matrix products have this many rows; the step's own tokens come first
    chunks: bool  # the step may have chunks
    use: SamplerUse = SamplerUse.FILTERED  # what its rows may ask of the sampler, at most


@dataclass(frozen=True, slots=True)
class ForkRows:
    """Further choices of a step's requests: int32 arrays on the device, and pinned memory that they came from."""

    rows: Tensor  # [f] all of them
    positions: Tensor  # [f] where their chunks end
    first: int  # how many samples the step has without them
    total: Tensor  # [1] with them
    places: Tensor | None  # [s] of those that sample now: of their logits
    sampled: LogitRows  # the same ones
    keeping: Tensor | None  # [k] those that keep logits
    keeping_places: Tensor  # [k]
    kept: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class ByHand:
    """What a step does that no graph does: it is rare, or its launches depend on more than its kind."""

    told: StepTold | None = None  # log-probabilities of whole rows
    reader: PromptReader | None = None  # and of prompts
    forks: ForkRows | None = None


@dataclass(frozen=True, slots=True)
class TextChunk:
    """Some tokens of a text that is no request, on the device; integers are int32. See `cuda_embedder`."""

    token_ids: Tensor  # [n]; those beyond num_tokens fill it up
    positions: Tensor  # [n]
    rows: Tensor  # [n] zeros: its tables have one row
    lengths: Tensor  # [n] of the whole text
    num_tokens: Tensor  # [1]
    last: Tensor  # [1] the last one that counts
    sequences: Sequences  # the one
    tables: Tensor  # [groups, 1, blocks of a row]
    cache: Tensor  # its own, as the engine's


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
        self.layout = layout
        self._cache = cache
        self._rows = rows
        self._ring = ring
        device, num_rows, max_tokens = cache.device, ring.layout.rows, ring.layout.tokens
        self.turn = torch.zeros(1, dtype=torch.int32, device=device)  # the ring's line of the next step
        self._arrays = make_step_arrays(ring.layout, max_tokens, device)
        self._plans = _attention_plans(model, layout, cache, ring, deterministic=deterministic)
        self._token_ids = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self._late_ids = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self._none = torch.zeros(1, dtype=torch.int32, device=device)
        self._sampler = LogitSampler(rows, num_rows, model.config.vocab_size, device)

    @property
    def vocabulary(self) -> int:
        """Logits of a row."""
        return self._model.config.vocab_size

    @property
    def max_sequences(self) -> int:
        """Rows that a step computes at most."""
        return self._ring.layout.rows

    def sampled(self, kind: StepKind) -> int:
        """How many rows of logits a step of this kind computes."""
        return min(kind.tokens, self._ring.layout.rows)

    def run(self, kind: StepKind, by_hand: ByHand | None = None) -> None:
        """Launch the step whose turn it is; `by_hand`: what no graph does."""
        arrays, rows, ring = self._arrays, self._rows, self._ring
        lay_out_step(
            ring.words,
            self.turn,
            ring.layout,
            arrays,
            tables=rows.tables,
            next_positions=rows.next_positions,
            last_tokens=rows.last_tokens,
            settings=rows.join_settings,
            seeds=rows.settings.seed,
            chunks=self.sampled(kind) if kind.chunks else 0,
        )
        for window, plan in self._plans.items():
            # prefixes are shared where all layers of a plan look up the same table
            users = [group for group, each in enumerate(self.layout.groups) if each.window == window]
            table = rows.tables[users[0]] if len(users) == 1 else None
            plan_attention(plan, arrays.sequences, tokens=kind.tokens, block_table=table, overlap=True)
        batch = self._batch(kind)
        if by_hand is None or by_hand.told is None or by_hand.reader is None:
            logits = self._model.forward(batch)
        else:
            logits = self._forward_telling(batch, self.sampled(kind), by_hand.told, by_hand.reader)
        put_out_tokens(ring.tokens, self.turn, self._token_ids, self._sample(logits, kind, by_hand))

    def _forward_telling(self, batch: ForwardBatch, count: int, told: StepTold, reader: PromptReader) -> Tensor:
        """The logits of the step's samples; what there is to tell of prompts is read off those of other tokens."""
        others = told.on_device(reader.places, self._cache.device)
        sampled = torch.cat((self._arrays.sampled[:count], others))
        features = self._model.features(replace(batch, sampled=sampled))
        told.prompts = tell_prompts(reader.parts, features[count:], self._model.head)
        return self._model.head(features[:count])

    def text_features(self, chunk: TextChunk) -> Tensor:
        """Compute a chunk into its own cache; the features [1, hidden] of its last token."""
        for plan in self._plans.values():  # of the step that comes next, which makes them anew
            plan_attention(plan, chunk.sequences, tokens=len(chunk.token_ids), overlap=True)
        groups = zip(self.layout.groups, chunk.tables, strict=True)
        batch = ForwardBatch(
            token_ids=chunk.token_ids,
            positions=chunk.positions,
            lengths=chunk.lengths if self._model.rotary.length_dependent else None,
            sampled=chunk.last,
            attention=tuple(
                PagedBatch(chunk.positions, chunk.rows, chunk.num_tokens, table, self._plans[group.window], True)
                for group, table in groups
            ),
            cache=chunk.cache,
        )
        return self._model.features(batch)

    def skip(self) -> None:
        """In place of a step that computes nothing."""
        put_out_tokens(self._ring.tokens, self.turn, self._token_ids, self._none)

    def sample_late(self, late: LateSamples, use: SamplerUse, told: StepTold | None, turn: int) -> Sequence[Tensor]:
        """Launch the late samples of a step, before anything else of it. By hand; keep what is returned till then."""
        device, rows, count = self._cache.device, self._rows, len(late.rows)
        words, kept = HostWords(late, device), rows.adjustments.kept
        assert kept is not None, "nobody has kept logits for these rows"
        where = places_on(device, late.rows.tolist(), words.kept)
        positions = rows.next_positions.index_select(0, where)
        self._sampler.sample(
            kept.index_select(0, where),
            LogitRows(where, positions, places_on(device, [count], words.kept), self.vocabulary),
            max(use, SamplerUse.ADJUSTED),
            Told(self.turn, rows.scores.late_ring, told),
            token_ids=self._late_ids,
            words=words,
        )
        self._ring.late_tokens[turn, :count].copy_(self._late_ids[:count], non_blocking=True)
        return words.kept

    def _sample(self, logits: Tensor, kind: StepKind, by_hand: ByHand | None) -> Tensor:
        """Returns how many tokens there are."""
        arrays, rows, size = self._arrays, self._rows, self.vocabulary
        sampled = LogitRows(arrays.sampled_rows, arrays.sampled_positions, arrays.num_sampled, size)
        special = rows.adjustments
        if kind.use >= SamplerUse.ADJUSTED and special.rows is not None and special.kept is not None:
            keep_logits(special.kept, logits, sampled, special.rows.integers("duties"))
        forked = None if by_hand is None or by_hand.forks is None else self._fork(logits, by_hand.forks)
        told = Told(self.turn, rows.scores.ring, None if by_hand is None else by_hand.told)
        self._sampler.sample(logits, sampled, kind.use, told, token_ids=self._token_ids)
        if by_hand is None or by_hand.forks is None or forked is None:
            return sampled.num_rows
        forks, ring = by_hand.forks, rows.scores.ring
        first = forks.first
        if ring is not None:
            ring = ScoreRing(
                ring.top_ids[:, first:],
                ring.top_scores[:, first:],
                ring.named_scores[:, first:],
                ring.named_ranks[:, first:],
            )
        # through a buffer that begins where all do: a kernel is compiled anew for a pointer of another alignment
        self._sampler.sample(forked, forks.sampled, kind.use, Told(self.turn, ring), token_ids=self._late_ids)
        self._token_ids[first : first + len(forked)].copy_(self._late_ids[: len(forked)])
        return forks.total

    def _fork(self, logits: Tensor, forks: ForkRows) -> Tensor | None:
        """Further choices stand where their chunk ends. Returns the logits of those that sample now."""
        rows, kept = self._rows, self._rows.adjustments.kept
        rows.next_positions.index_copy_(0, forks.rows.long(), forks.positions)
        if forks.keeping is not None and kept is not None:
            kept.index_copy_(0, forks.keeping.long(), logits.index_select(0, forks.keeping_places))
        return None if forks.places is None else logits.index_select(0, forks.places)

    def _batch(self, kind: StepKind) -> ForwardBatch:
        arrays, some = self._arrays, slice(kind.tokens)
        positions, rows = arrays.positions[some], arrays.rows[some]
        lengths: Tensor | None = None
        if self._model.rotary.length_dependent:
            lengths = torch.maximum(self._rows.prompt_tokens.index_select(0, rows), positions + 1)
        groups = zip(self.layout.groups, self._rows.tables, strict=True)
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
