"""Attention over the paged cache, for any mix of prompt chunks and decoding rows, on a grid that never changes.

A program attends one unit of an `AttentionPlan` for one KV head: a tile of packed query rows and a part of its keys.
The last program of a tile to finish merges the parts. The softmax runs over blocks of keys as in FlashAttention (Dao et
al., 2022), in base 2.

The cache may be of 8-bit floating-point numbers (e4m3): half the bytes. They are exact as float16, in which the
products are then taken.
"""

from __future__ import annotations

import math

import torch

from asyncllm.kernels.attention_plan import FIELDS, MEMBER_FIELDS, AttentionPlan, AttentionShape, Sequences, Tiling
from asyncllm.kernels.language import (
    TensorDescriptor,
    await_previous,
    ceil_div,
    jit,
    launch_next,
    next_power_of_2,
    overlap_options,
    tl,
)
from asyncllm.kernels.specialized_attention import specialized_attention


@jit
def _attention_kernel(
    output: tl.tensor,
    query: tl.tensor,
    cache: tl.tensor,
    descriptor: tl.tensor,
    block_table: tl.tensor,
    units: tl.tensor,
    total: tl.tensor,
    members: tl.tensor,
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
    ONE_LOOP: tl.constexpr,
    SHARED_ROWS: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
    SHARED_STAGES: tl.constexpr,
    SMALL: tl.constexpr,
    MERGE_LINES: tl.constexpr,
    MERGE_PARTS: tl.constexpr,
    SHARED_LINES: tl.constexpr,
    SHARED_PARTS: tl.constexpr,
    MATES_PAD: tl.constexpr,
    FIELDS: tl.constexpr,
    MEMBER_FIELDS: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    number = tl.program_id(0) // KV_HEADS
    head = tl.program_id(0) % KV_HEADS
    unit = units + number * FIELDS
    used = tl.load(total)
    table = block_table + tl.load(unit).to(tl.int64) * table_width
    start = tl.load(unit + 1)
    packed = tl.load(unit + 2)
    before = tl.load(unit + 3)
    first_row = tl.load(unit + 4)
    block = tl.load(unit + 5)
    block_end = tl.load(unit + 6)
    splits = tl.load(unit + 7)
    line = tl.load(unit + 8)
    part = tl.load(unit + 9)
    stride = tl.load(unit + 10)
    shared_parts = tl.load(unit + 11)
    shared_line = tl.load(unit + 12)
    shared_stride = tl.load(unit + 13)
    arrival = tl.load(unit + 14)
    is_shared = tl.load(unit + 15)
    upcoming = _look_up(table, block, block_end, BLOCK_SIZE, KEYS)
    await_previous(OVERLAP)  # surplus programs too: the launch is complete only when the one before it is
    if number >= used:
        return
    launch_next(OVERLAP)

    if SHARED_ROWS:
        if is_shared:
            _attend_shared_tile(
                output, query, cache, descriptor, table, upcoming, members, partial, statistics, arrivals, sinks, scale,
                soft_cap, plane_rows, head, start, packed, block, block_end, part, shared_line, shared_parts,
                QUERY_STRIDE, KV_HEADS, GROUP, DIM, DIM_PAD, BLOCK_SIZE, SOFT_CAP, SINKS, SHARED_ROWS, KEYS,
                DESCRIPTORS, PRECISION, SHARED_STAGES, SHARED_LINES, SHARED_PARTS, MATES_PAD, MEMBER_FIELDS,
            )  # fmt: skip
        else:
            _attend_tile(
                output, query, cache, descriptor, table, upcoming, partial, statistics, arrivals, sinks, scale,
                soft_cap, plane_rows, head, start, packed, before, first_row, block, block_end, splits, line, part,
                stride, shared_parts, shared_line, shared_stride, arrival, QUERY_STRIDE, KV_HEADS, GROUP, DIM, DIM_PAD,
                BLOCK_SIZE, WINDOW, SOFT_CAP, SINKS, ROWS, KEYS, ONE_LOOP, DESCRIPTORS, PRECISION, STAGES,
                SMALL, MERGE_LINES, MERGE_PARTS,
            )  # fmt: skip
    else:
        _attend_tile(
            output, query, cache, descriptor, table, upcoming, partial, statistics, arrivals, sinks, scale, soft_cap,
            plane_rows, head, start, packed, before, first_row, block, block_end, splits, line, part, stride,
            shared_parts, shared_line, shared_stride, arrival, QUERY_STRIDE, KV_HEADS, GROUP, DIM, DIM_PAD, BLOCK_SIZE,
            WINDOW, SOFT_CAP, SINKS, ROWS, KEYS, ONE_LOOP, DESCRIPTORS, PRECISION, STAGES, SMALL, MERGE_LINES,
            MERGE_PARTS,
        )  # fmt: skip


@jit
def _attend_shared_tile(
    output: tl.tensor,
    query: tl.tensor,
    cache: tl.tensor,
    descriptor: tl.tensor,
    table: tl.tensor,
    upcoming: tl.tensor,
    members: tl.tensor,
    partial: tl.tensor,
    statistics: tl.tensor,
    arrivals: tl.tensor,
    sinks: tl.tensor,
    scale: tl.float32,
    soft_cap: tl.float32,
    plane_rows: tl.int32,
    head: tl.tensor,
    start: tl.tensor,
    packed: tl.tensor,
    block: tl.tensor,
    block_end: tl.tensor,
    part: tl.tensor,
    shared_line: tl.tensor,
    shared_parts: tl.tensor,
    QUERY_STRIDE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    SINKS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
    MERGE_LINES: tl.constexpr,
    MERGE_PARTS: tl.constexpr,
    MATES_PAD: tl.constexpr,
    MEMBER_FIELDS: tl.constexpr,
) -> None:
    """Blocks of keys that several sequences see whole; a part of the tile of each of them."""
    columns = tl.arange(0, DIM_PAD)
    row = tl.arange(0, ROWS)
    exists = (row < packed)[:, None] & (columns < DIM)[None, :]
    token = tl.load(members + (start + row // GROUP) * MEMBER_FIELDS, mask=row < packed, other=0)
    offset = token.to(tl.int64) * QUERY_STRIDE + (head * GROUP + row % GROUP) * DIM
    q = _as_key(tl.load(query + offset[:, None] + columns[None, :], mask=exists, other=0.0), cache)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    summed = tl.zeros([DIM_PAD, ROWS], tl.float32)
    summed, top, weight = _attend(
        summed, top, weight, tl.trans(q), cache, descriptor, table, upcoming, head, row, block, block_end, 0,
        block_end * KEYS, scale, soft_cap, plane_rows, KV_HEADS, DIM, DIM_PAD, BLOCK_SIZE, 0, SOFT_CAP, KEYS, False,
        DESCRIPTORS, PRECISION, STAGES, True, False,
    )  # fmt: skip
    mine = (shared_line + part * packed + row).to(tl.int64) * KV_HEADS + head
    _store_part(partial, statistics, tl.trans(summed), top, weight, mine, exists, row < packed, DIM_PAD)
    mate = tl.arange(0, MATES_PAD)
    mates = packed // GROUP
    record = members + (start + mate) * MEMBER_FIELDS
    missing = tl.load(record + 2, mask=mate < mates, other=0) + shared_parts - 1
    counter = arrivals + tl.load(record + 3, mask=mate < mates, other=0) * KV_HEADS + head
    tl.debug_barrier()  # every thread's share is written before one of them tells of it
    arrived = tl.atomic_add(counter, 1, mask=mate < mates, sem="acq_rel", scope="gpu")
    is_last = (mate < mates) & (arrived == missing)
    tl.debug_barrier()
    tl.store(counter, 0, mask=is_last)
    if tl.sum(is_last.to(tl.int32), axis=0) > 0:
        # all of them at once: one after the other, each would wait for its own loads
        for first_line in range(0, packed, MERGE_LINES):
            line = first_line + tl.arange(0, MERGE_LINES)
            ready = tl.sum((is_last[None, :] & (mate[None, :] == line[:, None] // GROUP)).to(tl.int32), axis=1) > 0
            member = members + (start + line // GROUP) * MEMBER_FIELDS
            its_token = tl.load(member, mask=ready, other=0)
            own_line = tl.load(member + 1, mask=ready, other=0) + line % GROUP
            splits = tl.load(member + 2, mask=ready, other=0)
            _merge(
                output, partial, statistics, sinks, line % GROUP, tl.where(ready, GROUP, 0), its_token, head,
                own_line, GROUP, splits, shared_line + line, packed, shared_parts, KV_HEADS, GROUP, DIM, DIM_PAD, SINKS,
                MERGE_LINES, MERGE_PARTS,
            )  # fmt: skip


@jit
def _attend_tile(
    output: tl.tensor,
    query: tl.tensor,
    cache: tl.tensor,
    descriptor: tl.tensor,
    table: tl.tensor,
    upcoming: tl.tensor,
    partial: tl.tensor,
    statistics: tl.tensor,
    arrivals: tl.tensor,
    sinks: tl.tensor,
    scale: tl.float32,
    soft_cap: tl.float32,
    plane_rows: tl.int32,
    head: tl.tensor,
    start: tl.tensor,
    packed: tl.tensor,
    before: tl.tensor,
    first_row: tl.tensor,
    block: tl.tensor,
    block_end: tl.tensor,
    splits: tl.tensor,
    line: tl.tensor,
    part: tl.tensor,
    stride: tl.tensor,
    shared_parts: tl.tensor,
    shared_line: tl.tensor,
    shared_stride: tl.tensor,
    arrival: tl.tensor,
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
    ONE_LOOP: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
    SMALL: tl.constexpr,
    MERGE_LINES: tl.constexpr,
    MERGE_PARTS: tl.constexpr,
) -> None:
    columns = tl.arange(0, DIM_PAD)
    row = first_row + tl.arange(0, ROWS)
    exists = (row < packed)[:, None] & (columns < DIM)[None, :]
    token = start + row // GROUP
    offset = token.to(tl.int64) * QUERY_STRIDE + (head * GROUP + row % GROUP) * DIM
    q = _as_key(tl.load(query + offset[:, None] + columns[None, :], mask=exists, other=0.0), cache)
    positions = before + row // GROUP
    top = tl.full([ROWS], float("-inf"), tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    summed = tl.zeros([ROWS, DIM_PAD], tl.float32)
    if SMALL:
        q, summed = tl.trans(q), tl.trans(summed)

    # keys that some row of the tile sees, and blocks that every row sees whole
    first_position = before + first_row // GROUP
    last_position = before + (tl.minimum(first_row + ROWS, packed) - 1) // GROUP
    key_end = last_position + 1
    key_start = 0
    if WINDOW:
        key_start = tl.maximum(first_position - WINDOW + 1, 0)
    if ONE_LOOP:
        # few rows: the mask is free, so that one loop, which keeps its loads in flight, takes all blocks
        summed, top, weight = _attend(
            summed, top, weight, q, cache, descriptor, table, upcoming, head, positions, block, block_end,
            key_start, key_end, scale, soft_cap, plane_rows, KV_HEADS, DIM, DIM_PAD, BLOCK_SIZE, WINDOW, SOFT_CAP,
            KEYS, True, DESCRIPTORS, PRECISION, STAGES, SMALL, SMALL and DESCRIPTORS,
        )  # fmt: skip
    else:
        whole_end = tl.minimum((first_position + 1) // KEYS, block_end)
        if WINDOW:
            whole_start = tl.cdiv(tl.maximum(last_position - WINDOW + 1, 0), KEYS)
            edge_end = tl.minimum(tl.maximum(whole_start, block), block_end)
            summed, top, weight = _attend(
                summed, top, weight, q, cache, descriptor, table, upcoming, head, positions, block, edge_end,
                key_start, key_end, scale, soft_cap, plane_rows, KV_HEADS, DIM, DIM_PAD, BLOCK_SIZE, WINDOW,
                SOFT_CAP, KEYS, True, DESCRIPTORS, PRECISION, STAGES, False, False,
            )  # fmt: skip
            block = edge_end
            upcoming = _look_up(table, block, whole_end, BLOCK_SIZE, KEYS)
        summed, top, weight = _attend(
            summed, top, weight, q, cache, descriptor, table, upcoming, head, positions, block, whole_end,
            key_start, key_end, scale, soft_cap, plane_rows, KV_HEADS, DIM, DIM_PAD, BLOCK_SIZE, WINDOW, SOFT_CAP,
            KEYS, False, DESCRIPTORS, PRECISION, STAGES, False, False,
        )  # fmt: skip
        block = tl.maximum(block, whole_end)
        upcoming = _look_up(table, block, block_end, BLOCK_SIZE, KEYS)
        summed, top, weight = _attend(
            summed, top, weight, q, cache, descriptor, table, upcoming, head, positions, block, block_end,
            key_start, key_end, scale, soft_cap, plane_rows, KV_HEADS, DIM, DIM_PAD, BLOCK_SIZE, WINDOW, SOFT_CAP,
            KEYS, True, DESCRIPTORS, PRECISION, STAGES, False, False,
        )  # fmt: skip

    if SMALL:
        summed = tl.trans(summed)
    if splits + shared_parts == 1:
        _finish(
            output, summed, top, weight, sinks, row, packed, start, head, KV_HEADS, GROUP, DIM, DIM_PAD, SINKS
        )  # fmt: skip
    else:
        mine = (line + part * stride + row - first_row).to(tl.int64) * KV_HEADS + head
        _store_part(partial, statistics, summed, top, weight, mine, exists, row < packed, DIM_PAD)
        counter = arrivals + arrival * KV_HEADS + head
        tl.debug_barrier()  # every thread's share is written before one of them tells of it
        arrived = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
        if arrived == splits + shared_parts - 1:
            tl.store(counter, 0)
            for first_line in range(0, tl.minimum(ROWS, packed - first_row), MERGE_LINES):
                lines = first_line + tl.arange(0, MERGE_LINES)
                same = tl.zeros([MERGE_LINES], tl.int32)
                _merge(
                    output, partial, statistics, sinks, first_row + lines, tl.minimum(first_row + ROWS, packed), start,
                    head, line + lines, stride, splits + same, shared_line + lines, shared_stride, shared_parts,
                    KV_HEADS, GROUP, DIM, DIM_PAD, SINKS, MERGE_LINES, MERGE_PARTS,
                )  # fmt: skip


@jit
def _look_up(
    table: tl.tensor, block: tl.tensor, block_end: tl.tensor, BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr
) -> tl.tensor:
    """Where the first block of keys of [block, block_end) is, where a block of the cache holds one or more of keys."""
    if BLOCK_SIZE >= KEYS:
        block = tl.load(table + tl.maximum(tl.minimum(block, block_end - 1), 0) // (BLOCK_SIZE // KEYS))
    return block


@jit
def _as_key(q: tl.tensor, cache: tl.tensor) -> tl.tensor:
    """In the type that keys and values are multiplied in."""
    if cache.dtype.element_ty == tl.float8e4nv and q.dtype == tl.bfloat16:
        q = tl.minimum(tl.maximum(q.to(tl.float32), -65504.0), 65504.0).to(tl.float16)
    return q


@jit
def _store_part(
    partial: tl.tensor,
    statistics: tl.tensor,
    summed: tl.tensor,
    top: tl.tensor,
    weight: tl.tensor,
    lines: tl.tensor,
    exists: tl.tensor,
    row_exists: tl.tensor,
    DIM_PAD: tl.constexpr,
) -> None:
    tl.store(partial + lines[:, None] * DIM_PAD + tl.arange(0, DIM_PAD)[None, :], summed, mask=exists)
    tl.store(statistics + 2 * lines, top, mask=row_exists)
    tl.store(statistics + 2 * lines + 1, weight, mask=row_exists)


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
    upcoming: tl.tensor,
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
    STAGES: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    EXACT_END: tl.constexpr,
) -> tl.tensor:
    """Go over blocks of KEYS keys, [block_start, block_end). Not MASKED: every row sees all of them.

    `upcoming` is where the first one is: it is looked up a turn ahead, so that the loads of keys wait for nothing.
    TRANSPOSED: q and `summed` are [D, rows], not [rows, D], so that few rows are the side of a product that may be 8
    wide. EXACT_END: of the last block, by descriptors, no keys from `key_end` on are read.
    """
    AXIS: tl.constexpr = 0 if TRANSPOSED else 1  # of the keys
    columns = tl.arange(0, DIM_PAD)
    factor = scale * 1.4426950408889634  # exp(scale · x) = exp2(factor · x)
    if SOFT_CAP:
        factor = soft_cap * 1.4426950408889634
    if BLOCK_SIZE >= KEYS:
        cut: tl.constexpr = BLOCK_SIZE // KEYS
    for block in tl.range(block_start, block_end, num_stages=STAGES):
        keys = block * KEYS + tl.arange(0, KEYS)
        if BLOCK_SIZE >= KEYS:
            place = upcoming * KV_HEADS + head
            inside = block % cut * KEYS
            upcoming = tl.load(table + tl.minimum(block + 1, block_end - 1) // cut)
        if DESCRIPTORS:
            if EXACT_END:
                # The box is moved back to end with the last key: what it has of before is masked, and where that is
                # not of the cache's block, it isn't read.
                surplus = tl.maximum(block * KEYS + KEYS - key_end, 0)
                keys = tl.where(keys - surplus >= block * KEYS, keys - surplus, 0x7FFFFFFF)
                inside -= surplus
            k = tl.reshape(descriptor.load([place, inside, 0]), [KEYS, DIM_PAD])
            v = tl.reshape(descriptor.load([place + plane_rows // BLOCK_SIZE, inside, 0]), [KEYS, DIM_PAD])
        elif BLOCK_SIZE >= KEYS:
            slot = place.to(tl.int64) * BLOCK_SIZE + inside
            source = cache + slot * DIM + (tl.arange(0, KEYS)[:, None] * DIM + columns[None, :])
            k = tl.load(source, mask=(columns < DIM)[None, :], other=0.0)
            v = tl.load(source + plane_rows.to(tl.int64) * DIM, mask=(columns < DIM)[None, :], other=0.0)
        else:
            seen = (keys >= key_start) & (keys < key_end)
            slots = tl.load(table + keys // BLOCK_SIZE, mask=seen, other=0) * KV_HEADS + head
            slots = slots.to(tl.int64) * BLOCK_SIZE + keys % BLOCK_SIZE
            source = cache + slots[:, None] * DIM + columns[None, :]
            k = tl.load(source, mask=(columns < DIM)[None, :], other=0.0)
            v = tl.load(source + plane_rows.to(tl.int64) * DIM, mask=(columns < DIM)[None, :], other=0.0)
        if TRANSPOSED:
            logits = tl.dot(k.to(q.dtype), q, input_precision=PRECISION)
        else:
            logits = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision=PRECISION)
        if SOFT_CAP:
            logits = 2.0 * tl.sigmoid(logits * (2.0 * scale / soft_cap)) - 1.0  # tanh
        if MASKED:
            key, position = tl.expand_dims(keys, 1 - AXIS), tl.expand_dims(positions, AXIS)
            visible = key <= position
            if WINDOW:
                visible &= key > position - WINDOW
            logits = tl.where(visible, logits, float("-inf"))
        new_top = tl.maximum(top, tl.max(logits, axis=AXIS) * factor)
        shift = new_top
        if MASKED:
            shift = tl.where(new_top == float("-inf"), 0.0, new_top)  # a row that has seen no key yet
        p = tl.exp2(logits * factor - tl.expand_dims(shift, AXIS))
        decay = tl.exp2(top - shift)
        weight = weight * decay + tl.sum(p, axis=AXIS)
        summed *= tl.expand_dims(decay, AXIS)
        if TRANSPOSED:
            summed = tl.dot(tl.trans(v.to(q.dtype)), p.to(q.dtype), summed, input_precision=PRECISION)
        else:
            summed = tl.dot(p.to(q.dtype), v.to(q.dtype), summed, input_precision=PRECISION)
        top = new_top
    return summed, top, weight


@jit
def _merge(
    output: tl.tensor,
    partial: tl.tensor,
    statistics: tl.tensor,
    sinks: tl.tensor,
    row: tl.tensor,
    row_end: tl.tensor,
    start: tl.tensor,
    head: tl.tensor,
    line: tl.tensor,
    stride: tl.tensor,
    splits: tl.tensor,
    shared_line: tl.tensor,
    shared_stride: tl.tensor,
    shared_parts: tl.tensor,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    SINKS: tl.constexpr,
    LINES: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    """Put the parts of LINES packed rows together, PARTS at a time: few registers, yet loads in flight.

    Of each row, [LINES]: its number in its sequence, `line` and `shared_line` of its first parts, and how many parts
    there are of its own keys (`splits`). `row_end` and `start` may be of each row or of all. Parts are added one after
    the other by operations that the compiler has no choice about. So a row's bits depend neither on LINES nor on PARTS,
    and whoever merges a row gives it the same.
    """
    columns = tl.arange(0, DIM_PAD)
    exists = row < row_end
    top = tl.full([LINES], float("-inf"), tl.float32)
    weight = tl.zeros([LINES], tl.float32)
    summed = tl.zeros([LINES, DIM_PAD], tl.float32)
    most = tl.max(tl.where(exists, splits, -shared_parts), axis=0) + shared_parts
    for first_part in range(0, most, PARTS):
        for i in tl.static_range(PARTS):
            part = first_part + i
            own, shared = line + part * stride, shared_line + (part - splits) * shared_stride
            index = tl.where(part < splits, own, shared) * KV_HEADS + head
            known = (part < splits + shared_parts) & exists
            # past the first-level cache, where another launch may have left older values
            its_top = tl.load(statistics + 2 * index, mask=known, other=float("-inf"), cache_modifier=".cg")
            its_weight = tl.load(statistics + 2 * index + 1, mask=known, other=0.0, cache_modifier=".cg")
            its_sum = tl.load(
                partial + index[:, None] * DIM_PAD + columns[None, :],
                mask=known[:, None] & (columns < DIM)[None, :],
                other=0.0,
                cache_modifier=".cg",
            )
            new_top = tl.maximum(top, its_top)
            shift = tl.where(new_top == float("-inf"), 0.0, new_top)
            decay, factor = tl.exp2(top - shift), tl.exp2(its_top - shift)
            weight = tl.fma(its_weight, factor, weight * decay)
            summed = tl.fma(its_sum, factor[:, None], summed * decay[:, None])
            top = new_top
    _finish(
        output, summed, top, weight, sinks, row, row_end, start, head, KV_HEADS, GROUP, DIM, DIM_PAD, SINKS
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
    overlap: bool = False,
) -> torch.Tensor:
    """Attention of every token of the planned step to its sequence's keys up to itself; returns [tokens, Hq, D].

    query [tokens, Hq, D], of which tokens past the last sequence's are skipped (their output is left as it is); cache
    [2, blocks, Hkv, block_size, D], dense, of the query's type or float8_e4m3fn, this step's keys and values written;
    block_table [rows, most blocks] int32, dense; scale (over 0) of the dot products; soft_cap c: c · tanh(x / c) of the
    scaled products (Gemma 2); sinks [Hq]: a logit per head that takes part in the softmax and has no value (gpt-oss).
    `chunks=False` promises that the step only has sequences of at most plan.small.rows packed rows (decoding ones), and
    saves a launch. `overlap=True` promises that the launch before this one writes neither the plan nor the block table:
    this one then begins beside it.
    """
    if output is None:
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    small = plan.small_of(query.shape[0])
    for tiling in (small, plan.large) if chunks or not small.rows else (small,):
        if tiling.programs:
            specialized_attention(
                output, query, cache, block_table, plan, scale=scale, soft_cap=soft_cap, sinks=sinks, overlap=overlap
            )
        elif tiling.rows:
            _launch_attention(output, query, cache, block_table, plan, tiling, scale, soft_cap, sinks, overlap)
    return output


def _launch_attention(
    output: torch.Tensor,
    query: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    plan: AttentionPlan,
    tiling: Tiling,
    scale: float,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
    overlap: bool,
) -> None:
    shape, is_small = plan.shape, tiling is not plan.large
    _, blocks, kv_heads, block_size, dim = cache.shape
    padded = next_power_of_2(dim)
    # what a program merges at once: enough to keep loads in flight, 64 numbers a thread; twice that where a shared tile
    # merges rows of several sequences
    merge_lines = min(tiling.rows, next_power_of_2(shape.group) if is_small else 32)
    shared_lines = max(8, merge_lines)
    merge_parts = max(1, min(8, 64 * 32 * tiling.warps // (merge_lines * padded)))
    descriptor = cache
    if tiling.descriptors:
        descriptor = TensorDescriptor.from_tensor(cache.view(-1, block_size, dim), [1, tiling.keys, padded])
    _attention_kernel[(plan.units(tiling, query.shape[0]) * kv_heads,)](
        output,
        query,
        cache,
        descriptor,
        block_table,
        plan.small_units if is_small else plan.large_units,
        plan.totals if is_small else plan.totals[1:],
        plan.members,
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
        GROUP=shape.group,
        DIM=dim,
        DIM_PAD=padded,
        BLOCK_SIZE=block_size,
        WINDOW=shape.window or 0,
        SOFT_CAP=soft_cap is not None,
        SINKS=sinks is not None,
        ROWS=tiling.rows,
        KEYS=tiling.keys,
        ONE_LOOP=is_small or tiling.uniform,
        SHARED_ROWS=plan.shared_rows if is_small else 0,
        DESCRIPTORS=tiling.descriptors,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        STAGES=tiling.stages,
        SHARED_STAGES=tiling.shared_stages,
        SMALL=is_small,
        MERGE_LINES=merge_lines,
        MERGE_PARTS=merge_parts,
        SHARED_LINES=shared_lines,
        SHARED_PARTS=max(1, 2 * merge_parts * merge_lines // shared_lines),
        MATES_PAD=next_power_of_2(max(1, plan.mates)),
        FIELDS=FIELDS,
        MEMBER_FIELDS=MEMBER_FIELDS,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        **overlap_options(query.device, overlap),
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
        # torch moves no 8-bit floats by index, but bytes
        found = cache.view(torch.uint8)[:, blocks].view(cache.dtype) if cache.dtype.itemsize == 1 else cache[:, blocks]
        # [2, Hkv, length, D]
        keys, values = found.transpose(1, 2).flatten(2, 3)[:, :, :length].float()
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
