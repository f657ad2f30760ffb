"""Makes a `ForwardBatch` of a plan and the rows' state, for attention in main memory (`layers/attention.py`)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncllm.engine.execution.kv_cache import CacheLayout
from asyncllm.engine.execution.row_state import Int64Array, RowState
from asyncllm.engine.plan import NULL_BLOCK, Chunk, Int32Array, StepPlan
from asyncllm.kernels.cpu.decoder import Draws
from asyncllm.layers.attention import (
    AttentionBatch,
    Bucket,
    CacheLayer,
    FreshChunks,
    Gathered,
    InPlace,
    Padding,
    Source,
    Span,
    Tile,
)
from asyncllm.models.forward_batch import ForwardBatch

_TILE = 256
"""Queries of a chunk that are attended at once, where they need a mask: all that it hides in their keys is computed."""
_SHORT = 128
"""Tokens of a chunk that is attended together with others; longer ones gain nothing by it."""
_BUCKET_BYTES = 1 << 20
"""Keys and values that a bucket reads per thread: they are gathered first, and should not leave the cache again."""


@dataclass(frozen=True, slots=True)
class StepTokens:
    """The tokens of a step in the batch's order: those alone in their row by position, then the chunks that begin
    their rows by length, then the other chunks."""

    ids: Int64Array  # [n]
    positions: Int64Array  # [n]
    rows: Int64Array  # [n]
    singles: int  # how many are alone in their row
    spans: tuple[Chunk, ...]  # the chunks, in this order
    sampled: Int64Array  # [s] where the tokens are whose logits are needed, in the order of `StepOutputs`
    chunk_firsts: Int64Array  # [c] where the first token of each of the plan's chunks is

    def lengths(self, rows: RowState) -> Tensor:
        """[n] int64: how long the sequence of each is known to be, with its prompt."""
        return torch.from_numpy(np.maximum(rows.prompt_tokens[self.rows], self.positions + 1))


def lay_out_tokens(plan: StepPlan, rows: RowState) -> StepTokens:
    """The tokens that the plan computes."""
    if not plan.chunks and plan.late is None:
        return _lay_out_decoding(plan.decode_rows, rows)
    lone = [chunk for chunk in plan.chunks if len(chunk.token_ids) == 1]
    spans = [chunk for chunk in plan.chunks if len(chunk.token_ids) > 1]
    spans.sort(key=lambda chunk: len(chunk.token_ids) if chunk.start == 0 else sys.maxsize)
    decode = plan.decode_rows
    if plan.late is not None:
        decode = np.concatenate((decode, plan.late.rows[: plan.late.decoding]))
    single_rows = np.concatenate((decode, np.array([chunk.row for chunk in lone], np.int64)))
    single_positions = np.concatenate((rows.position[decode], np.array([chunk.start for chunk in lone], np.int64)))
    single_ids = np.concatenate((rows.last_token[decode], *(chunk.token_ids for chunk in lone)))
    order = np.argsort(single_positions, kind="stable")
    places = np.empty_like(order)
    places[order] = np.arange(len(order))

    lengths = [len(chunk.token_ids) for chunk in spans]
    ends = np.cumsum([len(order), *lengths])[1:]
    lasts = {id(chunk): end - 1 for chunk, end in zip(spans, ends, strict=True)}
    lasts.update({id(chunk): place for chunk, place in zip(lone, places[len(decode) :], strict=True)})
    sampled, firsts = list(places[: len(decode)]), []
    for chunk in plan.chunks:
        place = lasts[id(chunk)]
        firsts.append(place + 1 - len(chunk.token_ids))
        if chunk.samples or chunk.keeps:
            sampled.append(place)
    return StepTokens(
        ids=np.concatenate((single_ids[order], *(chunk.token_ids for chunk in spans))).astype(np.int64),
        positions=np.concatenate(
            (single_positions[order], *(np.arange(each.start, each.start + len(each.token_ids)) for each in spans))
        ),
        rows=np.concatenate((single_rows[order], np.repeat([chunk.row for chunk in spans], lengths).astype(np.int64))),
        singles=len(order),
        spans=tuple(spans),
        sampled=np.array(sampled, np.int64),
        chunk_firsts=np.array(firsts, np.int64),
    )


def _lay_out_decoding(decode: Int32Array, rows: RowState) -> StepTokens:
    """The same for most steps, which have no chunk, in less time."""
    positions = rows.position[decode]
    order = positions.argsort(kind="stable")
    sampled = np.empty_like(order)
    sampled[order] = np.arange(len(order))
    ordered = decode[order].astype(np.int64)
    ids = rows.last_token[ordered].astype(np.int64)
    return StepTokens(ids, positions[order], ordered, len(order), (), sampled, np.zeros(0, np.int64))


class BatchBuilder:
    """Turns tokens into a batch, given where their rows keep keys and values."""

    def __init__(self, layout: CacheLayout, cache: Tensor, *, needs_lengths: bool) -> None:
        self._layout = layout
        self._cache = cache
        self._needs_lengths = needs_lengths
        self._masks = [CausalMasks(group.window, cache.dtype) for group in layout.groups]
        self._scratch = torch.empty(0, cache[0, 0].numel(), dtype=cache.dtype)
        self._bucket_blocks = _BUCKET_BYTES * torch.get_num_threads() // layout.layer_block_bytes(cache.dtype)
        self._layers = tuple(CacheLayer.of(layer) for layer in cache)

    def build(self, tokens: StepTokens, rows: RowState, draws: Draws | None = None) -> ForwardBatch:
        """See `Builder`."""
        assert draws is None, "torch's operators draw nothing"
        self._clear_begun_blocks(tokens, rows.tables)
        lengths: Tensor | None = None
        if self._needs_lengths:
            lengths = tokens.lengths(rows)
        return ForwardBatch(
            token_ids=torch.from_numpy(tokens.ids),
            positions=torch.from_numpy(tokens.positions),
            lengths=lengths,
            sampled=torch.from_numpy(tokens.sampled),
            attention=tuple(
                self._group_batch(tokens, rows.tables[index], self._masks[index])
                for index in range(len(self._layout.groups))
            ),
            cache=self._layers,
        )

    def _clear_begun_blocks(self, tokens: StepTokens, tables: Int64Array) -> None:
        """Zero each block that the step begins and does not fill.

        A bucket reads past a row's end and masks what is there; but nothing masks the not-a-number that a request
        whose numbers overflowed may have left in the block.
        """
        block_size = self._layout.block_size
        counts = np.array([1] * tokens.singles + [len(chunk.token_ids) for chunk in tokens.spans])
        ends = counts.cumsum() - 1
        last = tokens.positions[ends]
        begun = (last % block_size < counts) & (last % block_size < block_size - 1)
        if begun.any():
            blocks = tables[:, tokens.rows[ends[begun]], last[begun] // block_size]
            self._cache.index_fill_(1, torch.from_numpy(blocks.reshape(-1)), 0.0)

    def _group_batch(self, tokens: StepTokens, table: Int64Array, masks: CausalMasks) -> AttentionBatch:
        block_size = self._layout.block_size
        blocks = table[tokens.rows, tokens.positions // block_size]
        lines = blocks * block_size + tokens.positions % block_size
        buckets = tuple(self._buckets(tokens, table, masks.window))
        fresh = tuple(_fresh_chunks(tokens, masks.window))
        spans = tuple(self._spans(tokens, table, masks, fresh[-1].stop if fresh else tokens.singles))
        sources = [*(bucket.source for bucket in buckets), *(span.source for span in spans)]
        most = max((len(source.blocks) for source in sources if isinstance(source, Gathered)), default=0)
        if most > len(self._scratch):
            self._scratch = torch.empty(most, self._scratch.shape[1], dtype=self._scratch.dtype)
        return AttentionBatch(_written(lines), buckets, fresh, spans, self._scratch)

    def _source(self, blocks: Int64Array, first: int, last: int) -> Source:
        """Positions `first` to `last` of the blocks [rows, b] of some rows."""
        rows, count = blocks.shape
        if rows == 1 and (blocks[0] == blocks[0, 0] + np.arange(count)).all():
            return InPlace(int(blocks[0, 0]) * self._layout.block_size + first, last - first)
        return Gathered(torch.from_numpy(blocks.reshape(-1)), rows, first, last)

    def _buckets(self, tokens: StepTokens, table: Int64Array, window: int | None) -> Iterator[Bucket]:
        """Neighbours share a bucket while none reads a quarter more blocks than it has, and one, and all few enough."""
        block_size = self._layout.block_size
        positions, rows = tokens.positions[: tokens.singles], tokens.rows[: tokens.singles]
        first_keys = np.zeros_like(positions) if window is None else np.maximum(positions - window + 1, 0)
        first_blocks, last_blocks = first_keys // block_size, positions // block_size
        counts = np.maximum.accumulate(last_blocks - first_blocks + 1)
        start = 0
        while start < tokens.singles:
            alike = int(np.searchsorted(counts, counts[start] * 5 // 4 + 1, side="right"))
            stop = min(alike, start + max(1, self._bucket_blocks // int(counts[alike - 1])))
            some, most = slice(start, stop), int(counts[stop - 1])
            indices = first_blocks[some, None] + np.arange(most)
            inside = indices <= last_blocks[some, None]
            blocks = np.where(inside, table[rows[some, None], np.where(inside, indices, 0)], NULL_BLOCK)
            offset, first_key, position = first_blocks[start] * block_size, first_keys[start], positions[start]
            mask: Tensor | None = None
            if position == positions[stop - 1]:  # sorted, so all are equal
                first, last = int(first_key - offset), int(position + 1 - offset)
            else:
                first, last = 0, most * block_size
                keys = (first_blocks[some] * block_size)[:, None] + np.arange(last)
                hidden = (keys > positions[some, None]) | (keys < first_keys[some, None])
                mask = self._mask(hidden)[:, None, None]
            yield Bucket(start, stop, self._source(blocks, first, last), mask)
            start = stop

    def _mask(self, hidden: NDArray[np.bool_]) -> Tensor:
        mask = torch.zeros(hidden.shape, dtype=self._cache.dtype)
        return mask.masked_fill_(torch.from_numpy(hidden), -torch.inf)

    def _spans(self, tokens: StepTokens, table: Int64Array, masks: CausalMasks, begin: int) -> Iterator[Span]:
        """The chunks from the token `begin` on."""
        block_size, window = self._layout.block_size, masks.window
        at = tokens.singles
        for chunk in tokens.spans:
            count, start = len(chunk.token_ids), chunk.start
            if at >= begin:
                first_block = 0 if window is None else max(0, start - window + 1) // block_size
                last_block = (start + count - 1) // block_size
                blocks = table[chunk.row, None, first_block : last_block + 1]
                source, offset = self._source(blocks, 0, blocks.size * block_size), first_block * block_size
                tiles = [masks.tile(q, min(q + _TILE, count), start, offset) for q in range(0, count, _TILE)]
                yield Span(at, at + count, source, tuple(tiles))
            at += count


def attention_bytes(layout: CacheLayout, dtype: torch.dtype, longest: int) -> int:
    """About the most that a `BatchBuilder` keeps between steps for requests of `longest` tokens: masks, and room for
    what a bucket or a span gathers."""
    keys = [longest if group.window is None else min(group.window, longest) for group in layout.groups]
    masks = sum(_TILE * (count + _TILE) * dtype.itemsize for count in keys)
    gathered = -(-longest // layout.block_size) * layout.layer_block_bytes(dtype)
    return masks + max(gathered, _BUCKET_BYTES * torch.get_num_threads())


def _written(lines: Int64Array) -> Tensor | slice:
    """The lines of the cache that a step writes; those in a row are copied as one piece, in a seventh of the time."""
    if len(lines) > 1 and (np.diff(lines) == 1).all():
        return slice(int(lines[0]), int(lines[-1]) + 1)
    return torch.from_numpy(lines)


def _fresh_chunks(tokens: StepTokens, window: int | None) -> Iterator[FreshChunks]:
    """Those that attention can do without the cache: a padded chunk is at most a quarter longer, and one token."""
    longest = sys.maxsize if window is None else window
    lengths = [len(chunk.token_ids) for chunk in tokens.spans if chunk.start == 0 and len(chunk.token_ids) <= longest]
    index, start = 0, tokens.singles
    while index < len(lengths):
        shortest = lengths[index]
        most = min(_SHORT, shortest * 5 // 4 + 1)
        alike = [length for length in lengths[index:] if length <= most] or [shortest]
        counts = np.array(alike)
        padding: Padding | None = None
        if alike[-1] != shortest:  # they are sorted
            inside = np.arange(alike[-1]) < counts[:, None]
            places = np.flatnonzero(inside)
            padded = np.full(inside.size, start)
            padded[places] = np.arange(start, start + len(places))
            padding = Padding(torch.from_numpy(padded), torch.from_numpy(places))
        yield FreshChunks(start, start + sum(alike), len(alike), padding)
        index, start = index + len(alike), start + sum(alike)


class CausalMasks:
    """The mask of any tile is a part of one mask, since only the distance between query and key matters."""

    def __init__(self, window: int | None, dtype: torch.dtype) -> None:
        self.window = window
        self._dtype = dtype
        self._history = 0  # keys before the tile's first query that the mask covers
        self._mask = self._make(0 if window is None else window - 1)

    def tile(self, start: int, stop: int, chunk_start: int, offset: int) -> Tile:
        """Queries `start` to `stop` of a chunk that begins at position `chunk_start`; key 0 is at position `offset`."""
        position = chunk_start + start
        history = position if self.window is None else min(position, self.window - 1)
        if history > self._history:
            self._mask = self._make(max(history, 2 * self._history))
        count = stop - start
        mask = self._mask[:count, self._history - history : self._history + count]
        return Tile(start, stop, position - history - offset, position + count - offset, mask)

    def _make(self, history: int) -> Tensor:
        """[tile, history + tile]: −inf at keys after the query, or before its window."""
        self._history = history
        distance = torch.arange(_TILE)[:, None] - torch.arange(-history, _TILE)  # from key to query
        hidden = distance < 0 if self.window is None else (distance < 0) | (distance >= self.window)
        return torch.zeros(distance.shape, dtype=self._dtype).masked_fill_(hidden, -torch.inf)
