"""Attention over the paged cache, for any mix of prompt chunks and decoding rows, on a grid that never changes.

The queries of one sequence that share a KV head are packed: packed row r is token r // G, head r % G of that KV head's
G query heads. A *tile* is a run of packed rows, a *unit* a tile and a part of its keys. `plan_attention` cuts a step's
sequences into units on the device, once for all layers with the same window; `paged_attention` has a program per
possible unit and KV head, and the surplus ones leave at once. So a CUDA graph captured for a number of tokens replays
any mix.

A sequence of few packed rows (a decoding one) is one small tile, read at the speed of memory; any other is cut into
large tiles for the matrix units: two lists, two launches of the same kernel. Where whole tiles are too few to fill
the GPU, or their lengths too uneven, their keys are split; the last program of a tile to finish merges the parts. The
softmax runs over blocks of keys as in FlashAttention (Dao et al., 2022), in base 2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from asyncllm.kernels.language import TensorDescriptor, ceil_div, jit, next_power_of_2, tl

_LOG2_E = math.log2(math.e)
_FIELDS = 16  # int32 words a unit, ten of them used: 64 bytes, half a cache line
_SMALL, _LARGE = 0, 1  # the two lists, as indices of `AttentionPlan.totals`


@dataclass(frozen=True, slots=True)
class Tiling:
    """The cut of one list: rows and keys of a tile, and how its program runs."""

    rows: int
    keys: int
    warps: int
    stages: int
    share: int  # multiprocessors, a KV head
    least_blocks: int  # a part of a split tile has at least this many blocks of `keys` keys

    @property
    def most_parts(self) -> int:
        """By how much the units, a KV head, can exceed the tiles; parts of split tiles are under twice as many."""
        return 3 * self.share

    descriptors: bool  # read whole blocks of keys through tensor descriptors; then block_size % keys == 0


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What all attention layers of one cache group have in common."""

    q_heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    window: int | None  # as in `CacheGroup`


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Device memory for the units of a step, made once by `make_attention_plan`, filled by `plan_attention`.

    Plans of the same head count and size may share `partial`, `statistics` and `arrivals`, if all run on one stream.
    """

    shape: AttentionShape
    max_tokens: int
    max_sequences: int
    small: Tiling
    large: Tiling
    small_units: torch.Tensor  # [units, _FIELDS] int32
    large_units: torch.Tensor  # [units, _FIELDS] int32
    totals: torch.Tensor  # [2] int32: how many of either are in use
    partial: torch.Tensor  # float32, outputs of the parts of split tiles
    statistics: torch.Tensor  # float32, their maxima and sums
    arrivals: torch.Tensor  # int32, parts done of each split tile; zero between launches


@dataclass(frozen=True, slots=True)
class Sequences:
    """The sequences of a step, on the device. Sequence i computes its last positions."""

    query_starts: torch.Tensor  # [max_sequences + 1] int32: its tokens are query_starts[i] to query_starts[i + 1]
    context_lens: torch.Tensor  # [max_sequences] int32: its positions, those computed in this step included
    rows: torch.Tensor  # [max_sequences] int32: its row of the block table
    num_sequences: torch.Tensor  # [1] int32


def default_tilings(
    shape: AttentionShape, dtype: torch.dtype, *, multiprocessors: int, descriptors: bool
) -> tuple[Tiling, Tiling]:
    """The small and the large tiling that suit an H200, for a device with so many multiprocessors.

    `descriptors` says whether the device has a tensor memory accelerator (compute capability 9.0 and later).
    """
    group = shape.q_heads // shape.kv_heads
    dim = next_power_of_2(shape.head_dim)
    wide = dim * dtype.itemsize > 256  # bytes of a key
    share = max(1, multiprocessors // shape.kv_heads)
    small = Tiling(
        rows=max(16, next_power_of_2(group)),
        keys=32 if wide else 64,
        warps=4,
        stages=3,
        share=share,
        least_blocks=1,
        descriptors=descriptors and shape.block_size % (32 if wide else 64) == 0,
    )
    exact = dtype == torch.float32
    keys = 32 if exact else 64
    large = Tiling(
        rows=32 if exact else 64,
        keys=keys,
        warps=4,
        stages=1 if exact else 2 if wide else 3,
        share=share,
        least_blocks=8,
        descriptors=descriptors and shape.block_size % keys == 0,
    )
    return small, large


def make_attention_plan(
    shape: AttentionShape,
    dtype: torch.dtype,
    device: torch.device,
    *,
    max_tokens: int,
    max_sequences: int,
    tilings: tuple[Tiling, Tiling] | None = None,
) -> AttentionPlan:
    """Allocate a plan for steps of up to `max_tokens` tokens of `max_sequences` sequences."""
    if tilings is None:
        multiprocessors, descriptors = 1, True
        if device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            multiprocessors, descriptors = properties.multi_processor_count, properties.major >= 9
        tilings = default_tilings(shape, dtype, multiprocessors=multiprocessors, descriptors=descriptors)
    small, large = tilings
    slots = 2 * max(each.most_parts * each.rows for each in tilings) * shape.kv_heads
    parts = 2 * max(each.most_parts for each in tilings) * shape.kv_heads
    unit_counts = [_units(shape, small, large, kind, max_tokens, max_sequences) for kind in (_SMALL, _LARGE)]
    return AttentionPlan(
        shape=shape,
        max_tokens=max_tokens,
        max_sequences=max_sequences,
        small=small,
        large=large,
        small_units=torch.zeros((unit_counts[_SMALL], _FIELDS), dtype=torch.int32, device=device),
        large_units=torch.zeros((unit_counts[_LARGE], _FIELDS), dtype=torch.int32, device=device),
        totals=torch.zeros(2, dtype=torch.int32, device=device),
        partial=torch.empty(slots * next_power_of_2(shape.head_dim), dtype=torch.float32, device=device),
        statistics=torch.empty(2 * slots, dtype=torch.float32, device=device),
        arrivals=torch.zeros(parts, dtype=torch.int32, device=device),
    )


def _units(shape: AttentionShape, small: Tiling, large: Tiling, kind: int, tokens: int, sequences: int) -> int:
    """The most units that a step of `tokens` tokens can have in one list."""
    group = shape.q_heads // shape.kv_heads
    if kind == _SMALL:
        return min(tokens, sequences) + small.most_parts
    least_tokens = small.rows // group + 1  # of a sequence that is cut into large tiles
    return tokens * group // large.rows + min(tokens // least_tokens, sequences) + large.most_parts


@jit
def _plan_kernel(
    small_units: tl.tensor,
    large_units: tl.tensor,
    totals: tl.tensor,
    query_starts: tl.tensor,
    context_lens: tl.tensor,
    rows: tl.tensor,
    num_sequences: tl.tensor,
    GROUP: tl.constexpr,
    WINDOW: tl.constexpr,
    SMALL_ROWS: tl.constexpr,
    SMALL_KEYS: tl.constexpr,
    SMALL_SHARE: tl.constexpr,
    SMALL_LEAST: tl.constexpr,
    LARGE_ROWS: tl.constexpr,
    LARGE_KEYS: tl.constexpr,
    LARGE_SHARE: tl.constexpr,
    LARGE_LEAST: tl.constexpr,
    SEQUENCES: tl.constexpr,
    FIELDS: tl.constexpr,
) -> None:
    # Each program writes the units of one sequence; to know where, it looks at all of them.
    me = tl.program_id(0)
    others = tl.arange(0, SEQUENCES)
    inside = others < tl.load(num_sequences)
    starts = tl.load(query_starts + others, mask=inside, other=0)
    packed = (tl.load(query_starts + others + 1, mask=inside, other=0) - starts) * GROUP
    contexts = tl.load(context_lens + others, mask=inside, other=0)
    is_small = packed <= SMALL_ROWS
    _plan_list(
        small_units, totals, rows, me, others, starts, tl.where(is_small, packed, 0), contexts,
        GROUP, WINDOW, SMALL_ROWS, SMALL_KEYS, SMALL_SHARE, SMALL_LEAST, FIELDS,
    )  # fmt: skip
    _plan_list(
        large_units, totals + 1, rows, me, others, starts, tl.where(is_small, 0, packed), contexts,
        GROUP, WINDOW, LARGE_ROWS, LARGE_KEYS, LARGE_SHARE, LARGE_LEAST, FIELDS,
    )  # fmt: skip


@jit
def _plan_list(
    units: tl.tensor,
    total: tl.tensor,
    rows: tl.tensor,
    me: tl.tensor,
    others: tl.tensor,
    starts: tl.tensor,
    packed: tl.tensor,
    contexts: tl.tensor,
    GROUP: tl.constexpr,
    WINDOW: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SHARE: tl.constexpr,
    LEAST: tl.constexpr,
    FIELDS: tl.constexpr,
) -> None:
    tiles = tl.cdiv(packed, ROWS)
    blocks = tl.cdiv(contexts, KEYS)  # at most, of any tile of the sequence
    if WINDOW:
        reach: tl.constexpr = (WINDOW + ROWS // GROUP + KEYS) // KEYS + 1
        blocks = tl.minimum(blocks, reach)
    # A part has about `most` blocks. Few tiles are cut into as many parts as the GPU has multiprocessors. Many are cut
    # finer, where their lengths differ: a long part would still run when the others are done.
    share = SHARE + 2 * tl.minimum(tl.maximum(tl.sum(tiles, axis=0) - SHARE, 0), SHARE)
    most = tl.maximum(tl.cdiv(tl.sum(tiles * blocks, axis=0), share), LEAST)
    # With W = sum of tiles · blocks, most >= W / share: so the parts are at most `share` more than the tiles, and those
    # of split tiles (blocks / most >= 1.5, rounded) fewer than 2 · share.
    splits = tl.maximum((2 * blocks + most) // (2 * most), 1)
    splits = tl.where(packed > 0, splits, 0)
    counts = tiles * splits
    if me == 0:
        tl.store(total, tl.sum(counts, axis=0))

    my_count = tl.sum(tl.where(others == me, counts, 0), axis=0)
    if my_count > 0:
        my_first = tl.sum(tl.where(others < me, counts, 0), axis=0)
        my_slot = tl.sum(tl.where((others < me) & (splits > 1), counts, 0), axis=0)
        my_splits = tl.sum(tl.where(others == me, splits, 0), axis=0)
        my_tiles = tl.sum(tl.where(others == me, tiles, 0), axis=0)
        my_packed = tl.sum(tl.where(others == me, packed, 0), axis=0)
        my_start = tl.sum(tl.where(others == me, starts, 0), axis=0)
        my_context = tl.sum(tl.where(others == me, contexts, 0), axis=0)
        my_row = tl.load(rows + me)
        before = my_context - my_packed // GROUP  # the position of the first query
        for step in range(0, my_count, 64):
            index = step + tl.arange(0, 64)
            tile = my_tiles - 1 - index // my_splits  # the longest first
            part = index % my_splits
            first_row = tile * ROWS
            last_row = tl.minimum(first_row + ROWS, my_packed) - 1
            block_end = tl.cdiv(before + last_row // GROUP + 1, KEYS)
            block_start = tl.zeros_like(block_end)
            if WINDOW:
                block_start = tl.maximum(before + first_row // GROUP - WINDOW + 1, 0) // KEYS
            size = tl.cdiv(block_end - block_start, my_splits)
            part_start = tl.minimum(block_start + part * size, block_end)
            unit = units + (my_first + index) * FIELDS
            known = index < my_count
            tl.store(unit, my_row, mask=known)
            tl.store(unit + 1, my_start, mask=known)
            tl.store(unit + 2, my_packed, mask=known)
            tl.store(unit + 3, before, mask=known)
            tl.store(unit + 4, first_row, mask=known)
            tl.store(unit + 5, part_start, mask=known)
            tl.store(unit + 6, tl.minimum(part_start + size, block_end), mask=known)
            tl.store(unit + 7, my_splits, mask=known)
            tl.store(unit + 8, my_slot + index - part, mask=known)
            tl.store(unit + 9, part, mask=known)


def plan_attention(plan: AttentionPlan, sequences: Sequences, *, tokens: int) -> None:
    """Cut a step's sequences into units, on the device; `tokens` bounds the step's tokens (a graph's bucket)."""
    shape, small, large = plan.shape, plan.small, plan.large
    _plan_kernel[(min(tokens, plan.max_sequences),)](
        plan.small_units,
        plan.large_units,
        plan.totals,
        sequences.query_starts,
        sequences.context_lens,
        sequences.rows,
        sequences.num_sequences,
        GROUP=shape.q_heads // shape.kv_heads,
        WINDOW=shape.window or 0,
        SMALL_ROWS=small.rows,
        SMALL_KEYS=small.keys,
        SMALL_SHARE=small.share,
        SMALL_LEAST=small.least_blocks,
        LARGE_ROWS=large.rows,
        LARGE_KEYS=large.keys,
        LARGE_SHARE=large.share,
        LARGE_LEAST=large.least_blocks,
        SEQUENCES=next_power_of_2(plan.max_sequences),
        FIELDS=_FIELDS,
        num_warps=4,
    )


@jit
def _attention_kernel(
    output: tl.tensor,
    query: tl.tensor,
    cache: tl.tensor,
    descriptor: tl.tensor,
    block_table: tl.tensor,
    units: tl.tensor,
    total: tl.tensor,
    partial: tl.tensor,
    statistics: tl.tensor,
    arrivals: tl.tensor,
    sinks: tl.tensor,
    scale: tl.float32,
    soft_cap: tl.float32,
    table_width: tl.int32,
    plane_rows: tl.int32,
    QUERY_STRIDE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    SINKS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SMALL: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    PRECISION: tl.constexpr,
    MERGE_LINES: tl.constexpr,
    MERGE_PARTS: tl.constexpr,
    FIELDS: tl.constexpr,
) -> None:
    unit = units + tl.program_id(0) // KV_HEADS * FIELDS
    head = tl.program_id(0) % KV_HEADS
    used = tl.load(total)
    table = block_table + tl.load(unit).to(tl.int64) * table_width
    start = tl.load(unit + 1)
    packed = tl.load(unit + 2)
    before = tl.load(unit + 3)
    first_row = tl.load(unit + 4)
    block = tl.load(unit + 5)
    block_end = tl.load(unit + 6)
    splits = tl.load(unit + 7)
    slot = tl.load(unit + 8)
    part = tl.load(unit + 9)
    if tl.program_id(0) // KV_HEADS >= used:  # only now, so that all of these loads are one wait
        return

    row = first_row + tl.arange(0, ROWS)
    columns = tl.arange(0, DIM_PAD)
    exists = (row < packed)[:, None] & (columns < DIM)[None, :]
    token = start + row // GROUP
    offset = token.to(tl.int64) * QUERY_STRIDE + (head * GROUP + row % GROUP) * DIM
    q = tl.load(query + offset[:, None] + columns[None, :], mask=exists, other=0.0)
    positions = before + row // GROUP
    top = tl.full([ROWS], float("-inf"), tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    summed = tl.zeros([ROWS, DIM_PAD], tl.float32)

    # keys that some row of the tile sees, and blocks that every row sees whole
    first_position = before + first_row // GROUP
    last_position = before + (tl.minimum(first_row + ROWS, packed) - 1) // GROUP
    key_end = last_position + 1
    key_start = 0
    if WINDOW:
        key_start = tl.maximum(first_position - WINDOW + 1, 0)
    if SMALL:
        # few rows: the mask is free, so that one loop, which keeps its loads in flight, takes all blocks
        summed, top, weight = _attend(
            summed, top, weight, q, cache, descriptor, table, head, positions, block, block_end, key_start, key_end,
            scale, soft_cap, plane_rows, KV_HEADS, DIM, DIM_PAD, BLOCK_SIZE, WINDOW, SOFT_CAP, KEYS, True, DESCRIPTORS,
            PRECISION,
        )  # fmt: skip
    else:
        whole_end = tl.minimum((first_position + 1) // KEYS, block_end)
        if WINDOW:
            whole_start = tl.cdiv(tl.maximum(last_position - WINDOW + 1, 0), KEYS)
            edge_end = tl.minimum(tl.maximum(whole_start, block), block_end)
            summed, top, weight = _attend(
                summed, top, weight, q, cache, descriptor, table, head, positions, block, edge_end, key_start, key_end,
                scale, soft_cap, plane_rows, KV_HEADS, DIM, DIM_PAD, BLOCK_SIZE, WINDOW, SOFT_CAP, KEYS, True,
                DESCRIPTORS, PRECISION,
            )  # fmt: skip
            block = edge_end
        summed, top, weight = _attend(
            summed, top, weight, q, cache, descriptor, table, head, positions, block, whole_end, key_start, key_end,
            scale, soft_cap, plane_rows, KV_HEADS, DIM, DIM_PAD, BLOCK_SIZE, WINDOW, SOFT_CAP, KEYS, False, DESCRIPTORS,
            PRECISION,
        )  # fmt: skip
        summed, top, weight = _attend(
            summed, top, weight, q, cache, descriptor, table, head, positions, tl.maximum(block, whole_end), block_end,
            key_start, key_end, scale, soft_cap, plane_rows, KV_HEADS, DIM, DIM_PAD, BLOCK_SIZE, WINDOW, SOFT_CAP, KEYS,
            True, DESCRIPTORS, PRECISION,
        )  # fmt: skip

    if splits == 1:
        _finish(
            output, summed, top, weight, sinks, row, packed, start, head, KV_HEADS, GROUP, DIM, DIM_PAD, SINKS
        )  # fmt: skip
    else:
        mine = ((slot + part) * KV_HEADS + head).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        tl.store(partial + mine[:, None] * DIM_PAD + columns[None, :], summed, mask=exists)
        tl.store(statistics + 2 * mine, top)
        tl.store(statistics + 2 * mine + 1, weight)
        tl.debug_barrier()  # every thread's share is written before one of them tells of it
        arrived = tl.atomic_add(arrivals + slot * KV_HEADS + head, 1, sem="acq_rel", scope="gpu")
        if arrived == splits - 1:
            tl.store(arrivals + slot * KV_HEADS + head, 0)
            _merge(
                output, partial, statistics, sinks, first_row, packed, start, head, slot, splits,
                KV_HEADS, GROUP, DIM, DIM_PAD, SINKS, ROWS, MERGE_LINES, MERGE_PARTS,
            )  # fmt: skip


@jit
def _finish(
    output: tl.tensor,
    summed: tl.tensor,
    top: tl.tensor,
    weight: tl.tensor,
    sinks: tl.tensor,
    row: tl.tensor,
    packed: tl.tensor,
    start: tl.tensor,
    head: tl.tensor,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    SINKS: tl.constexpr,
) -> None:
    """Divide by the softmax's sum and write the packed rows `row` that exist."""
    q_head = head * GROUP + row % GROUP
    if SINKS:
        # a logit beside those of the keys, with no value
        sink = tl.load(sinks + q_head, mask=row < packed, other=0.0).to(tl.float32) * 1.4426950408889634
        new_top = tl.maximum(top, sink)
        weight = weight * tl.exp2(top - new_top) + tl.exp2(sink - new_top)
        summed *= tl.exp2(top - new_top)[:, None]
    columns = tl.arange(0, DIM_PAD)
    target = output + (((start + row // GROUP).to(tl.int64) * (KV_HEADS * GROUP) + q_head) * DIM)[:, None] + columns
    exists = (row < packed)[:, None] & (columns < DIM)[None, :]
    tl.store(target, (summed / weight[:, None]).to(output.dtype.element_ty), mask=exists)


@jit
def _attend(
    summed: tl.tensor,
    top: tl.tensor,
    weight: tl.tensor,
    q: tl.tensor,
    cache: tl.tensor,
    descriptor: tl.tensor,
    table: tl.tensor,
    head: tl.tensor,
    positions: tl.tensor,
    block_start: tl.tensor,
    block_end: tl.tensor,
    key_start: tl.tensor,
    key_end: tl.tensor,
    scale: tl.tensor,
    soft_cap: tl.tensor,
    plane_rows: tl.tensor,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    KEYS: tl.constexpr,
    MASKED: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tensor:
    """Go over blocks of KEYS keys, [block_start, block_end). Not MASKED: every row sees all of them."""
    columns = tl.arange(0, DIM_PAD)
    factor = scale * 1.4426950408889634  # exp(scale · x) = exp2(factor · x)
    if SOFT_CAP:
        factor = soft_cap * 1.4426950408889634
    if BLOCK_SIZE >= KEYS:
        cut: tl.constexpr = BLOCK_SIZE // KEYS
        # looked up a turn ahead, so that the loads of keys and values wait for nothing
        upcoming = tl.load(table + tl.maximum(tl.minimum(block_start, block_end - 1), 0) // cut)
    for block in tl.range(block_start, block_end):
        keys = block * KEYS + tl.arange(0, KEYS)
        if BLOCK_SIZE >= KEYS:
            slot = upcoming * (KV_HEADS * BLOCK_SIZE) + head * BLOCK_SIZE + block % cut * KEYS
            upcoming = tl.load(table + tl.minimum(block + 1, block_end - 1) // cut)
        if DESCRIPTORS:
            k = descriptor.load([slot, 0])
            v = descriptor.load([slot + plane_rows, 0])
        elif BLOCK_SIZE >= KEYS:
            source = cache + slot.to(tl.int64) * DIM + (tl.arange(0, KEYS)[:, None] * DIM + columns[None, :])
            k = tl.load(source, mask=(columns < DIM)[None, :], other=0.0)
            v = tl.load(source + plane_rows.to(tl.int64) * DIM, mask=(columns < DIM)[None, :], other=0.0)
        else:
            seen = (keys >= key_start) & (keys < key_end)
            slots = tl.load(table + keys // BLOCK_SIZE, mask=seen, other=0) * KV_HEADS + head
            slots = slots.to(tl.int64) * BLOCK_SIZE + keys % BLOCK_SIZE
            source = cache + slots[:, None] * DIM + columns[None, :]
            k = tl.load(source, mask=(columns < DIM)[None, :], other=0.0)
            v = tl.load(source + plane_rows.to(tl.int64) * DIM, mask=(columns < DIM)[None, :], other=0.0)
        logits = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if SOFT_CAP:
            logits = 2.0 * tl.sigmoid(logits * (2.0 * scale / soft_cap)) - 1.0  # tanh
        if MASKED:
            visible = keys[None, :] <= positions[:, None]
            if WINDOW:
                visible &= keys[None, :] > positions[:, None] - WINDOW
            logits = tl.where(visible, logits, float("-inf"))
        new_top = tl.maximum(top, tl.max(logits, axis=1) * factor)
        shift = new_top
        if MASKED:
            shift = tl.where(new_top == float("-inf"), 0.0, new_top)  # a row that has seen no key yet
        p = tl.exp2(logits * factor - shift[:, None])
        decay = tl.exp2(top - shift)
        weight = weight * decay + tl.sum(p, axis=1)
        summed = tl.dot(p.to(v.dtype), v, summed * decay[:, None], input_precision=PRECISION)
        top = new_top
    return summed, top, weight


@jit
def _merge(
    output: tl.tensor,
    partial: tl.tensor,
    statistics: tl.tensor,
    sinks: tl.tensor,
    first_row: tl.tensor,
    packed: tl.tensor,
    start: tl.tensor,
    head: tl.tensor,
    slot: tl.tensor,
    splits: tl.tensor,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    SINKS: tl.constexpr,
    ROWS: tl.constexpr,
    LINES: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    """Put the parts of a tile together, LINES rows and PARTS parts at a time: few registers, yet loads in flight."""
    columns = tl.arange(0, DIM_PAD)
    for first_line in range(0, tl.minimum(packed - first_row, ROWS), LINES):
        lines = first_line + tl.arange(0, LINES)
        top = tl.full([LINES], float("-inf"), tl.float32)
        weight = tl.zeros([LINES], tl.float32)
        summed = tl.zeros([LINES, DIM_PAD], tl.float32)
        for first_part in range(0, splits, PARTS):
            parts = first_part + tl.arange(0, PARTS)
            index = ((slot + parts) * KV_HEADS + head)[:, None] * ROWS + lines[None, :]  # [PARTS, LINES]
            known = (parts < splits)[:, None] & (first_row + lines < packed)[None, :]
            # past the first-level cache, where another launch may have left older values
            tops = tl.load(statistics + 2 * index, mask=known, other=float("-inf"), cache_modifier=".cg")
            weights = tl.load(statistics + 2 * index + 1, mask=known, other=0.0, cache_modifier=".cg")
            sums = tl.load(
                partial + index[:, :, None] * DIM_PAD + columns[None, None, :],
                mask=known[:, :, None] & (columns < DIM)[None, None, :],
                other=0.0,
                cache_modifier=".cg",
            )
            new_top = tl.maximum(top, tl.max(tops, axis=0))
            shift = tl.where(new_top == float("-inf"), 0.0, new_top)
            decay = tl.exp2(top - shift)
            factors = tl.exp2(tops - shift[None, :])
            weight = weight * decay + tl.sum(weights * factors, axis=0)
            summed = summed * decay[:, None] + tl.sum(sums * factors[:, :, None], axis=0)
            top = new_top
        _finish(
            output, summed, top, weight, sinks, first_row + lines, packed, start, head,
            KV_HEADS, GROUP, DIM, DIM_PAD, SINKS,
        )  # fmt: skip


def paged_attention(
    query: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    plan: AttentionPlan,
    *,
    scale: float,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    chunks: bool = True,
    output: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of every token of the planned step to its sequence's keys up to itself; returns [tokens, Hq, D].

    query [tokens, Hq, D], of which tokens past the last sequence's are skipped (their output is left as it is); cache
    [2, blocks, Hkv, block_size, D], dense, this step's keys and values written; block_table [rows, most blocks] int32,
    dense; scale (over 0) of the dot products; soft_cap c: c · tanh(x / c) of the scaled products (Gemma 2); sinks [Hq]:
    a logit per head that takes part in the softmax and has no value (gpt-oss). `chunks=False` promises that the step
    only has sequences of at most plan.small.rows packed rows (decoding ones), and saves a launch.
    """
    if output is None:
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    for kind in (_SMALL, _LARGE) if chunks else (_SMALL,):
        _launch_attention(output, query, cache, block_table, plan, kind, scale, soft_cap, sinks)
    return output


def _launch_attention(
    output: torch.Tensor,
    query: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    plan: AttentionPlan,
    kind: int,
    scale: float,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
) -> None:
    shape = plan.shape
    tiling = plan.small if kind == _SMALL else plan.large
    _, blocks, kv_heads, block_size, dim = cache.shape
    units = _units(shape, plan.small, plan.large, kind, query.shape[0], plan.max_sequences)
    padded = next_power_of_2(dim)
    # what a program merges at once: enough to keep loads in flight, 64 numbers a thread
    merge_lines = min(tiling.rows, 32 if kind == _LARGE else next_power_of_2(shape.q_heads // shape.kv_heads))
    merge_parts = max(1, min(64, 64 * 32 * tiling.warps // (merge_lines * padded)))
    descriptor = cache
    if tiling.descriptors:
        descriptor = TensorDescriptor.from_tensor(cache.view(-1, dim), [tiling.keys, padded])
    _attention_kernel[(units * kv_heads,)](
        output,
        query,
        cache,
        descriptor,
        block_table,
        plan.small_units if kind == _SMALL else plan.large_units,
        plan.totals[kind:],
        plan.partial,
        plan.statistics,
        plan.arrivals,
        query if sinks is None else sinks,
        scale,
        soft_cap or 1.0,
        block_table.shape[1],
        blocks * kv_heads * block_size,
        QUERY_STRIDE=query.stride(0),
        KV_HEADS=kv_heads,
        GROUP=shape.q_heads // shape.kv_heads,
        DIM=dim,
        DIM_PAD=padded,
        BLOCK_SIZE=block_size,
        WINDOW=shape.window or 0,
        SOFT_CAP=soft_cap is not None,
        SINKS=sinks is not None,
        ROWS=tiling.rows,
        KEYS=tiling.keys,
        SMALL=kind == _SMALL,
        DESCRIPTORS=tiling.descriptors,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        MERGE_LINES=merge_lines,
        MERGE_PARTS=merge_parts,
        FIELDS=_FIELDS,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
    )


def paged_attention_reference(
    query: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    shape: AttentionShape,
    sequences: Sequences,
    *,
    scale: float,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """`paged_attention` in plain torch, sequence by sequence, computed in float32; zeros for tokens of no sequence."""
    output = torch.zeros_like(query)
    group = shape.q_heads // shape.kv_heads
    for i in range(int(sequences.num_sequences)):
        start, end = int(sequences.query_starts[i]), int(sequences.query_starts[i + 1])
        length = int(sequences.context_lens[i])
        blocks = block_table[int(sequences.rows[i]), : ceil_div(length, shape.block_size)].long()
        # [2, Hkv, length, D]
        keys, values = cache[:, blocks].transpose(1, 2).flatten(2, 3)[:, :, :length].float()
        q = query[start:end].float().reshape(end - start, shape.kv_heads, group, -1)
        logits = torch.einsum("thgd,hkd->hgtk", q, keys) * scale
        if soft_cap is not None:
            logits = soft_cap * torch.tanh(logits / soft_cap)
        position = torch.arange(length, device=query.device)
        distance = position[length - (end - start) :, None] - position[None, :]
        hidden = (distance < 0) if shape.window is None else (distance < 0) | (distance >= shape.window)
        logits = logits.masked_fill(hidden, -math.inf)
        if sinks is not None:
            sink = sinks.float().reshape(shape.kv_heads, group, 1, 1).expand(-1, -1, end - start, 1)
            probabilities = torch.cat((logits, sink), dim=-1).softmax(dim=-1)[..., :-1]
        else:
            probabilities = logits.softmax(dim=-1)
        values = values.masked_fill(hidden.all(dim=0)[None, :, None], 0.0)  # a freed block may hold anything
        output[start:end] = torch.einsum("hgtk,hkd->thgd", probabilities, values).flatten(1, 2).to(query.dtype)
    return output
