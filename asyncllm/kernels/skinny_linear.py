"""y = x Wᵀ + b for few rows of x, where reading W once at the speed of memory is all that counts.

One row is a matrix-vector product in registers; up to `MOST_ROWS` rows go through the matrix units, padded. Which of
these or the library's product is fastest depends on the sizes: `Tiling` is a parameter, `default_tiling` a good start.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from asyncllm.kernels.language import ceil_div, jit, next_power_of_2, tl

MOST_ROWS = 64


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a program runs: `outputs` lines of W, `width` of their columns at a time."""

    outputs: int
    width: int
    warps: int
    stages: int


def default_tiling(rows: int, outputs: int, inputs: int) -> Tiling:
    """What suits an H200, for W [outputs, inputs] in 16 bits."""
    if rows == 1:
        return Tiling(outputs=1, width=min(2048, next_power_of_2(inputs)), warps=8, stages=1)
    if outputs >= 16_384:
        tiling = Tiling(64, 128, 4, 4) if rows <= 16 else Tiling(128, 128, 4, 4)
    elif rows <= 32 and inputs <= 8192:
        tiling = Tiling(16, 256, 2, 4)
    elif outputs <= 4096:
        tiling = Tiling(32, 256, 4, 4)
    else:
        tiling = Tiling(64, 128, 4, 5)
    return replace(tiling, width=min(tiling.width, max(16, next_power_of_2(inputs))))


@jit
def _vector_kernel(
    output: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    LINES: tl.constexpr,
    WIDTH: tl.constexpr,
    BIAS: tl.constexpr,
) -> None:
    lines = tl.program_id(0) * LINES + tl.arange(0, LINES)
    columns = tl.arange(0, WIDTH)
    source = weight + lines.to(tl.int64)[:, None] * INPUTS + columns[None, :]
    total = tl.zeros([LINES, WIDTH], tl.float32)
    for start in range(0, INPUTS, WIDTH):
        inside = columns < INPUTS - start
        of_x = tl.load(x + start + columns, mask=inside, other=0.0).to(tl.float32)
        of_weight = tl.load(
            source + start, mask=(lines < OUTPUTS)[:, None] & inside[None, :], other=0.0, eviction_policy="evict_first"
        )
        total += of_x[None, :] * of_weight.to(tl.float32)
    result = tl.sum(total, axis=1)
    if BIAS:
        result += tl.load(bias + lines, mask=lines < OUTPUTS, other=0.0).to(tl.float32)
    tl.store(output + lines, result.to(output.dtype.element_ty), mask=lines < OUTPUTS)


@jit
def _skinny_kernel(
    output: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    rows: tl.int32,
    X_STRIDE: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    LINES: tl.constexpr,
    WIDTH: tl.constexpr,
    BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    row = tl.arange(0, ROWS)
    lines = tl.program_id(0) * LINES + tl.arange(0, LINES)
    columns = tl.arange(0, WIDTH)
    of_x = x + row[:, None] * X_STRIDE + columns[None, :]
    of_weight = weight + lines.to(tl.int64)[:, None] * INPUTS + columns[None, :]
    total = tl.zeros([ROWS, LINES], tl.float32)
    for start in range(0, INPUTS, WIDTH):
        inside = (columns < INPUTS - start)[None, :]
        left = tl.load(of_x + start, mask=(row < rows)[:, None] & inside, other=0.0)
        right = tl.load(of_weight + start, mask=(lines < OUTPUTS)[:, None] & inside, other=0.0)
        total = tl.dot(left, tl.trans(right), total, input_precision=PRECISION)
    if BIAS:
        total += tl.load(bias + lines, mask=lines < OUTPUTS, other=0.0).to(tl.float32)[None, :]
    target = output + row[:, None] * OUTPUTS + lines[None, :]
    tl.store(target, total.to(output.dtype.element_ty), mask=(row < rows)[:, None] & (lines < OUTPUTS)[None, :])


def skinny_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    tiling: Tiling | None = None,
    output: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [n, inputs], last dimension dense, times dense weight [outputs, inputs] transposed, plus bias [outputs].

    n is at most `MOST_ROWS`. Sums are float32. Returns `output` [n, outputs], of x's type, a new tensor unless given.
    """
    rows, inputs = x.shape
    outputs = weight.shape[0]
    if rows > MOST_ROWS:
        raise ValueError(f"skinny_linear takes at most {MOST_ROWS} rows, got {rows}")
    if output is None:
        output = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    if tiling is None:
        tiling = default_tiling(rows, outputs, inputs)
    grid = (ceil_div(outputs, tiling.outputs),)
    if rows == 1:
        _vector_kernel[grid](
            output,
            x,
            weight,
            weight if bias is None else bias,
            OUTPUTS=outputs,
            INPUTS=inputs,
            LINES=tiling.outputs,
            WIDTH=tiling.width,
            BIAS=bias is not None,
            num_warps=tiling.warps,
        )
    elif rows:
        _skinny_kernel[grid](
            output,
            x,
            weight,
            weight if bias is None else bias,
            rows,
            X_STRIDE=x.stride(0),
            OUTPUTS=outputs,
            INPUTS=inputs,
            ROWS=max(16, next_power_of_2(rows)),
            LINES=tiling.outputs,
            WIDTH=tiling.width,
            BIAS=bias is not None,
            PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
            num_warps=tiling.warps,
            num_stages=tiling.stages,
        )
    return output


def skinny_linear_reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`skinny_linear` in plain torch, computed in float32."""
    result = torch.nn.functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
    return result.to(x.dtype)
