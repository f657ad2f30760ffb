"""The large tiles of `paged_attention` on a Hopper GPU, by warps of two kinds, as in FlashAttention-3 (Shah et al.,
2024).

One warp, the producer, has blocks of keys and values copied to a ring in shared memory. Two groups of four warps, the
consumers, have half of a tile's rows each. A group takes a turn of keys at a time: two blocks of the cache, each with
products of its own, as it has its own place in memory. It starts the products that give the logits of a turn together
with those of the values of the turn before, whose probabilities it has. While it computes probabilities, the products
of the other group have the matrix units.

The grid has a program per multiprocessor, which attends one unit of the plan after another. Whoever is done takes the
next of the list, so that all end at the same time. The producer is ahead by the ring, also from one unit to the next.

It is written in Gluon, Triton's lower language, since Triton has a group wait for each product. Gluon has no
interpreter: there, and on other GPUs, `paged_attention`'s own kernel attends large tiles.
"""

from __future__ import annotations

import torch

from asyncllm.kernels.attention_plan import FIELDS, AttentionPlan
from asyncllm.kernels.language import (
    SHARED_FIRST,
    GluonDescriptor,
    await_previous,
    barrier,
    gl,
    gluon_jit,
    hopper,
    launch_next,
    load_block,
    overlap_options,
)

_HALF = 64
"""Rows of a consumer: as many as one instruction of the matrix units has."""

_STAGES = 2
"""Turns in the ring."""

_CONSUMERS, _PRODUCER = 240, 24
"""Registers of a thread of either: 8 warps of the one and 4 of the other, of which three idle, share 65,536."""


@gluon_jit
def _specialized_attention_kernel(
    output: gl.tensor,
    query: gl.tensor,
    descriptor: gl.tensor,
    block_table: gl.tensor,
    units: gl.tensor,
    total: gl.tensor,
    progress: gl.tensor,
    partial: gl.tensor,
    statistics: gl.tensor,
    arrivals: gl.tensor,
    sinks: gl.tensor,
    scale: gl.tensor,
    soft_cap: gl.tensor,
    table_width: gl.tensor,
    plane_rows: gl.tensor,
    QUERY_STRIDE: gl.constexpr,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    DIM: gl.constexpr,
    BLOCK: gl.constexpr,
    SOFT_CAP: gl.constexpr,
    SINKS: gl.constexpr,
    HALF: gl.constexpr,
    STAGES: gl.constexpr,
    FIELDS: gl.constexpr,
    CONSUMERS: gl.constexpr,
    PRODUCER: gl.constexpr,
    CARVE_OUT: gl.constexpr,
    OVERLAP: gl.constexpr,
) -> None:
    # the ring: STAGES turns of keys and of values, each filled by the producer and emptied by both consumers
    dtype: gl.constexpr = query.dtype.element_ty
    BARRIER: gl.constexpr = hopper.mbarrier.MBarrierLayout()
    keys = gl.allocate_shared_memory(dtype, [2 * STAGES, BLOCK, DIM], descriptor.layout)
    values = gl.allocate_shared_memory(dtype, [2 * STAGES, BLOCK, DIM], descriptor.layout)
    keys_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    keys_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    values_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    values_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for i in gl.static_range(STAGES):
        hopper.mbarrier.init(keys_full.index(i), count=1)
        hopper.mbarrier.init(keys_empty.index(i), count=2)
        hopper.mbarrier.init(values_full.index(i), count=1)
        hopper.mbarrier.init(values_empty.index(i), count=2)
    # which unit is attended, and which is next
    numbers = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    told = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    taken = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    queries = gl.allocate_shared_memory(dtype, [2, HALF, DIM], descriptor.layout)
    for i in gl.static_range(2):
        hopper.mbarrier.init(told.index(i), count=1)
        hopper.mbarrier.init(taken.index(i), count=2)
    hopper.fence_async_shared()
    await_previous(OVERLAP)
    launch_next(OVERLAP)
    ring = (keys, values, keys_full, keys_empty, values_full, values_empty)
    schedule = (numbers, told, taken)
    work = gl.load(total) * KV_HEADS
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    0, output, query, units, work, partial, statistics, arrivals, sinks, scale, soft_cap, ring,
                    schedule, queries.index(0), QUERY_STRIDE, KV_HEADS, GROUP, DIM, BLOCK, SOFT_CAP, SINKS, HALF,
                    STAGES, FIELDS,
                ),
            ),
            (
                _consume,
                (
                    1, output, query, units, work, partial, statistics, arrivals, sinks, scale, soft_cap, ring,
                    schedule, queries.index(1), QUERY_STRIDE, KV_HEADS, GROUP, DIM, BLOCK, SOFT_CAP, SINKS, HALF,
                    STAGES, FIELDS,
                ),
            ),
            (
                _produce,
                (
                    descriptor, block_table, units, work, progress, table_width, plane_rows, ring, schedule, KV_HEADS,
                    GROUP, DIM, BLOCK, 2 * HALF, STAGES, FIELDS,
                ),
            ),
        ],
        [4, 1],
        [CONSUMERS, PRODUCER],
    )  # fmt: skip


