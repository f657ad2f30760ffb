"""The tiles of `skinny_linear` on a Hopper GPU, by warps of two kinds.

One warp, the producer, has tiles of W and of x copied to a ring in shared memory: those of W before the previous kernel
has ended, as far as the ring goes. One or two groups of four warps, the consumers, multiply 64 lines of W each, with
the next product on its way to the matrix unit while one runs. So memory rests neither for a product nor for what is
done with it.

It is written in Gluon, Triton's lower language, which has no interpreter: there, and on other GPUs, `skinny_linear`'s
own kernel takes the same tiles.
"""

from __future__ import annotations

from functools import cache

import torch

from asyncllm.kernels.activation import Activation, gate_up_product
from asyncllm.kernels.language import (
    GLUON_AVAILABLE,
    GluonDescriptor,
    await_previous,
    ceil_div,
    gl,
    gluon_jit,
    hopper,
    launch_next,
    load_block,
    overlap_options,
)

LINES = 64
"""Of W, of a consumer: as many as one instruction of the matrix units has."""

_CONSUMERS, _PRODUCER = 240, 24
"""Registers of a thread of either: 8 warps of the one and 4 of the other, of which three idle, share 65,536."""


@gluon_jit
def _specialized_tile_kernel(
    output: gl.tensor,
    bias: gl.tensor,
    weight_descriptor: gl.tensor,
    x_descriptor: gl.tensor,
    rows: gl.tensor,
    outputs: gl.tensor,
    inputs: gl.tensor,
    splits: gl.tensor,
    GROUPS: gl.constexpr,
    HALVES: gl.constexpr,
    ROWS: gl.constexpr,
    WIDTH: gl.constexpr,
    STAGES: gl.constexpr,
    PARTS: gl.constexpr,
    BIAS: gl.constexpr,
    ADD: gl.constexpr,
    GELU: gl.constexpr,
    LINES: gl.constexpr,
    CONSUMERS: gl.constexpr,
    PRODUCER: gl.constexpr,
    OVERLAP: gl.constexpr,
) -> None:
    tile = gl.program_id(0) // splits
    part = gl.program_id(0) % splits
    row_tiles = (rows + ROWS - 1) // ROWS
    first_line = tile // row_tiles * (LINES * GROUPS)
    first_row = tile % row_tiles * ROWS
    share = ((inputs + WIDTH - 1) // WIDTH + splits - 1) // splits * WIDTH
    begin = part * share
    turns = (gl.minimum(begin + share, inputs) - begin + WIDTH - 1) // WIDTH  # none where the parts are too many
    # the ring: filled by the producer, emptied by all consumers
    dtype: gl.constexpr = weight_descriptor.block_type.element_ty
    BARRIER: gl.constexpr = hopper.mbarrier.MBarrierLayout()
    PIECES: gl.constexpr = GROUPS * HALVES
    weights = gl.allocate_shared_memory(dtype, [STAGES * PIECES, LINES, WIDTH], weight_descriptor.layout)
    xs = gl.allocate_shared_memory(dtype, [STAGES, ROWS, WIDTH], x_descriptor.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for i in gl.static_range(STAGES):
        hopper.mbarrier.init(full.index(i), count=1)
        hopper.mbarrier.init(empty.index(i), count=GROUPS)
    hopper.fence_async_shared()
    ring = (weights, xs, full, empty)
    # the arguments stand in each place: constants of a tuple that has a name are none any more
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (
                    _consume,
                    (
                        0, output, bias, ring, first_line, first_row, rows, outputs, part, turns, HALVES, PIECES, ROWS,
                        STAGES, PARTS, BIAS, ADD, GELU, LINES, OVERLAP,
                    ),
                ),
                (
                    _consume,
                    (
                        1, output, bias, ring, first_line, first_row, rows, outputs, part, turns, HALVES, PIECES, ROWS,
                        STAGES, PARTS, BIAS, ADD, GELU, LINES, OVERLAP,
                    ),
                ),
                (
                    _produce,
                    (
                        weight_descriptor, x_descriptor, ring, first_line, first_row, outputs, begin, turns, HALVES,
                        PIECES, ROWS, WIDTH, STAGES, LINES, OVERLAP,
                    ),
                ),
            ],
            [4, 1],
            [CONSUMERS, PRODUCER],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (
                    _consume,
                    (
                        0, output, bias, ring, first_line, first_row, rows, outputs, part, turns, HALVES, PIECES, ROWS,
                        STAGES, PARTS, BIAS, ADD, GELU, LINES, OVERLAP,
                    ),
                ),
                (
                    _produce,
                    (
                        weight_descriptor, x_descriptor, ring, first_line, first_row, outputs, begin, turns, HALVES,
                        PIECES, ROWS, WIDTH, STAGES, LINES, OVERLAP,
                    ),
                ),
            ],
            [1],
            [PRODUCER],
        )  # fmt: skip


