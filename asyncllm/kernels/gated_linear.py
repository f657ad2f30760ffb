"""f(x Wg) · (x Wu) for many rows of x on a Hopper GPU: both products and the activation in one kernel.

So much is computed that the GPU lowers its clock to stay within its power: what counts is how little is moved for what
is multiplied. So a tile is as large as the registers of a multiprocessor hold sums of it: two or three groups of four
warps multiply 64 rows of x each with the same 128 lines of Wg and of Wu. A group waits for each product and gives its
stage of the ring back at once: meanwhile the other groups' products have the matrix units, as they have while it
computes the activation.

Beside two groups a warp of its own, the producer, has memory copied to the ring. Three leave no registers for that, and
the last of them does it too. The grid has a program per multiprocessor. Programs that run at the same time have tiles
beside each other, so that what one reads is in the second-level cache for others.

It is written in Gluon, Triton's lower language, which has no interpreter. There is no such kernel for other GPUs: their
libraries multiply many rows, and `activation` does the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from asyncllm.kernels.activation import Activation
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
    tl,
)
from asyncllm.kernels.specialized_linear import can_specialize

_ROWS = 64
"""Of x, of a group: as many as one instruction of the matrix units has."""

_COLUMNS = 128
"""Of the output, of a tile. The instruction has as many lines of Wg and of Wu together as it can have."""

_WIDTH = 64
"""Columns of x and of the weights in a stage: 128 bytes of each line."""

_STAGES = {2: 4, 3: 3}
_SPAN = {2: 16, 3: 11}
_REGISTERS = {2: 240, 3: 168}
_PRODUCER = 24
"""By groups: stages of the ring, tiles of rows that are beside each other, and registers of a thread; a producer's."""


@dataclass(frozen=True, slots=True)
class GatedTiling:
    """A program takes 64 rows for each of its `groups`, two or three."""

    groups: int


@gluon_jit
def _gated_product_kernel(
    output_descriptor: gl.tensor,
    weight_descriptor: gl.tensor,
    x_descriptor: gl.tensor,
    GELU: gl.constexpr,
    GROUPS: gl.constexpr,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    WIDTH: gl.constexpr,
    STAGES: gl.constexpr,
    SPAN: gl.constexpr,
    REGISTERS: gl.constexpr,
    PRODUCER: gl.constexpr,
    OVERLAP: gl.constexpr,
) -> None:
    dtype: gl.constexpr = x_descriptor.block_type.element_ty
    BARRIER: gl.constexpr = hopper.mbarrier.MBarrierLayout()
    # the ring: emptied by all groups
    weights = gl.allocate_shared_memory(dtype, [STAGES, 2 * COLUMNS, WIDTH], weight_descriptor.layout)
    xs = gl.allocate_shared_memory(dtype, [STAGES * GROUPS, ROWS, WIDTH], x_descriptor.layout)
    results = gl.allocate_shared_memory(dtype, [GROUPS, ROWS, COLUMNS], output_descriptor.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for i in gl.static_range(STAGES):
        hopper.mbarrier.init(full.index(i), count=1)
        hopper.mbarrier.init(empty.index(i), count=GROUPS)
    hopper.fence_async_shared()
    ring = (weights, xs, full, empty)
    row_tiles = (x_descriptor.shape[0] + ROWS * GROUPS - 1) // (ROWS * GROUPS)
    column_tiles = (output_descriptor.shape[1] + COLUMNS - 1) // COLUMNS
    # the arguments stand in each place: constants of a tuple that has a name are none any more
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (
                    _multiply,
                    (
                        0, False, output_descriptor, weight_descriptor, x_descriptor, ring, results.index(0), row_tiles,
                        column_tiles, GELU, GROUPS, ROWS, COLUMNS, WIDTH, STAGES, SPAN, OVERLAP,
                    ),
                ),
                (
                    _multiply,
                    (
                        1, False, output_descriptor, weight_descriptor, x_descriptor, ring, results.index(1), row_tiles,
                        column_tiles, GELU, GROUPS, ROWS, COLUMNS, WIDTH, STAGES, SPAN, OVERLAP,
                    ),
                ),
                (
                    _produce,
                    (
                        output_descriptor, weight_descriptor, x_descriptor, ring, row_tiles, column_tiles, GROUPS, ROWS,
                        COLUMNS, WIDTH, STAGES, SPAN, OVERLAP,
                    ),
                ),
            ],
            [4, 1],
            [REGISTERS, PRODUCER],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (
                    _multiply,
                    (
                        0, False, output_descriptor, weight_descriptor, x_descriptor, ring, results.index(0), row_tiles,
                        column_tiles, GELU, GROUPS, ROWS, COLUMNS, WIDTH, STAGES, SPAN, OVERLAP,
                    ),
                ),
                (
                    _multiply,
                    (
                        1, False, output_descriptor, weight_descriptor, x_descriptor, ring, results.index(1), row_tiles,
                        column_tiles, GELU, GROUPS, ROWS, COLUMNS, WIDTH, STAGES, SPAN, OVERLAP,
                    ),
                ),
                (
                    _multiply,
                    (
                        2, True, output_descriptor, weight_descriptor, x_descriptor, ring, results.index(2), row_tiles,
                        column_tiles, GELU, GROUPS, ROWS, COLUMNS, WIDTH, STAGES, SPAN, OVERLAP,
                    ),
                ),
            ],
            [4, 4],
            [REGISTERS, REGISTERS],
        )  # fmt: skip


