"""y = x Wᵀ + b for few rows of x, where reading W once at the speed of memory is all that counts.

What stands beside such a product in a model is done in it: RMSNorm of x on the way in, a gated activation or the sum
with a residual on the way out. One row is a matrix-vector product in registers, by as many programs as run at once:
each keeps x and goes through its lines of W, with the next ones on their way. More rows go through the matrix units,
with W on the side that has many lines. A small W is cut along its columns as well, so that every multiprocessor has a
part; the parts are added in a fixed order by the program that comes last, or left to the kernel that comes next
(`linear_parts`). On a Hopper GPU `specialized_linear` may take the tiles. Which tiling is fastest depends on the sizes:
it is a parameter, `default_tiling` a good start.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch

from asyncllm.kernels.activation import Activation, gate_up_product
from asyncllm.kernels.language import (
    TensorDescriptor,
    await_previous,
    ceil_div,
    jit,
    jit_unspecialized,
    launch_next,
    next_power_of_2,
    overlap_options,
    tl,
)
from asyncllm.kernels.specialized_linear import LINES, can_specialize, specialized_linear

MOST_ROWS = 256

SPLIT_TILES = 1024
"""Tiles that a product may have whose columns are cut: a counter each."""


@dataclass(frozen=True, slots=True)
class VectorTiling:
    """One row: a multiprocessor runs `programs`, each of which takes `lines` of W at a time."""

    lines: int
    warps: int
    programs: int
    carve_out: int = 4  # percent of fast memory that is not cache: see `compilation`


@dataclass(frozen=True, slots=True)
class Tiling:
    """More rows: a program takes up to `rows` of x and `lines` of W, `width` of their columns at a time; these are cut
    into `splits` parts."""

    lines: int
    width: int
    warps: int
    stages: int = 1
    splits: int = 1
    rows: int = MOST_ROWS  # a power of two, at least 16
    specialized: bool = False  # by `specialized_linear`, where that runs; `lines` are 64 or 128

    def rows_at_once(self, rows: int) -> int:
        """Of x with so many rows, as many as a program takes: they are filled up."""
        return min(max(16, next_power_of_2(rows)), self.rows)


@dataclass(frozen=True, slots=True)
class RowNorm:
    """RMSNorm of the rows of x."""

    weight: torch.Tensor  # [inputs]
    epsilon: float


def default_vector_tiling(inputs: int, *, gated: bool = False) -> VectorTiling:
    """What suits an H200, for lines of W of so many columns; `gated`: they come in pairs."""
    size = next_power_of_2(inputs)
    warps = min(max(size // 512, 1), 16)
    lines = max(1, 32 * 64 * warps // size // (2 if gated else 1))  # 64 numbers a thread, in registers
    return VectorTiling(lines, warps, programs=max(1, 16 // warps))


def default_tiling(rows: int, outputs: int, inputs: int, *, wide: bool = False) -> Tiling:
    """What suits an H200, for W [outputs, inputs]; `wide`: its numbers have 32 bits."""
    width = min(128, max(16, next_power_of_2(inputs)))
    tiling = Tiling(64, width, 4, 4) if rows <= 64 else Tiling(128, min(64, width), 8, 4)
    programs = ceil_div(outputs, tiling.lines)
    splits = max(1, min(264 // programs, inputs // (4 * tiling.width), 8))
    if wide:
        tiling = replace(tiling, width=min(32, width), stages=2)
    return replace(tiling, splits=splits)


@jit
def _vector_kernel(
    output: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    norm: tl.tensor,
    epsilon: tl.float32,
    outputs: tl.int32,
    INPUTS: tl.constexpr,
    WORDS: tl.constexpr,
    LINES: tl.constexpr,
    SIZE: tl.constexpr,
    PAIRS: tl.constexpr,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
    ADD: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    CARVE_OUT: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    element = output.dtype.element_ty
    if PAIRS:
        # Numbers of 16 bits are loaded in pairs and taken apart when they are used. Loaded one by one, the compiler
        # would take them apart, and so wait for them, before it asks for the next.
        x = x.to(tl.pointer_type(tl.int32))
        weight = weight.to(tl.pointer_type(tl.int32))
        norm = norm.to(tl.pointer_type(tl.int32))
    columns = tl.arange(0, SIZE)
    inside = columns < WORDS
    lines = tl.program_id(0) * LINES + tl.arange(0, LINES)
    # The first lines are asked for while the kernel before still runs, so that memory never rests.
    of_weight = _load_lines(weight, lines, outputs, inside, columns, WORDS)
    of_below = of_weight
    if GATED:
        of_below = _load_lines(weight + outputs.to(tl.int64) * WORDS, lines, outputs, inside, columns, WORDS)
    if NORM:
        of_norm = tl.load(norm + columns, mask=inside, other=0)
    await_previous(OVERLAP)
    launch_next(OVERLAP)

    of_x = tl.load(x + columns, mask=inside, other=0)
    x_low, x_high = _low(of_x, element, PAIRS), _high(of_x, element, PAIRS)
    if NORM:
        squares = tl.sum(x_low * x_low + x_high * x_high, axis=0)
        scale = 1.0 / tl.sqrt_rn(squares / INPUTS + epsilon)
        x_low *= scale * _low(of_norm, element, PAIRS)
        x_high *= scale * _high(of_norm, element, PAIRS)
    step = tl.num_programs(0) * LINES
    for _ in range(tl.program_id(0) * LINES, outputs, step):
        # the next lines are asked for before these are used
        next_weight = _load_lines(weight, lines + step, outputs, inside, columns, WORDS)
        next_below = next_weight
        if GATED:
            next_below = _load_lines(
                weight + outputs.to(tl.int64) * WORDS, lines + step, outputs, inside, columns, WORDS
            )
        written = lines < outputs
        if ADD:
            before = tl.load(output + lines, mask=written, other=0.0).to(tl.float32)
        total = _low(of_weight, element, PAIRS) * x_low[None, :] + _high(of_weight, element, PAIRS) * x_high[None, :]
        if GATED:
            below = _low(of_below, element, PAIRS) * x_low[None, :] + _high(of_below, element, PAIRS) * x_high[None, :]
            # side by side, so that the program's warps exchange both at once
            result, result_below = tl.split(tl.sum(tl.join(total, below), axis=1))
        else:
            result = tl.sum(total, axis=1)
        if BIAS:
            result += tl.load(bias + lines, mask=written, other=0.0).to(tl.float32)
            if GATED:
                result_below += tl.load(bias + outputs + lines, mask=written, other=0.0).to(tl.float32)
        if GATED:
            result = gate_up_product(result, result_below, GELU)
        if ADD:
            result += before
        tl.store(output + lines, result.to(element), mask=written)
        of_weight, of_below, lines = next_weight, next_below, lines + step


@jit
def _load_lines(
    weight: tl.tensor,
    lines: tl.tensor,
    outputs: tl.tensor,
    inside: tl.tensor,
    columns: tl.tensor,
    WORDS: tl.constexpr,
) -> tl.tensor:
    source = weight + lines.to(tl.int64)[:, None] * WORDS + columns[None, :]
    return tl.load(source, mask=(lines < outputs)[:, None] & inside[None, :], other=0, eviction_policy="evict_first")


@jit
def _low(words: tl.tensor, ELEMENT: tl.constexpr, PAIRS: tl.constexpr) -> tl.tensor:
    """The first numbers of the pairs, or all numbers."""
    if PAIRS:
        return words.to(tl.int16).to(ELEMENT, bitcast=True).to(tl.float32)
    return words.to(tl.float32)


@jit
def _high(words: tl.tensor, ELEMENT: tl.constexpr, PAIRS: tl.constexpr) -> tl.tensor:
    """The second numbers of the pairs, or zeros."""
    if PAIRS:
        return (words >> 16).to(tl.int16).to(ELEMENT, bitcast=True).to(tl.float32)
    return tl.zeros_like(words).to(tl.float32)


@jit_unspecialized("rows", "splits")
def _tile_kernel(
    output: tl.tensor,
    x: tl.tensor,
    x_descriptor: tl.tensor,
    weight: tl.tensor,
    weight_descriptor: tl.tensor,
    bias: tl.tensor,
    partial: tl.tensor,
    arrivals: tl.tensor,
    rows: tl.int32,
    x_stride: tl.int32,
    outputs: tl.int32,
    inputs: tl.int32,
    splits: tl.int32,
    ROWS: tl.constexpr,
    LINES: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLIT: tl.constexpr,
    PARTS: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    PRECISION: tl.constexpr,
    AHEAD: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    tile = tl.program_id(0) // splits
    part = tl.program_id(0) % splits
    row_tiles = tl.cdiv(rows, ROWS)
    first_line = tile // row_tiles * LINES
    first_row = tile % row_tiles * ROWS
    lines = first_line + tl.arange(0, LINES)
    row = first_row + tl.arange(0, ROWS)
    columns = tl.arange(0, WIDTH)
    share = tl.cdiv(tl.cdiv(inputs, WIDTH), splits) * WIDTH
    begin = part * share
    end = tl.minimum(begin + share, inputs)
    line_starts = weight + lines.to(tl.int64)[:, None] * inputs
    below_starts = weight + (outputs + lines).to(tl.int64)[:, None] * inputs  # counterparts of the gate's lines
    if OVERLAP:
        # into the cache while the kernel before still runs, so that memory never rests; once for all tiles of rows
        ahead = begin + 64 * tl.arange(0, AHEAD)[None, :]
        wanted = (lines < outputs)[:, None] & (ahead < end) & (first_row == 0)
        _prefetch(line_starts + ahead, wanted)
        if GATED:
            _prefetch(below_starts + ahead, wanted)
    await_previous(OVERLAP)
    launch_next(OVERLAP)

    total = tl.zeros([LINES, ROWS], tl.float32)
    total_below = tl.zeros([LINES, ROWS], tl.float32)
    for start in tl.range(begin, end, WIDTH):
        if DESCRIPTORS:
            right = x_descriptor.load([first_row, start])
            left = weight_descriptor.load([first_line, start])
            total = tl.dot(left, tl.trans(right), total, input_precision=PRECISION)
            if GATED:
                left_below = weight_descriptor.load([outputs + first_line, start])
                total_below = tl.dot(left_below, tl.trans(right), total_below, input_precision=PRECISION)
        else:
            inside = (columns < inputs - start)[None, :]
            mask = (lines < outputs)[:, None] & inside
            right = tl.load(
                x + row[:, None] * x_stride + start + columns[None, :], mask=(row < rows)[:, None] & inside, other=0.0
            )
            left = tl.load(line_starts + start + columns[None, :], mask=mask, other=0.0)
            total = tl.dot(left, tl.trans(right), total, input_precision=PRECISION)
            if GATED:
                left_below = tl.load(below_starts + start + columns[None, :], mask=mask, other=0.0)
                total_below = tl.dot(left_below, tl.trans(right), total_below, input_precision=PRECISION)

    if PARTS:
        exists = (row < rows)[None, :] & (lines < outputs)[:, None]
        if BIAS:
            biased = lines < tl.where(part == 0, outputs, 0)
            of_bias = tl.load(bias + lines, mask=biased, other=0.0).to(tl.float32)
            total += of_bias[:, None]
        target = partial + (part * rows + row).to(tl.int64)[None, :] * outputs + lines[:, None]
        tl.store(target, total, mask=exists)
        return
    if SPLIT:
        size: tl.constexpr = LINES * ROWS
        within = tl.arange(0, ROWS)[None, :] * LINES + tl.arange(0, LINES)[:, None]
        halves: tl.constexpr = 2 if GATED else 1
        parts = partial + tile.to(tl.int64) * (splits * halves * size)
        mine = parts + part * (halves * size)
        exists = (row < rows)[None, :] & (lines < outputs)[:, None]
        tl.store(mine + within, total, mask=exists)
        if GATED:
            tl.store(mine + size + within, total_below, mask=exists)
        tl.debug_barrier()  # every thread has stored
        if tl.atomic_add(arrivals + tile, 1, sem="acq_rel", scope="gpu") != splits - 1:
            return
        tl.debug_barrier()
        tl.store(arrivals + tile, 0)
        total = tl.zeros([LINES, ROWS], tl.float32)
        total_below = tl.zeros([LINES, ROWS], tl.float32)
        for other in tl.range(0, splits):
            theirs = parts + other * (halves * size) + within
            total += tl.load(theirs, mask=exists, other=0.0)
            if GATED:
                total_below += tl.load(theirs + size, mask=exists, other=0.0)

    written = (row < rows)[None, :] & (lines < outputs)[:, None]
    if BIAS:
        total += tl.load(bias + lines, mask=lines < outputs, other=0.0).to(tl.float32)[:, None]
        if GATED:
            total_below += tl.load(bias + outputs + lines, mask=lines < outputs, other=0.0).to(tl.float32)[:, None]
    if GATED:
        total = gate_up_product(total, total_below, GELU)
    target = output + row[None, :] * outputs + lines[:, None]
    if ADD:
        total += tl.load(target, mask=written, other=0.0).to(tl.float32)
    tl.store(target, total.to(output.dtype.element_ty), mask=written)


@jit
def _prefetch(addresses: tl.tensor, mask: tl.tensor) -> None:
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.b32 $0, 0; }",
        "=r,l,r",
        [addresses.to(tl.int64), mask.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


def skinny_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    norm: RowNorm | None = None,
    activation: Activation | None = None,
    residual: torch.Tensor | None = None,
    arrivals: torch.Tensor | None = None,
    tiling: Tiling | VectorTiling | None = None,
) -> torch.Tensor:
    """x [n, inputs], last dimension dense, times dense weight [outputs, inputs] transposed, plus bias [outputs].

    n is at most `MOST_ROWS`. Sums are float32, and so is what lies between the product and what is done with it: `norm`
    (of a single row only) is taken of x before; with `activation`, which is f, weight is [2 · outputs, inputs] with the
    gate first, and the result f(gate) · up; to `residual` [n, outputs], dense, the result is added in place.
    `arrivals` [`SPLIT_TILES`] int32 are zeros, and are left so; without them they are made. Returns [n, outputs], of
    x's type: `residual` or a new tensor.
    """
    rows = len(x)
    outputs = weight.shape[0] // (1 if activation is None else 2)
    if rows > MOST_ROWS:
        raise ValueError(f"skinny_linear takes at most {MOST_ROWS} rows, got {rows}")
    if norm is not None and rows > 1:
        raise ValueError(f"skinny_linear takes the norm of a single row, got {rows}")
    output = torch.empty((rows, outputs), dtype=x.dtype, device=x.device) if residual is None else residual
    if rows == 1:
        _multiply_vector(output, x, weight, bias, norm, activation, residual is not None, tiling)
    elif rows:
        _multiply_tiles(output, x, weight, bias, activation, residual is not None, arrivals, tiling)
    return output


def linear_parts(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, tiling: Tiling
) -> torch.Tensor:
    """What adds up to x [n, inputs], last dimension dense, times dense weight [outputs, inputs] transposed, plus bias
    [outputs]: [`tiling.splits`, n, outputs] float32, each the sum over some of the columns. n is at most `MOST_ROWS`.
    """
    rows, outputs = len(x), len(weight)
    if rows > MOST_ROWS:
        raise ValueError(f"linear_parts takes at most {MOST_ROWS} rows, got {rows}")
    parts = torch.empty((tiling.splits, rows, outputs), dtype=torch.float32, device=x.device)
    if rows:
        _launch_tiles(parts, x, weight, bias, parts, None, tiling, parts=True)
    return parts


def _multiply_vector(
    output: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    norm: RowNorm | None,
    activation: Activation | None,
    add: bool,
    tiling: Tiling | VectorTiling | None,
) -> None:
    inputs, outputs = x.shape[1], output.shape[1]
    if not isinstance(tiling, VectorTiling):
        tiling = default_vector_tiling(inputs, gated=activation is not None)
    operands = (x, weight) if norm is None else (x, weight, norm.weight)
    pairs = inputs % 2 == 0 and all(each.element_size() == 2 and each.data_ptr() % 4 == 0 for each in operands)
    programs = min(ceil_div(outputs, tiling.lines), tiling.programs * _multiprocessors(x.device))
    _vector_kernel[(programs,)](
        output,
        x,
        weight,
        weight if bias is None else bias,
        weight if norm is None else norm.weight,
        0.0 if norm is None else norm.epsilon,
        outputs,
        INPUTS=inputs,
        WORDS=inputs // 2 if pairs else inputs,
        LINES=tiling.lines,
        SIZE=next_power_of_2(inputs // 2 if pairs else inputs),
        PAIRS=pairs,
        BIAS=bias is not None,
        NORM=norm is not None,
        ADD=add,
        GATED=activation is not None,
        GELU=activation is Activation.GELU_TANH,
        CARVE_OUT=tiling.carve_out,
        num_warps=tiling.warps,
        num_stages=1,
        **overlap_options(x.device),
    )


def _multiply_tiles(
    output: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: Activation | None,
    add: bool,
    arrivals: torch.Tensor | None,
    tiling: Tiling | VectorTiling | None,
) -> None:
    rows, inputs = x.shape
    outputs = output.shape[1]
    if not isinstance(tiling, Tiling):
        tiling = default_tiling(rows, outputs, inputs, wide=x.element_size() > 2)
    tiles = ceil_div(outputs, tiling.lines) * ceil_div(rows, tiling.rows_at_once(rows))
    halves = 1 if activation is None else 2
    partial = output
    if tiling.splits > 1:
        if tiles > SPLIT_TILES:
            raise ValueError(f"{tiles} tiles are too many to cut each along its columns")
        size = tiles * tiling.splits * halves * tiling.lines * tiling.rows_at_once(rows)
        partial = torch.empty(size, dtype=torch.float32, device=x.device)
        if arrivals is None:
            arrivals = torch.zeros(SPLIT_TILES, dtype=torch.int32, device=x.device)
    _launch_tiles(output, x, weight, bias, partial, arrivals, tiling, activation=activation, add=add)


def _launch_tiles(
    output: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    partial: torch.Tensor,
    arrivals: torch.Tensor | None,
    tiling: Tiling,
    *,
    activation: Activation | None = None,
    add: bool = False,
    parts: bool = False,
) -> None:
    rows, inputs = x.shape
    outputs = output.shape[-1]
    at_once = tiling.rows_at_once(rows)
    if tiling.specialized and (parts or tiling.splits == 1) and can_specialize(x):
        specialized_linear(
            output,
            x,
            weight,
            bias,
            groups=tiling.lines // LINES,
            rows=at_once,
            width=tiling.width,
            stages=tiling.stages,
            splits=tiling.splits,
            activation=activation,
            add=add,
            parts=parts,
        )
        return
    tiles = ceil_div(outputs, tiling.lines) * ceil_div(rows, at_once)
    # tensor copies want lines of whole 16 bytes
    descriptors = _copies_tensors(x.device) and all(
        each * x.element_size() % 16 == 0 for each in (inputs, x.stride(0), x.storage_offset())
    )
    _tile_kernel[(tiles * tiling.splits,)](
        output,
        x,
        TensorDescriptor(x, [rows, inputs], [x.stride(0), 1], [at_once, tiling.width]) if descriptors else x,
        weight,
        TensorDescriptor.from_tensor(weight, [tiling.lines, tiling.width]) if descriptors else weight,
        weight if bias is None else bias,
        partial,
        output if arrivals is None else arrivals,
        rows,
        x.stride(0),
        outputs,
        inputs,
        tiling.splits,
        ROWS=at_once,
        LINES=tiling.lines,
        WIDTH=tiling.width,
        SPLIT=tiling.splits > 1,
        PARTS=parts,
        BIAS=bias is not None,
        ADD=add,
        GATED=activation is not None,
        GELU=activation is Activation.GELU_TANH,
        DESCRIPTORS=descriptors,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        AHEAD=next_power_of_2(max(1, tiling.width * tiling.stages // 64)),
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        **overlap_options(x.device),
    )


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@cache
def _copies_tensors(device: torch.device) -> bool:
    """Whether it has a tensor memory accelerator, or only plays one."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] >= 9


def skinny_linear_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    norm: RowNorm | None = None,
    activation: Activation | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """`skinny_linear` in plain torch, computed in float32."""
    values = x.float()
    if norm is not None:
        scale = torch.rsqrt(values.square().mean(-1, keepdim=True) + norm.epsilon)
        values = values * scale * norm.weight.float()
    result = torch.nn.functional.linear(values, weight.float(), None if bias is None else bias.float())
    if activation is not None:
        gate, up = result.chunk(2, dim=-1)
        if activation is Activation.GELU_TANH:
            result = torch.nn.functional.gelu(gate, approximate="tanh") * up
        else:
            result = torch.nn.functional.silu(gate) * up
    if residual is None:
        return result.to(x.dtype)
    return residual.copy_(residual.float() + result)