@gluon_jit
def _produce(
    weight_descriptor: gl.tensor,
    x_descriptor: gl.tensor,
    ring: gl.tuple,
    first_line: gl.tensor,
    first_row: gl.tensor,
    outputs: gl.tensor,
    begin: gl.tensor,
    turns: gl.tensor,
    HALVES: gl.constexpr,
    PIECES: gl.constexpr,
    ROWS: gl.constexpr,
    WIDTH: gl.constexpr,
    STAGES: gl.constexpr,
    LINES: gl.constexpr,
    OVERLAP: gl.constexpr,
) -> None:
    """Fill the ring, turn by turn."""
    weights, xs, full, empty = ring
    SIZE: gl.constexpr = (LINES * PIECES + ROWS) * WIDTH * xs.dtype.primitive_bitwidth // 8
    for early in gl.static_range(STAGES):
        if early < turns:
            hopper.mbarrier.expect(full.index(early), SIZE)
            _load_weights(
                weights, weight_descriptor, full.index(early), early, first_line, outputs, begin + early * WIDTH,
                HALVES, PIECES, LINES,
            )  # fmt: skip
    await_previous(OVERLAP)
    launch_next(OVERLAP)
    for early in gl.static_range(STAGES):
        if early < turns:
            load_block(x_descriptor, [first_row, begin + early * WIDTH], full.index(early), xs.index(early))
    for turn in range(STAGES, turns):
        stage = turn % STAGES
        hopper.mbarrier.wait(empty.index(stage), (turn // STAGES + 1) & 1)
        hopper.mbarrier.expect(full.index(stage), SIZE)
        _load_weights(
            weights, weight_descriptor, full.index(stage), stage, first_line, outputs, begin + turn * WIDTH, HALVES,
            PIECES, LINES,
        )  # fmt: skip
        load_block(x_descriptor, [first_row, begin + turn * WIDTH], full.index(stage), xs.index(stage))


@gluon_jit
def _load_weights(
    weights: gl.tensor,
    descriptor: gl.tensor,
    full: gl.tensor,
    stage: gl.tensor,
    first_line: gl.tensor,
    outputs: gl.tensor,
    column: gl.tensor,
    HALVES: gl.constexpr,
    PIECES: gl.constexpr,
    LINES: gl.constexpr,
) -> None:
    """Each consumer's lines; with two halves, the gate's and then what it gates."""
    for piece in gl.static_range(PIECES):
        line = first_line + piece // HALVES * LINES + piece % HALVES * outputs
        load_block(descriptor, [line, column], full, weights.index(stage * PIECES + piece))


@gluon_jit
def _consume(
    WHICH: gl.constexpr,
    output: gl.tensor,
    bias: gl.tensor,
    ring: gl.tuple,
    first_line: gl.tensor,
    first_row: gl.tensor,
    rows: gl.tensor,
    outputs: gl.tensor,
    part: gl.tensor,
    turns: gl.tensor,
    HALVES: gl.constexpr,
    PIECES: gl.constexpr,
    ROWS: gl.constexpr,
    STAGES: gl.constexpr,
    PARTS: gl.constexpr,
    BIAS: gl.constexpr,
    ADD: gl.constexpr,
    GELU: gl.constexpr,
    LINES: gl.constexpr,
    OVERLAP: gl.constexpr,
) -> None:
    """Multiply what is in the ring, and write LINES columns of the output."""
    weights, xs, full, empty = ring
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    total = gl.zeros([LINES, ROWS], gl.float32, SUMS)
    total_below = gl.zeros([LINES, ROWS], gl.float32, SUMS)
    for turn in range(0, turns):
        stage = turn % STAGES
        hopper.mbarrier.wait(full.index(stage), (turn // STAGES) & 1)
        x = xs.index(stage).permute((1, 0))
        mine = stage * PIECES + WHICH * HALVES
        total = hopper.warpgroup_mma(weights.index(mine), x, total, is_async=True)
        if HALVES == 2:
            total_below = hopper.warpgroup_mma(weights.index(mine + 1), x, total_below, is_async=True)
            total, total_below = hopper.warpgroup_mma_wait(2, deps=[total, total_below])
        else:
            total = hopper.warpgroup_mma_wait(1, deps=[total])
        if turn > 0:
            hopper.mbarrier.arrive(empty.index((turn - 1) % STAGES), count=1)
    total, total_below = hopper.warpgroup_mma_wait(0, deps=[total, total_below])
    await_previous(OVERLAP)
    first_line += WHICH * LINES
    if BIAS:
        line = first_line + gl.arange(0, LINES, gl.SliceLayout(1, SUMS))
        biased = line < outputs
        if PARTS:
            biased = biased & (part == 0)
        total += gl.load(bias + line, mask=biased, other=0.0).to(gl.float32)[:, None]
        if HALVES == 2:
            total_below += gl.load(bias + outputs + line, mask=biased, other=0.0).to(gl.float32)[:, None]
    if HALVES == 2:
        total = gate_up_product(total, total_below, GELU)
    # a thread writes 16 bytes of neighbouring columns
    element: gl.constexpr = output.dtype.element_ty
    VECTOR: gl.constexpr = 128 // element.primitive_bitwidth
    WRITTEN: gl.constexpr = gl.BlockedLayout([VECTOR, 1], [LINES // VECTOR, 32 * VECTOR // LINES], [1, 4], [0, 1])
    line = first_line + gl.arange(0, LINES, gl.SliceLayout(1, WRITTEN))
    row = first_row + gl.arange(0, ROWS, gl.SliceLayout(0, WRITTEN))
    exists = (line < outputs)[:, None] & (row < rows)[None, :]
    if PARTS:
        output += part.to(gl.int64) * rows * outputs
    target = output + row.to(gl.int64)[None, :] * outputs + line[:, None]
    if ADD:
        total = gl.convert_layout(total, WRITTEN)
        total += gl.load(target, mask=exists, other=0.0).to(gl.float32)
        gl.store(target, total.to(element), mask=exists)
    else:
        gl.store(target, gl.convert_layout(total.to(element), WRITTEN), mask=exists)


def can_specialize(x: torch.Tensor) -> bool:
    """Whether `specialized_linear` takes x: by where it is, its type, and as tensor copies want it."""
    return (
        x.dtype in (torch.bfloat16, torch.float16)
        and all(number % 8 == 0 for number in (x.shape[1], x.stride(0), x.storage_offset()))
        and _runs_on(x.device)
    )


@cache
def _runs_on(device: torch.device) -> bool:
    if not GLUON_AVAILABLE or device.type == "cpu" or not torch.cuda.is_available():
        return False
    # "meta" stands for the GPU there is: what is launched on it is only compiled
    return torch.cuda.get_device_capability(None if device.type == "meta" else device)[0] == 9


def specialized_linear(
    output: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    groups: int,
    rows: int,
    width: int,
    stages: int,
    splits: int,
    activation: Activation | None,
    add: bool,
    parts: bool,
) -> None:
    """Write x [n, inputs] times weight transposed, as `skinny_linear` has it, to `output` [n, outputs], or add it; or
    its `splits` parts, of float32, to `output` [splits, n, outputs]. Without parts there is one split.

    `groups` of consumers (one or two) take `LINES` lines each and `rows` (a power of two, 16 to 256) of x at once,
    `width` columns at a time; `stages` of these are in the ring.
    """
    inputs, outputs = x.shape[1], output.shape[-1]
    tiles = ceil_div(outputs, groups * LINES) * ceil_div(len(x), rows)
    layout = gl.NVMMASharedLayout(128, 16, 2)
    _specialized_tile_kernel[(tiles * splits,)](
        output,
        output if bias is None else bias,
        GluonDescriptor.from_tensor(weight, [LINES, width], layout),
        GluonDescriptor(x, [len(x), inputs], [x.stride(0), 1], [rows, width], layout),
        len(x),
        outputs,
        inputs,
        splits,
        GROUPS=groups,
        HALVES=1 if activation is None else 2,
        ROWS=rows,
        WIDTH=width,
        STAGES=stages,
        PARTS=parts,
        BIAS=bias is not None,
        ADD=add,
        GELU=activation is Activation.GELU_TANH,
        LINES=LINES,
        CONSUMERS=_CONSUMERS,
        PRODUCER=_PRODUCER,
        num_warps=4,
        **overlap_options(x.device),
    )