@gluon_jit
def _produce(
    output_descriptor: gl.tensor,
    weight_descriptor: gl.tensor,
    x_descriptor: gl.tensor,
    ring: gl.tuple,
    row_tiles: gl.tensor,
    column_tiles: gl.tensor,
    GROUPS: gl.constexpr,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    WIDTH: gl.constexpr,
    STAGES: gl.constexpr,
    SPAN: gl.constexpr,
    OVERLAP: gl.constexpr,
) -> None:
    """Fill the ring, tile after tile."""
    _weights, _xs, _full, empty = ring
    steps = (x_descriptor.shape[1] + WIDTH - 1) // WIDTH
    outputs = output_descriptor.shape[1]
    stage = 0
    parity = 1
    await_previous(OVERLAP)
    launch_next(OVERLAP)
    for tile in range(gl.program_id(0), row_tiles * column_tiles, gl.num_programs(0)):
        row_tile, column_tile = _place(tile, row_tiles, column_tiles, SPAN)
        for step in range(0, steps):
            hopper.mbarrier.wait(empty.index(stage), parity)
            _load(
                weight_descriptor, x_descriptor, ring, stage, row_tile, column_tile, step, outputs, GROUPS, ROWS,
                COLUMNS, WIDTH,
            )  # fmt: skip
            stage += 1
            if stage == STAGES:
                stage = 0
                parity ^= 1


