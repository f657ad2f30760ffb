"""Attention over the paged cache, through the batches that real steps use, against a plain float64 loop."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from asyncllm.engine.execution import step_batch
from asyncllm.engine.execution.kv_cache import CacheLayout, make_cache_layout
from asyncllm.engine.execution.row_state import RowState
from asyncllm.engine.execution.step_batch import BatchBuilder, CausalMasks, lay_out_tokens
from asyncllm.engine.plan import Chunk, RowJoin, RowSampling, StepPlan, TableEdits
from asyncllm.layers.attention import Attention, Gathered, HeadShape, InPlace
from asyncllm.layers.parameter import Placement
from asyncllm.layers.rope import DefaultRope, make_rotary_embedding

BLOCK, DIM, KV_HEADS, HEADS, LENGTH = 8, 4, 2, 6, 200
WINDOWS = [None, 19, 8, 1]
NONE = np.zeros(0, np.int32)
SAMPLING = RowSampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)


def make_plan(decode: list[int], chunks: list[Chunk]) -> StepPlan:
    edits = TableEdits(NONE, NONE, NONE, NONE)
    return StepPlan(0, (), edits, NONE.reshape(0, 2), tuple(chunks), np.array(decode, np.int32), True)


def make_state(rows: int, *, scattered: bool = True) -> tuple[CacheLayout, Tensor, RowState]:
    """Rows with blocks which hold nothing that may be read, and which lie anywhere or beside each other."""
    layout = make_cache_layout(WINDOWS, KV_HEADS, DIM, BLOCK)
    row_blocks = LENGTH // BLOCK
    cache = layout.allocate(len(WINDOWS) * rows * row_blocks, torch.float32)
    cache[:, 1:] = torch.nan
    state = RowState(rows, len(WINDOWS), row_blocks, vocabulary=8)
    for row in range(rows):
        state.join(RowJoin(row, row, SAMPLING))
    blocks = np.random.default_rng(0).permutation(state.tables.size) if scattered else np.arange(state.tables.size)
    state.tables[:] = blocks.reshape(state.tables.shape) + 1
    return layout, cache, state


def expected_attention(query: Tensor, keys: Tensor, values: Tensor, window: int | None) -> Tensor:
    """Of the last position: query [HEADS, DIM], keys and values [positions, KV_HEADS, DIM]."""
    first = 0 if window is None else max(0, len(keys) - window)
    keys, values = (each[first:].double().repeat_interleave(HEADS // KV_HEADS, 1) for each in (keys, values))
    scores = torch.einsum("hd,khd->hk", query.double(), keys) / DIM**0.5
    return torch.einsum("hk,khd->hd", scores.softmax(-1), values)


row_strategy = st.tuples(st.integers(0, 150), st.integers(1, 40), st.sampled_from(["decode", "chunk", "single"]))


@settings(max_examples=40, deadline=None)
@given(st.lists(row_strategy, min_size=1, max_size=7), st.integers(1, 16), st.integers(1, 64), st.booleans())
def test_mixed_steps(rows: list[tuple[int, int, str]], tile: int, bucket_blocks: int, scattered: bool) -> None:
    """Rows that have computed some positions get a decode step, a chunk or a chunk of one, together."""
    generator = torch.Generator().manual_seed(len(rows))
    layout, cache, state = make_state(len(rows), scattered=scattered)
    rotary = make_rotary_embedding(DefaultRope(rope_theta=100.0), DIM, LENGTH, Placement(torch.float32, cache.device))
    layers = [Attention(HeadShape(HEADS, KV_HEADS, DIM), place) for place in layout.layers]
    builder = BatchBuilder(layout, cache, needs_lengths=False)
    builder._bucket_blocks = bucket_blocks
    known = [torch.randn(start + 41, (HEADS + 2 * KV_HEADS) * DIM, generator=generator) for start, _, _ in rows]

    def attend(plan: StepPlan) -> tuple[list[tuple[int, int]], list[Tensor]]:
        tokens = lay_out_tokens(plan, state)
        where = list(zip(tokens.rows.tolist(), tokens.positions.tolist(), strict=True))
        qkv = torch.stack([known[row][position] for row, position in where])
        batch = builder.build(tokens, state)
        rotation = rotary(batch.positions, None)
        outputs = [layer(qkv.clone(), rotation, batch.cache, batch.attention[layer.cache.group]) for layer in layers]
        state.position[tokens.rows] = tokens.positions + 1
        return where, outputs

    old_tile = step_batch._TILE
    step_batch._TILE = tile
    try:
        builder._masks = [CausalMasks(group.window, torch.float32) for group in layout.groups]
        for row, (start, _, _) in enumerate(rows):
            if start:
                attend(make_plan([], [Chunk(row, 0, np.zeros(start, np.int32), False)]))
        chunks = [
            Chunk(row, start, np.zeros(1 if kind == "single" else count, np.int32), True)
            for row, (start, count, kind) in enumerate(rows)
            if kind != "decode"
        ]
        where, outputs = attend(make_plan([row for row, each in enumerate(rows) if each[2] == "decode"], chunks))
    finally:
        step_batch._TILE = old_tile

    for index, (row, position) in enumerate(where):
        history = known[row][: position + 1].view(position + 1, -1, DIM)
        rotated = rotary(torch.arange(position + 1), None).apply_(history[:, : HEADS + KV_HEADS].clone())
        for layer, output in zip(layers, outputs, strict=True):
            window = layout.groups[layer.cache.group].window
            expected = expected_attention(
                rotated[-1, :HEADS], rotated[:, HEADS:], history[:, HEADS + KV_HEADS :], window
            )
            assert torch.allclose(output[index].view(HEADS, DIM).double(), expected, atol=1e-5)


def test_tokens_are_found_where_they_are_laid_out() -> None:
    _, _, state = make_state(6)
    state.position[:] = [30, 7, 50, 0, 0, 12]
    state.last_token[:] = [100, 101, 102, 0, 0, 105]
    chunks = [
        Chunk(3, 0, np.array([1, 2, 3], np.int32), False),
        Chunk(4, 20, np.array([4], np.int32), True),
        Chunk(1, 7, np.array([5, 6], np.int32), True),
    ]
    tokens = lay_out_tokens(make_plan([0, 2, 5], chunks), state)
    assert tokens.positions.tolist() == [12, 20, 30, 50, 0, 1, 2, 7, 8]
    assert tokens.rows.tolist() == [5, 4, 0, 2, 3, 3, 3, 1, 1]
    assert tokens.ids.tolist() == [105, 4, 100, 102, 1, 2, 3, 5, 6]
    # decode rows in the plan's order, then the chunks that sample
    assert tokens.rows[tokens.sampled].tolist() == [0, 2, 5, 4, 1]
    assert tokens.positions[tokens.sampled].tolist() == [30, 50, 12, 20, 8]


@pytest.mark.parametrize("positions", [[5, 6, 7], [3, 60, 61, 150]])
def test_buckets_pad_little_and_read_little(positions: list[int]) -> None:
    layout, cache, state = make_state(len(positions))
    state.position[:] = positions
    builder = BatchBuilder(layout, cache, needs_lengths=False)
    tokens = lay_out_tokens(make_plan(list(range(len(positions))), []), state)
    buckets = builder.build(tokens, state).attention[0].buckets
    assert [bucket.start for bucket in buckets] + [len(positions)] == [0] + [bucket.stop for bucket in buckets]
    read = 0
    for bucket in buckets:
        source = bucket.source  # a history of one block lies in one place
        read += len(source.blocks) if isinstance(source, Gathered) else 1
    needed = sum(position // BLOCK + 1 for position in positions)
    assert read <= needed * 5 / 4 + len(positions)


def test_what_lies_together_is_not_gathered() -> None:
    layout, cache, state = make_state(2, scattered=False)
    state.position[:] = [50, 0]
    builder = BatchBuilder(layout, cache, needs_lengths=False)
    plan = make_plan([0], [Chunk(1, 20, np.arange(9, dtype=np.int32), True)])
    groups = builder.build(lay_out_tokens(plan, state), state).attention
    for group, window, table in zip(groups, WINDOWS, state.tables, strict=True):
        first = 0 if window is None else max(0, 51 - window)
        assert group.buckets[0].source == InPlace(int(table[0, 0]) * BLOCK + first, 51 - first)
        assert isinstance(group.spans[0].source, InPlace)
    state.tables[0, 0, 3] = state.tables[0, 1, 9]  # one block elsewhere
    bucket = builder.build(lay_out_tokens(plan, state), state).attention[0].buckets[0]
    assert isinstance(bucket.source, Gathered)


def test_short_chunks_of_about_one_length_that_begin_their_rows_are_attended_together() -> None:
    layout, cache, state = make_state(7)
    builder = BatchBuilder(layout, cache, needs_lengths=False)
    sizes = [9, 150, 8, 30, 9, 40, 5]  # the last has a history
    chunks = [
        Chunk(row, 20 if row == 6 else 0, np.arange(size, dtype=np.int32), True) for row, size in enumerate(sizes)
    ]
    tokens = lay_out_tokens(make_plan([], chunks), state)
    assert tokens.rows.tolist() == [row for row in (2, 0, 4, 3, 5, 1, 6) for _ in range(sizes[row])]
    assert tokens.positions[tokens.sampled].tolist() == [8, 149, 7, 29, 8, 39, 24]
    for group, window in zip(builder.build(tokens, state).attention, WINDOWS, strict=True):
        fresh = [(each.stop - each.start, each.count, each.padding is None) for each in group.fresh]
        expected = [(26, 3, False), (30, 1, True), (40, 1, True), (150, 1, True)]
        if window is not None:
            expected = {19: expected[:1], 8: [(8, 1, True)], 1: []}[window]
        assert fresh == expected
        assert sum(each.count for each in group.fresh) + len(group.spans) == len(sizes)


def test_masks_grow_and_stay_what_they_were() -> None:
    for window in (None, 5):
        masks = CausalMasks(window, torch.float32)
        for start in (0, 3, 200, 7):
            tile = masks.tile(4, 7, start, 0)
            assert tile.mask is not None
            keys = np.arange(tile.first, tile.last)
            queries = np.arange(start + 4, start + 7)[:, None]
            visible = (keys <= queries) & (True if window is None else keys > queries - window)
            assert ((tile.mask == 0).numpy() == visible).all()
            assert visible.sum() == sum(
                int(q) + 1 if window is None else min(int(q) + 1, window) for q in queries[:, 0]
            )
