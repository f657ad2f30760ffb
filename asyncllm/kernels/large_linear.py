"""y = x Wᵀ for many rows of x on a Hopper GPU, with the activation of a gate, or the sum with a residual, in it.

So much is computed that the GPU lowers its clock to stay within its power: what counts is how little is moved for what
is multiplied. So a tile is as large as the registers of a multiprocessor hold sums of it: two or three groups of four
warps multiply 64 rows of x each with the same 256 lines of W. No warps are kept from that to have memory copied: the
last group does both. Each group waits for its product and gives the stage of the ring back at once, while the others'
products have the matrix units. What a gate's activation or a sum takes is done by the group that has its tile first,
likewise.

The grid has a program per multiprocessor. Programs that run at the same time have tiles beside each other, so that
what one reads is in the second-level cache for others.

It is written in Gluon, Triton's lower language, which has no interpreter. There is no such kernel for other GPUs: their
libraries multiply many rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from asyncllm.kernels.activation import Activation, gate_up_product
from asyncllm.kernels.language import (
    GluonDescriptor,
    await_previous,
    barrier,
    ceil_div,
    gl,
    gluon_jit,
    hopper,
    launch_next,
    load_block,
    overlap_options,
    store_block,
)
from asyncllm.kernels.specialized_linear import can_specialize

_ROWS = 64
"""Of x, of a group: as many as one instruction of the matrix units has."""

_LINES = 256
"""Of W, of a tile: as many as one instruction of the matrix units has at most."""

_WRITTEN = 128
"""Columns of the output that a group writes at once."""

_WIDTH = 64
"""Columns of x and W in a stage: 128 bytes of each row."""

_STAGES = {2: 4, 3: 3}
_SPAN = {2: 16, 3: 11}
_REGISTERS = {2: 240, 3: 168}
"""By groups: stages of the ring, tiles of rows that are beside each other, and registers of a thread."""


@dataclass(frozen=True, slots=True)
class LargeTiling:
    """A program takes 64 rows for each of its `groups`, two or three."""

    groups: int


@gluon_jit
def _large_kernel(
    output_descriptor: gl.tensor,
    weight_descriptor: gl.tensor,
    x_descriptor: gl.tensor,
    HALVES: gl.constexpr,
    ADD: gl.constexpr,
    GELU: gl.constexpr,
    GROUPS: gl.constexpr,
    ROWS: gl.constexpr,
    LINES: gl.constexpr,
    WRITTEN: gl.constexpr,
    WIDTH: gl.constexpr,
    STAGES: gl.constexpr,
    SPAN: gl.constexpr,
    REGISTERS: gl.constexpr,
    OVERLAP: gl.constexpr,
) -> None:
    dtype: gl.constexpr = x_descriptor.block_type.element_ty
    BARRIER: gl.constexpr = hopper.mbarrier.MBarrierLayout()
    # the ring: filled by the last group, emptied by all
    weights = gl.allocate_shared_memory(dtype, [STAGES, LINES, WIDTH], weight_descriptor.layout)
    xs = gl.allocate_shared_memory(dtype, [STAGES * GROUPS, ROWS, WIDTH], x_descriptor.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for i in gl.static_range(STAGES):
        hopper.mbarrier.init(full.index(i), count=1)
        hopper.mbarrier.init(empty.index(i), count=GROUPS)
    # what goes out, and what was there, for each group
    results = gl.allocate_shared_memory(dtype, [GROUPS, ROWS, WRITTEN], output_descriptor.layout)
    there = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], BARRIER)
    for i in gl.static_range(GROUPS):
        hopper.mbarrier.init(there.index(i), count=1)
    hopper.fence_async_shared()
    ring = (weights, xs, full, empty)
    row_tiles = (x_descriptor.shape[0] + ROWS * GROUPS - 1) // (ROWS * GROUPS)
    line_tiles = (output_descriptor.shape[1] * HALVES + LINES - 1) // LINES
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (
                    _multiply,
                    (
                        0, output_descriptor, weight_descriptor, x_descriptor, ring, results, there, row_tiles,
                        line_tiles, HALVES, ADD, GELU, GROUPS, ROWS, LINES, WRITTEN, WIDTH, STAGES, SPAN, OVERLAP,
                    ),
                ),
                (
                    _multiply,
                    (
                        1, output_descriptor, weight_descriptor, x_descriptor, ring, results, there, row_tiles,
                        line_tiles, HALVES, ADD, GELU, GROUPS, ROWS, LINES, WRITTEN, WIDTH, STAGES, SPAN, OVERLAP,
                    ),
                ),
            ],
            [4],
            [REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (
                    _multiply,
                    (
                        0, output_descriptor, weight_descriptor, x_descriptor, ring, results, there, row_tiles,
                        line_tiles, HALVES, ADD, GELU, GROUPS, ROWS, LINES, WRITTEN, WIDTH, STAGES, SPAN, OVERLAP,
                    ),
                ),
                (
                    _multiply,
                    (
                        1, output_descriptor, weight_descriptor, x_descriptor, ring, results, there, row_tiles,
                        line_tiles, HALVES, ADD, GELU, GROUPS, ROWS, LINES, WRITTEN, WIDTH, STAGES, SPAN, OVERLAP,
                    ),
                ),
                (
                    _multiply,
                    (
                        2, output_descriptor, weight_descriptor, x_descriptor, ring, results, there, row_tiles,
                        line_tiles, HALVES, ADD, GELU, GROUPS, ROWS, LINES, WRITTEN, WIDTH, STAGES, SPAN, OVERLAP,
                    ),
                ),
            ],
            [4, 4],
            [REGISTERS, REGISTERS],
        )  # fmt: skip


@gluon_jit
def _multiply(
    WHICH: gl.constexpr,
    output_descriptor: gl.tensor,
    weight_descriptor: gl.tensor,
    x_descriptor: gl.tensor,
    ring: gl.tuple,
    results: gl.tensor,
    there: gl.tensor,
    row_tiles: gl.tensor,
    line_tiles: gl.tensor,
    HALVES: gl.constexpr,
    ADD: gl.constexpr,
    GELU: gl.constexpr,
    GROUPS: gl.constexpr,
    ROWS: gl.constexpr,
    LINES: gl.constexpr,
    WRITTEN: gl.constexpr,
    WIDTH: gl.constexpr,
    STAGES: gl.constexpr,
    SPAN: gl.constexpr,
    OVERLAP: gl.constexpr,
) -> None:
    """A group's rows of every tile."""
    weights, xs, full, empty = ring
    result, arrived = results.index(WHICH), there.index(WHICH)
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, LINES, 16])
    LOADS: gl.constexpr = WHICH == GROUPS - 1
    steps = (x_descriptor.shape[1] + WIDTH - 1) // WIDTH
    outputs = output_descriptor.shape[1]
    tiles = row_tiles * line_tiles
    stage = 0
    parity = 0
    added = 0  # pieces of the output that had something added
    # what is loaded next
    tile_ahead = gl.program_id(0)
    row_tile_ahead, line_tile_ahead = _place(tile_ahead, row_tiles, line_tiles, SPAN)
    step_ahead = 0
    if LOADS:
        await_previous(OVERLAP)
        launch_next(OVERLAP)
        for i in gl.static_range(STAGES):
            if tile_ahead < tiles:
                _load(
                    weight_descriptor, x_descriptor, ring, i, row_tile_ahead, line_tile_ahead, step_ahead, outputs,
                    HALVES, GROUPS, ROWS, LINES, WIDTH,
                )  # fmt: skip
                tile_ahead, row_tile_ahead, line_tile_ahead, step_ahead = _next(
                    tile_ahead, row_tile_ahead, line_tile_ahead, step_ahead, steps, row_tiles, line_tiles, SPAN
                )
    elif ADD:
        await_previous(OVERLAP)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row_tile, line_tile = _place(tile, row_tiles, line_tiles, SPAN)
        row = (row_tile * GROUPS + WHICH) * ROWS
        column = line_tile * (LINES // HALVES)
        sums = gl.zeros([ROWS, LINES], gl.float32, SUMS)
        for step in range(0, steps):
            hopper.mbarrier.wait(full.index(stage), parity)
            x = xs.index(stage * GROUPS + WHICH)
            sums = hopper.warpgroup_mma(x, weights.index(stage).permute((1, 0)), sums, use_acc=step > 0, is_async=True)
            if ADD:  # noqa: SIM102  # no code where it is not
                if step == 0:
                    _fetch(output_descriptor, result, arrived, row, column, ROWS, WRITTEN)
            # at once: the other groups' products have the matrix units
            sums = hopper.warpgroup_mma_wait(0, deps=[sums])
            hopper.mbarrier.arrive(empty.index(stage), count=1)
            if LOADS:  # noqa: SIM102  # likewise
                if tile_ahead < tiles:
                    hopper.mbarrier.wait(empty.index(stage), parity)
                    _load(
                        weight_descriptor, x_descriptor, ring, stage, row_tile_ahead, line_tile_ahead, step_ahead,
                        outputs, HALVES, GROUPS, ROWS, LINES, WIDTH,
                    )  # fmt: skip
                    tile_ahead, row_tile_ahead, line_tile_ahead, step_ahead = _next(
                        tile_ahead, row_tile_ahead, line_tile_ahead, step_ahead, steps, row_tiles, line_tiles, SPAN
                    )
            stage += 1
            if stage == STAGES:
                stage = 0
                parity ^= 1
        left, right = gl.split(gl.permute(gl.reshape(sums, [ROWS, 2, LINES // 2]), [0, 2, 1]))
        if HALVES == 2:
            _put_out(output_descriptor, result, arrived, gate_up_product(left, right, GELU), row, column, added, ADD)
        else:
            _put_out(output_descriptor, result, arrived, left, row, column, added, ADD)
            if ADD:
                _fetch(output_descriptor, result, arrived, row, column + WRITTEN, ROWS, WRITTEN)
            _put_out(output_descriptor, result, arrived, right, row, column + WRITTEN, added + 1, ADD)
        added += 2
    hopper.tma.store_wait(0)


@gluon_jit
def _place(tile: gl.tensor, row_tiles: gl.tensor, line_tiles: gl.tensor, SPAN: gl.constexpr) -> gl.tuple:
    """Which rows and which lines a tile has: SPAN tiles of rows of some lines, then of the next lines."""
    band = tile // (SPAN * line_tiles) * SPAN
    span = gl.minimum(SPAN, row_tiles - band)
    inside = tile % (SPAN * line_tiles)
    return band + inside % span, inside // span


@gluon_jit
def _load(
    weight_descriptor: gl.tensor,
    x_descriptor: gl.tensor,
    ring: gl.tuple,
    stage: gl.tensor,
    row_tile: gl.tensor,
    line_tile: gl.tensor,
    step: gl.tensor,
    outputs: gl.tensor,
    HALVES: gl.constexpr,
    GROUPS: gl.constexpr,
    ROWS: gl.constexpr,
    LINES: gl.constexpr,
    WIDTH: gl.constexpr,
) -> None:
    """Fill a stage with a step of a tile. With two halves, half of the lines are the gate's, and half are of what it
    gates."""
    weights, xs, full, _empty = ring
    arrived = full.index(stage)
    hopper.mbarrier.expect(arrived, (LINES + ROWS * GROUPS) * WIDTH * xs.dtype.primitive_bitwidth // 8)
    for group in gl.static_range(GROUPS):
        row = (row_tile * GROUPS + group) * ROWS
        load_block(x_descriptor, [row, step * WIDTH], arrived, xs.index(stage * GROUPS + group))
    for half in gl.static_range(HALVES):
        line = line_tile * (LINES // HALVES) + half * outputs
        lines = weights.index(stage).slice(half * (LINES // HALVES), LINES // HALVES)
        load_block(weight_descriptor, [line, step * WIDTH], arrived, lines)


@gluon_jit
def _next(
    tile: gl.tensor,
    row_tile: gl.tensor,
    line_tile: gl.tensor,
    step: gl.tensor,
    steps: gl.tensor,
    row_tiles: gl.tensor,
    line_tiles: gl.tensor,
    SPAN: gl.constexpr,
) -> gl.tuple:
    """The step that follows, of the same tile or of the program's next one."""
    step += 1
    if step == steps:
        step = 0
        tile += gl.num_programs(0)
        row_tile, line_tile = _place(tile, row_tiles, line_tiles, SPAN)
    return tile, row_tile, line_tile, step


@gluon_jit
def _fetch(
    descriptor: gl.tensor,
    result: gl.tensor,
    there: gl.tensor,
    row: gl.tensor,
    column: gl.tensor,
    ROWS: gl.constexpr,
    WRITTEN: gl.constexpr,
) -> None:
    """Have what is there copied to where the next piece of output will be, when the one before is on its way."""
    hopper.tma.store_wait(0)
    barrier()
    hopper.mbarrier.expect(there, ROWS * WRITTEN * result.dtype.primitive_bitwidth // 8)
    load_block(descriptor, [row, column], there, result)


@gluon_jit
def _put_out(
    descriptor: gl.tensor,
    result: gl.tensor,
    there: gl.tensor,
    values: gl.tensor,
    row: gl.tensor,
    column: gl.tensor,
    added: gl.tensor,
    ADD: gl.constexpr,
) -> None:
    if ADD:
        hopper.mbarrier.wait(there, added & 1)
        values += result.load(values.type.layout).to(gl.float32)
    else:
        hopper.tma.store_wait(0)
    barrier()
    result.store(values.to(result.dtype))
    hopper.fence_async_shared()
    barrier()
    store_block(descriptor, [row, column], result)


def large_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    tiling: LargeTiling,
    activation: Activation | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [n, inputs], last dimension dense, times dense weight [outputs, inputs] transposed.

    Only for what `can_multiply` says. Sums are float32, and so is what lies between the product and what is done with
    it: with `activation`, which is f, weight is [2 · outputs, inputs] with the gate first, and the result f(gate) · up;
    to `residual` [n, outputs], dense, the result is added in place; not both. Returns [n, outputs], of x's type:
    `residual` or a new tensor. Its reference is `skinny_linear_reference`.
    """
    if activation is not None and residual is not None:
        raise ValueError("large_linear adds no gated product to a residual")
    rows, inputs = x.shape
    halves, groups = 1 if activation is None else 2, tiling.groups
    outputs = len(weight) // halves
    output = torch.empty((rows, outputs), dtype=x.dtype, device=x.device) if residual is None else residual
    if not rows:
        return output
    layout = gl.NVMMASharedLayout(128, 16, 2)
    tiles = ceil_div(rows, _ROWS * groups) * ceil_div(outputs * halves, _LINES)
    _large_kernel[(min(tiles, _multiprocessors(x.device)),)](
        GluonDescriptor.from_tensor(output, [_ROWS, _WRITTEN], layout),
        GluonDescriptor.from_tensor(weight, [_LINES // halves, _WIDTH], layout),
        GluonDescriptor(x, [rows, inputs], [x.stride(0), 1], [_ROWS, _WIDTH], layout),
        HALVES=halves,
        ADD=residual is not None,
        GELU=activation is Activation.GELU_TANH,
        GROUPS=groups,
        ROWS=_ROWS,
        LINES=_LINES,
        WRITTEN=_WRITTEN,
        WIDTH=_WIDTH,
        STAGES=_STAGES[groups],
        SPAN=_SPAN[groups],
        REGISTERS=_REGISTERS[groups],
        num_warps=4,
        **overlap_options(x.device),
    )
    return output


def can_multiply(x: torch.Tensor, outputs: int) -> bool:
    """Whether `large_linear` takes x: by where it is, its type, and as tensor copies want it and the output."""
    return can_specialize(x) and outputs % 8 == 0


@cache
def _multiprocessors(device: torch.device) -> int:
    # "meta" stands for the GPU there is: what is launched on it is only compiled
    return 1 if device.type != "cuda" else torch.cuda.get_device_properties(device).multi_processor_count