@gluon_jit
def _multiply(
    WHICH: gl.constexpr,
    LOADS: gl.constexpr,
    output_descriptor: gl.tensor,
    weight_descriptor: gl.tensor,
    x_descriptor: gl.tensor,
    ring: gl.tuple,
    result: gl.tensor,
    row_tiles: gl.tensor,
    column_tiles: gl.tensor,
    GELU: gl.constexpr,
    GROUPS: gl.constexpr,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    WIDTH: gl.constexpr,
    STAGES: gl.constexpr,
    SPAN: gl.constexpr,
    OVERLAP: gl.constexpr,
) -> None:
    """A group's rows of every tile; if it LOADS, it fills the ring too."""
    weights, xs, full, empty = ring
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * COLUMNS, 16])
    steps = (x_descriptor.shape[1] + WIDTH - 1) // WIDTH
    outputs = output_descriptor.shape[1]
    tiles = row_tiles * column_tiles
    stage = 0
    parity = 0
    # what is loaded next
    tile_ahead = gl.program_id(0)
    row_tile_ahead, column_tile_ahead = _place(tile_ahead, row_tiles, column_tiles, SPAN)
    step_ahead = 0
    if LOADS:
        await_previous(OVERLAP)
        launch_next(OVERLAP)
        for i in gl.static_range(STAGES):
            if tile_ahead < tiles:
                _load(
                    weight_descriptor, x_descriptor, ring, i, row_tile_ahead, column_tile_ahead, step_ahead, outputs,
                    GROUPS, ROWS, COLUMNS, WIDTH,
                )  # fmt: skip
                tile_ahead, row_tile_ahead, column_tile_ahead, step_ahead = _next(
                    tile_ahead, row_tile_ahead, column_tile_ahead, step_ahead, steps, row_tiles, column_tiles, SPAN
                )
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        sums = gl.zeros([ROWS, 2 * COLUMNS], gl.float32, SUMS)
        for step in range(0, steps):
            hopper.mbarrier.wait(full.index(stage), parity)
            x = xs.index(stage * GROUPS + WHICH)
            sums = hopper.warpgroup_mma(x, weights.index(stage).permute((1, 0)), sums, use_acc=step > 0, is_async=True)
            # at once: the other groups' products have the matrix units
            sums = hopper.warpgroup_mma_wait(0, deps=[sums])
            hopper.mbarrier.arrive(empty.index(stage), count=1)
            if LOADS:  # noqa: SIM102  # no code where it does not
                if tile_ahead < tiles:
                    hopper.mbarrier.wait(empty.index(stage), parity)
                    _load(
                        weight_descriptor, x_descriptor, ring, stage, row_tile_ahead, column_tile_ahead, step_ahead,
                        outputs, GROUPS, ROWS, COLUMNS, WIDTH,
                    )  # fmt: skip
                    tile_ahead, row_tile_ahead, column_tile_ahead, step_ahead = _next(
                        tile_ahead, row_tile_ahead, column_tile_ahead, step_ahead, steps, row_tiles, column_tiles, SPAN
                    )
            stage += 1
            if stage == STAGES:
                stage = 0
                parity ^= 1
        gate, up = gl.split(gl.permute(gl.reshape(sums, [ROWS, 2, COLUMNS]), [0, 2, 1]))
        product = _activated(gate, up, GELU).to(result.dtype)
        row_tile, column_tile = _place(tile, row_tiles, column_tiles, SPAN)
        hopper.tma.store_wait(0)  # the one of the tile before
        barrier()
        result.store(product)
        hopper.fence_async_shared()
        barrier()
        store_block(output_descriptor, [(row_tile * GROUPS + WHICH) * ROWS, column_tile * COLUMNS], result)
    hopper.tma.store_wait(0)


@gluon_jit
def _place(tile: gl.tensor, row_tiles: gl.tensor, column_tiles: gl.tensor, SPAN: gl.constexpr) -> gl.tuple:
    """Which rows and which columns a tile has: SPAN tiles of rows of some columns, then of the next columns."""
    band = tile // (SPAN * column_tiles) * SPAN
    span = gl.minimum(SPAN, row_tiles - band)
    inside = tile % (SPAN * column_tiles)
    return band + inside % span, inside // span


@gluon_jit
def _next(
    tile: gl.tensor,
    row_tile: gl.tensor,
    column_tile: gl.tensor,
    step: gl.tensor,
    steps: gl.tensor,
    row_tiles: gl.tensor,
    column_tiles: gl.tensor,
    SPAN: gl.constexpr,
) -> gl.tuple:
    """The step that follows, of the same tile or of the program's next one."""
    step += 1
    if step == steps:
        step = 0
        tile += gl.num_programs(0)
        row_tile, column_tile = _place(tile, row_tiles, column_tiles, SPAN)
    return tile, row_tile, column_tile, step