@gluon_jit
def _produce(
    descriptor: gl.tensor,
    block_table: gl.tensor,
    units: gl.tensor,
    work: gl.tensor,
    progress: gl.tensor,
    table_width: gl.tensor,
    plane_rows: gl.tensor,
    ring: gl.tuple,
    schedule: gl.tuple,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    DIM: gl.constexpr,
    BLOCK: gl.constexpr,
    ROWS: gl.constexpr,
    STAGES: gl.constexpr,
    FIELDS: gl.constexpr,
) -> None:
    """Take units from the list, and fill the ring: with a unit's last keys first."""
    keys, values, keys_full, keys_empty, values_full, values_empty = ring
    SIZE: gl.constexpr = 2 * BLOCK * DIM * 2
    turn = 0
    count = 0
    number = gl.program_id(0)
    _tell(schedule, number, count)
    while number < work:
        unit = units + number // KV_HEADS * FIELDS
        head = number % KV_HEADS
        table = block_table + gl.load(unit).to(gl.int64) * table_width
        packed = gl.load(unit + 2)
        before = gl.load(unit + 3)
        first_row = gl.load(unit + 4)
        start = gl.load(unit + 5)
        end = gl.load(unit + 6)
        # a block past the last one that holds a key may be anything: then that one is read twice
        last = (before + (gl.minimum(first_row + ROWS, packed) - 1) // GROUP) // BLOCK
        for back in range(0, gl.maximum(end - start, 1)):
            first = 2 * (end - 1 - back)
            near = (gl.load(table + first) * KV_HEADS + head) * BLOCK
            far = (gl.load(table + gl.minimum(first + 1, last)) * KV_HEADS + head) * BLOCK
            stage = turn % STAGES
            parity = turn // STAGES % 2
            full = keys_full.index(stage)
            hopper.mbarrier.wait(keys_empty.index(stage), parity ^ 1)
            hopper.mbarrier.expect(full, SIZE)
            load_block(descriptor, [near, 0], full, keys.index(2 * stage))
            load_block(descriptor, [far, 0], full, keys.index(2 * stage + 1))
            full = values_full.index(stage)
            hopper.mbarrier.wait(values_empty.index(stage), parity ^ 1)
            hopper.mbarrier.expect(full, SIZE)
            load_block(descriptor, [near + plane_rows, 0], full, values.index(2 * stage))
            load_block(descriptor, [far + plane_rows, 0], full, values.index(2 * stage + 1))
            turn += 1
        number = gl.num_programs(0) + gl.atomic_add(progress, 1)
        count += 1
        _tell(schedule, number, count)
    if gl.atomic_add(progress + 1, 1) == gl.num_programs(0) - 1:
        gl.store(progress, 0)  # ready for the next launch
        gl.store(progress + 1, 0)


@gluon_jit
def _tell(schedule: gl.tuple, number: gl.tensor, count: gl.tensor) -> None:
    """The producer says which unit is the next one."""
    numbers, told, taken = schedule
    hopper.mbarrier.wait(taken.index(count % 2), count // 2 % 2 ^ 1)
    numbers.index(count % 2).store(gl.full([1], number, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))
    hopper.mbarrier.arrive(told.index(count % 2), count=1)


@gluon_jit
def _take(schedule: gl.tuple, count: gl.tensor) -> gl.tensor:
    """A consumer hears of it."""
    numbers, told, taken = schedule
    hopper.mbarrier.wait(told.index(count % 2), count // 2 % 2)
    number = gl.max(numbers.index(count % 2).load(gl.BlockedLayout([1], [32], [4], [0])), axis=0)
    hopper.mbarrier.arrive(taken.index(count % 2), count=1)
    return number


@gluon_jit
def _consume(
    WHICH: gl.constexpr,
    output: gl.tensor,
    query: gl.tensor,
    units: gl.tensor,
    work: gl.tensor,
    partial: gl.tensor,
    statistics: gl.tensor,
    arrivals: gl.tensor,
    sinks: gl.tensor,
    scale: gl.tensor,
    soft_cap: gl.tensor,
    ring: gl.tuple,
    schedule: gl.tuple,
    q: gl.tensor,
    QUERY_STRIDE: gl.constexpr,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    DIM: gl.constexpr,
    BLOCK: gl.constexpr,
    SOFT_CAP: gl.constexpr,
    SINKS: gl.constexpr,
    HALF: gl.constexpr,
    STAGES: gl.constexpr,
    FIELDS: gl.constexpr,
) -> None:
    """Attend rows WHICH · HALF and on of each tile."""
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])  # 16 bytes a thread
    KEYS: gl.constexpr = 2 * BLOCK
    keys, values, keys_full, keys_empty, values_full, values_empty = ring
    factor = scale * 1.4426950408889634  # exp(scale · x) = exp2(factor · x)
    if SOFT_CAP:
        factor = soft_cap * 1.4426950408889634
    turn = 0
    count = 0
    number = _take(schedule, count)
    ahead = _load_queries(query, units, number, work, WHICH, QUERY_STRIDE, KV_HEADS, GROUP, DIM, HALF, FIELDS, WIDE)
    while number < work:
        q.store(ahead)
        hopper.fence_async_shared()
        barrier()
        unit = units + number // KV_HEADS * FIELDS
        head = number % KV_HEADS
        token = gl.load(unit + 1)
        packed = gl.load(unit + 2)
        before = gl.load(unit + 3)
        first_row = gl.load(unit + 4) + WHICH * HALF
        start = gl.load(unit + 5)
        end = gl.load(unit + 6)
        splits = gl.load(unit + 7)
        positions = before + (first_row + gl.arange(0, HALF, gl.SliceLayout(1, LOGITS))) // GROUP
        top = gl.full([HALF], float("-inf"), gl.float32, gl.SliceLayout(1, LOGITS))
        weight = gl.full([HALF], 0.0, gl.float32, gl.SliceLayout(1, LOGITS))
        summed = gl.zeros([HALF, DIM], gl.float32, SUMS)
        turns = gl.maximum(end - start, 1)
        first_key = (end - 1) * KEYS
        whole = (before + first_row // GROUP + 1) // KEYS  # turns whose keys every row sees
        masked = gl.minimum(gl.maximum(end - whole, 1), turns)

        stage = turn % STAGES
        hopper.mbarrier.wait(keys_full.index(stage), turn // STAGES % 2)
        near, far = _products(q, keys, stage, BLOCK, HALF, LOGITS)
        near, far = hopper.warpgroup_mma_wait(0, deps=[near, far])
        hopper.mbarrier.arrive(keys_empty.index(stage), count=1)
        near, far, _decay, top, weight = _softmax(
            near, far, top, weight, factor, scale, soft_cap, first_key, start * KEYS, positions, BLOCK, SOFT_CAP, True,
            LOGITS,
        )  # fmt: skip
        near = gl.convert_layout(near.to(query.dtype.element_ty), LEFT)
        far = gl.convert_layout(far.to(query.dtype.element_ty), LEFT)
        turn += 1
        for _ in range(1, masked):
            first_key -= KEYS
            summed, near, far, top, weight = _step(
                summed, near, far, top, weight, q, turn, factor, scale, soft_cap, first_key, start * KEYS, positions,
                ring, BLOCK, HALF, STAGES, SOFT_CAP, True, LOGITS, SUMS,
            )  # fmt: skip
            turn += 1
        for _ in range(masked, turns):
            summed, near, far, top, weight = _step(
                summed, near, far, top, weight, q, turn, factor, scale, soft_cap, first_key, start * KEYS, positions,
                ring, BLOCK, HALF, STAGES, SOFT_CAP, False, LOGITS, SUMS,
            )  # fmt: skip
            turn += 1
        stage = (turn - 1) % STAGES
        hopper.mbarrier.wait(values_full.index(stage), (turn - 1) // STAGES % 2)
        summed = hopper.warpgroup_mma(near, values.index(2 * stage), summed, is_async=True)
        summed = hopper.warpgroup_mma(far, values.index(2 * stage + 1), summed, is_async=True)
        count += 1
        number = _take(schedule, count)
        ahead = _load_queries(query, units, number, work, WHICH, QUERY_STRIDE, KV_HEADS, GROUP, DIM, HALF, FIELDS, WIDE)
        summed = hopper.warpgroup_mma_wait(0, deps=[summed])
        hopper.mbarrier.arrive(values_empty.index(stage), count=1)

        top = gl.convert_layout(top, gl.SliceLayout(1, SUMS))
        weight = gl.convert_layout(weight, gl.SliceLayout(1, SUMS))
        row = first_row + gl.arange(0, HALF, gl.SliceLayout(1, SUMS))
        is_last = splits == 1
        if splits > 1:
            part = gl.load(unit + 9)
            stride = gl.load(unit + 10)
            line = gl.load(unit + 8) + WHICH * HALF
            counter = arrivals + ((2 * gl.load(unit + 14) + WHICH) * KV_HEADS + head)
            lines = (line + part * stride + gl.arange(0, HALF, gl.SliceLayout(1, SUMS))).to(gl.int64) * KV_HEADS + head
            sums = partial + lines[:, None] * DIM + gl.arange(0, DIM, gl.SliceLayout(0, SUMS))[None, :]
            gl.store(sums, summed, mask=(row < packed)[:, None])
            gl.store(statistics + 2 * lines, top, mask=row < packed)
            gl.store(statistics + 2 * lines + 1, weight, mask=row < packed)
            barrier()  # every thread's share is written before one of them tells of it
            is_last = gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == splits - 1
            if is_last:
                gl.store(counter, 0)
                summed, top, weight = _merge(
                    partial, statistics, line, stride, splits, head, row < packed, KV_HEADS, DIM, HALF, SUMS
                )
        if is_last:
            if SINKS:
                # a logit beside those of the keys, with no value
                sink = gl.load(sinks + head * GROUP + row % GROUP, mask=row < packed, other=0.0).to(gl.float32)
                new_top = gl.maximum(top, sink * 1.4426950408889634)
                weight = weight * gl.exp2(top - new_top) + gl.exp2(sink * 1.4426950408889634 - new_top)
                summed *= gl.exp2(top - new_top)[:, None]
            result = gl.convert_layout((summed / weight[:, None]).to(output.dtype.element_ty), WIDE)
            wide_row = first_row + gl.arange(0, HALF, gl.SliceLayout(1, WIDE))
            target = (token + wide_row // GROUP).to(gl.int64) * (KV_HEADS * GROUP * DIM)
            target += (head * GROUP + wide_row % GROUP) * DIM
            columns = gl.arange(0, DIM, gl.SliceLayout(0, WIDE))
            gl.store(output + target[:, None] + columns[None, :], result, mask=(wide_row < packed)[:, None])


@gluon_jit
def _load_queries(
    query: gl.tensor,
    units: gl.tensor,
    number: gl.tensor,
    work: gl.tensor,
    WHICH: gl.constexpr,
    QUERY_STRIDE: gl.constexpr,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    DIM: gl.constexpr,
    HALF: gl.constexpr,
    FIELDS: gl.constexpr,
    WIDE: gl.constexpr,
) -> gl.tensor:
    """A consumer's rows of a unit, where there is one."""
    unit = units + gl.minimum(number, gl.maximum(work, 1) - 1) // KV_HEADS * FIELDS
    head = number % KV_HEADS
    token = gl.load(unit + 1)
    packed = gl.load(unit + 2)
    row = gl.load(unit + 4) + WHICH * HALF + gl.arange(0, HALF, gl.SliceLayout(1, WIDE))
    offset = (token + row // GROUP).to(gl.int64) * QUERY_STRIDE + (head * GROUP + row % GROUP) * DIM
    exists = (row < packed) & (number < work)
    columns = gl.arange(0, DIM, gl.SliceLayout(0, WIDE))
    return gl.load(query + offset[:, None] + columns[None, :], mask=exists[:, None], other=0.0)


@gluon_jit
def _step(
    summed: gl.tensor,
    near: gl.tensor,
    far: gl.tensor,
    top: gl.tensor,
    weight: gl.tensor,
    q: gl.tensor,
    turn: gl.tensor,
    factor: gl.tensor,
    scale: gl.tensor,
    soft_cap: gl.tensor,
    first_key: gl.tensor,
    key_start: gl.tensor,
    positions: gl.tensor,
    ring: gl.tuple,
    BLOCK: gl.constexpr,
    HALF: gl.constexpr,
    STAGES: gl.constexpr,
    SOFT_CAP: gl.constexpr,
    MASKED: gl.constexpr,
    LOGITS: gl.constexpr,
    SUMS: gl.constexpr,
) -> gl.tuple:
    """The logits of a turn, beside the values of the one before: its probabilities are `near` and `far`."""
    keys, values, keys_full, keys_empty, values_full, values_empty = ring
    stage = turn % STAGES
    previous = (turn - 1) % STAGES
    hopper.mbarrier.wait(keys_full.index(stage), turn // STAGES % 2)
    near_logits, far_logits = _products(q, keys, stage, BLOCK, HALF, LOGITS)
    hopper.mbarrier.wait(values_full.index(previous), (turn - 1) // STAGES % 2)
    summed = hopper.warpgroup_mma(near, values.index(2 * previous), summed, is_async=True)
    summed = hopper.warpgroup_mma(far, values.index(2 * previous + 1), summed, is_async=True)
    near_logits, far_logits = hopper.warpgroup_mma_wait(2, deps=[near_logits, far_logits])
    hopper.mbarrier.arrive(keys_empty.index(stage), count=1)
    near_p, far_p, decay, top, weight = _softmax(
        near_logits, far_logits, top, weight, factor, scale, soft_cap, first_key, key_start, positions, BLOCK, SOFT_CAP,
        MASKED, LOGITS,
    )  # fmt: skip
    summed, near, far = hopper.warpgroup_mma_wait(0, deps=[summed, near, far])
    hopper.mbarrier.arrive(values_empty.index(previous), count=1)
    summed = summed * gl.convert_layout(decay, gl.SliceLayout(1, SUMS))[:, None]
    near = gl.convert_layout(near_p.to(near.dtype), gl.DotOperandLayout(0, SUMS, 2))
    far = gl.convert_layout(far_p.to(far.dtype), gl.DotOperandLayout(0, SUMS, 2))
    return summed, near, far, top, weight


@gluon_jit
def _products(
    q: gl.tensor, keys: gl.tensor, stage: gl.tensor, BLOCK: gl.constexpr, HALF: gl.constexpr, LOGITS: gl.constexpr
) -> gl.tuple:
    zeros = gl.zeros([HALF, BLOCK], gl.float32, LOGITS)
    near = hopper.warpgroup_mma(q, keys.index(2 * stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
    far = hopper.warpgroup_mma(q, keys.index(2 * stage + 1).permute((1, 0)), zeros, use_acc=False, is_async=True)
    return near, far


@gluon_jit
def _softmax(
    near: gl.tensor,
    far: gl.tensor,
    top: gl.tensor,
    weight: gl.tensor,
    factor: gl.tensor,
    scale: gl.tensor,
    soft_cap: gl.tensor,
    first_key: gl.tensor,
    key_start: gl.tensor,
    positions: gl.tensor,
    BLOCK: gl.constexpr,
    SOFT_CAP: gl.constexpr,
    MASKED: gl.constexpr,
    LOGITS: gl.constexpr,
) -> gl.tuple:
    """Of a turn's logits: both halves of the probabilities, the factor of what was summed before, and what is known of
    the rows. Not MASKED: every row sees all of the keys."""
    if SOFT_CAP:
        near = 2.0 / (1.0 + gl.exp2(near * (-2.8853900817779268 * scale / soft_cap))) - 1.0  # tanh
        far = 2.0 / (1.0 + gl.exp2(far * (-2.8853900817779268 * scale / soft_cap))) - 1.0
    if MASKED:
        key = first_key + gl.arange(0, BLOCK, gl.SliceLayout(0, LOGITS))
        near = gl.where((key[None, :] <= positions[:, None]) & (key >= key_start)[None, :], near, float("-inf"))
        key += BLOCK
        far = gl.where((key[None, :] <= positions[:, None]) & (key >= key_start)[None, :], far, float("-inf"))
    new_top = gl.maximum(top, gl.max(gl.maximum(near, far), axis=1) * factor)
    shift = new_top
    if MASKED:
        shift = gl.where(new_top == float("-inf"), 0.0, new_top)  # a row that has seen no key yet
    near = gl.exp2(near * factor - shift[:, None])
    far = gl.exp2(far * factor - shift[:, None])
    decay = gl.exp2(top - shift)
    weight = weight * decay + gl.sum(near + far, axis=1)
    return near, far, decay, new_top, weight


@gluon_jit
def _merge(
    partial: gl.tensor,
    statistics: gl.tensor,
    line: gl.tensor,
    stride: gl.tensor,
    splits: gl.tensor,
    head: gl.tensor,
    row_exists: gl.tensor,
    KV_HEADS: gl.constexpr,
    DIM: gl.constexpr,
    HALF: gl.constexpr,
    SUMS: gl.constexpr,
) -> gl.tuple:
    """Put the parts of half a tile together."""
    columns = gl.arange(0, DIM, gl.SliceLayout(0, SUMS))
    top = gl.full([HALF], float("-inf"), gl.float32, gl.SliceLayout(1, SUMS))
    weight = gl.full([HALF], 0.0, gl.float32, gl.SliceLayout(1, SUMS))
    summed = gl.zeros([HALF, DIM], gl.float32, SUMS)
    for part in range(0, splits):
        lines = (line + part * stride + gl.arange(0, HALF, gl.SliceLayout(1, SUMS))).to(gl.int64) * KV_HEADS + head
        # past the first-level cache, where another launch may have left older values
        part_top = gl.load(statistics + 2 * lines, mask=row_exists, other=float("-inf"), cache_modifier=".cg")
        part_weight = gl.load(statistics + 2 * lines + 1, mask=row_exists, other=0.0, cache_modifier=".cg")
        sums = partial + lines[:, None] * DIM + columns[None, :]
        part_sums = gl.load(sums, mask=row_exists[:, None], other=0.0, cache_modifier=".cg")
        new_top = gl.maximum(top, part_top)
        shift = gl.where(new_top == float("-inf"), 0.0, new_top)
        decay = gl.exp2(top - shift)
        part_factor = gl.exp2(part_top - shift)
        weight = weight * decay + part_weight * part_factor
        summed = summed * decay[:, None] + part_sums * part_factor[:, None]
        top = new_top
    return summed, top, weight


def specialized_attention(
    output: torch.Tensor,
    query: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    plan: AttentionPlan,
    *,
    scale: float,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
    overlap: bool,
) -> None:
    """Attend the plan's large tiles, as `paged_attention` has it."""
    shape = plan.shape
    _, blocks, kv_heads, block_size, dim = cache.shape
    layout = gl.NVMMASharedLayout(128, 16, 2)
    _specialized_attention_kernel[(min(plan.large.programs, plan.units(plan.large, query.shape[0]) * kv_heads),)](
        output,
        query,
        GluonDescriptor.from_tensor(cache.view(-1, dim), [block_size, dim], layout),
        block_table,
        plan.large_units,
        plan.totals[1:],
        plan.progress,
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
        BLOCK=block_size,
        SOFT_CAP=soft_cap is not None,
        SINKS=sinks is not None,
        HALF=_HALF,
        STAGES=_STAGES,
        FIELDS=FIELDS,
        CONSUMERS=_CONSUMERS,
        PRODUCER=_PRODUCER,
        CARVE_OUT=SHARED_FIRST,
        num_warps=4,
        **overlap_options(query.device, overlap),
    )