@gluon_jit
def _load(
    weight_descriptor: gl.tensor,
    x_descriptor: gl.tensor,
    ring: gl.tuple,
    stage: gl.tensor,
    row_tile: gl.tensor,
    column_tile: gl.tensor,
    step: gl.tensor,
    outputs: gl.tensor,
    GROUPS: gl.constexpr,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    WIDTH: gl.constexpr,
) -> None:
    """Fill a stage with a step of a tile: each group's rows of x, and lines of Wg above those of Wu."""
    weights, xs, full, _empty = ring
    arrived = full.index(stage)
    hopper.mbarrier.expect(arrived, (2 * COLUMNS + ROWS * GROUPS) * WIDTH * xs.dtype.primitive_bitwidth // 8)
    for group in gl.static_range(GROUPS):
        row = (row_tile * GROUPS + group) * ROWS
        load_block(x_descriptor, [row, step * WIDTH], arrived, xs.index(stage * GROUPS + group))
    for half in gl.static_range(2):
        lines = weights.index(stage).slice(half * COLUMNS, COLUMNS)
        load_block(weight_descriptor, [half * outputs + column_tile * COLUMNS, step * WIDTH], arrived, lines)


@gluon_jit
def _activated(gate: gl.tensor, up: gl.tensor, GELU: gl.constexpr) -> gl.tensor:
    """As `gate_up_product`; two numbers share a reciprocal, since those are what takes longest."""
    exponent = -1.4426950408889634 * gate  # exp(-x) = exp2(-x log2(e))
    if GELU:
        # (1 + tanh(z)) / 2 = sigmoid(2 z), z = sqrt(2 / pi) (x + 0.044715 x³)
        exponent *= 1.5957691216057308 * (1.0 + 0.044715 * gate * gate)
    # The product of two must be finite. A gate beyond that has a sigmoid of 2⁻⁶⁰, and is held so that this makes
    # nothing of it; what is no number stays so.
    below = 1.0 + gl.exp2(gl.minimum(exponent, 60.0))
    gate = gl.maximum(gate, -1048576.0, propagate_nan=tl.PropagateNan.ALL)
    first, second = gl.split(gl.reshape(below, [below.shape[0], below.shape[1] // 2, 2]))
    inverse = _reciprocal(first * second)
    sigmoid = gl.reshape(gl.join(inverse * second, inverse * first), below.shape)
    return gate * up * gl.convert_layout(sigmoid, gate.type.layout, assert_trivial=True)


@gluon_jit
def _reciprocal(x: gl.tensor) -> gl.tensor:
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


def gated_linear(x: torch.Tensor, weight: torch.Tensor, activation: Activation, *, tiling: GatedTiling) -> torch.Tensor:
    """f(x Wg) · (x Wu) [n, outputs], a new tensor, for x [n, inputs], last dimension dense, and dense weight
    [2 · outputs, inputs] with Wg's lines first; `activation` is f.

    Only for what `can_multiply` says. Sums are float32, and so is what lies between them and the result. Its reference
    is `skinny_linear_reference`.
    """
    rows, inputs = x.shape
    outputs, groups = len(weight) // 2, tiling.groups
    output = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    if not rows:
        return output
    layout = gl.NVMMASharedLayout(128, 16, 2)
    tiles = ceil_div(rows, _ROWS * groups) * ceil_div(outputs, _COLUMNS)
    _gated_product_kernel[(min(tiles, _multiprocessors(x.device)),)](
        GluonDescriptor.from_tensor(output, [_ROWS, _COLUMNS], layout),
        GluonDescriptor.from_tensor(weight, [_COLUMNS, _WIDTH], layout),
        GluonDescriptor(x, [rows, inputs], [x.stride(0), 1], [_ROWS, _WIDTH], layout),
        GELU=activation is Activation.GELU_TANH,
        GROUPS=groups,
        ROWS=_ROWS,
        COLUMNS=_COLUMNS,
        WIDTH=_WIDTH,
        STAGES=_STAGES[groups],
        SPAN=_SPAN[groups],
        REGISTERS=_REGISTERS[groups],
        PRODUCER=_PRODUCER,
        num_warps=4,
        **overlap_options(x.device),
    )
    return output


def can_multiply(x: torch.Tensor, outputs: int) -> bool:
    """Whether `gated_linear` takes x: by where it is, its type, and as tensor copies want it and the output."""
    return can_specialize(x) and outputs % 8 == 0


@cache
def _multiprocessors(device: torch.device) -> int:
    # "meta" stands for the GPU there is: what is launched on it is only compiled
    return 1 if device.type != "cuda" else torch.cuda.get_device_properties(device).multi_processor_count
