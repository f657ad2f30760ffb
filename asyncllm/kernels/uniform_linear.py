"""A matrix product whose rows do not depend on one another: what a row gives is the same to the bit beside any others.

A library picks another kernel for another number of rows, and that adds up in another order. Here each output is one
accumulator that goes over the inputs in their order, sixteen a matrix instruction, whatever the size of its tile. So
the tiles may suit the number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from asyncllm.kernels.language import (
    TensorDescriptor,
    await_previous,
    ceil_div,
    jit_unspecialized,
    launch_next,
    overlap_options,
    tl,
)


@dataclass(frozen=True, slots=True)
class _Tiling:
    rows: int
    outputs: int
    inputs: int
    warps: int
    stages: int


_FEW = _Tiling(64, 32, 128, 4, 4)
_SOME = _Tiling(64, 128, 64, 4, 4)
_MANY = _Tiling(128, 256, 64, 8, 3)
_EXACT = _Tiling(32, 32, 32, 4, 1)


def _tiling(rows: int, dtype: torch.dtype) -> _Tiling:
    """All but that of float32 run on the same matrix instructions, of 64 rows."""
    if dtype == torch.float32:
        return _EXACT
    return _FEW if rows <= 64 else _SOME if rows <= 512 else _MANY


@jit_unspecialized("rows")
def _uniform_linear_kernel(
    output: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    rows: tl.int32,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    BIAS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_OUTPUTS: tl.constexpr,
    TILE_INPUTS: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    # Tiles that run at once lie in a square, as far as there are rows: so they read few different lines.
    program = tl.program_id(0)
    across: tl.constexpr = (OUTPUTS + TILE_OUTPUTS - 1) // TILE_OUTPUTS
    band = program // (8 * across) * 8
    height = tl.minimum(tl.cdiv(rows, TILE_ROWS) - band, 8)
    first_row = (band + program % (8 * across) % height) * TILE_ROWS
    first_output = program % (8 * across) // height * TILE_OUTPUTS
    await_previous(OVERLAP)
    launch_next(OVERLAP)
    total = tl.zeros([TILE_ROWS, TILE_OUTPUTS], tl.float32)
    for first in tl.range(0, INPUTS, TILE_INPUTS):
        some = x.load([first_row, first])
        total = tl.dot(some, tl.trans(weight.load([first_output, first])), total, input_precision=PRECISION)
    outputs = first_output + tl.arange(0, TILE_OUTPUTS)
    if BIAS:
        total += tl.load(bias + outputs, mask=outputs < OUTPUTS, other=0.0).to(tl.float32)[None, :]
    row = first_row + tl.arange(0, TILE_ROWS)
    tl.store(
        output + row[:, None].to(tl.int64) * OUTPUTS + outputs[None, :],
        total.to(output.dtype.element_ty),
        mask=(row < rows)[:, None] & (outputs < OUTPUTS)[None, :],
    )


def uniform_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x Wᵀ + b: x [n, inputs] and weight [outputs, inputs] dense, of one type; a row is a multiple of 16 bytes long."""
    rows, inputs = x.shape
    outputs = weight.shape[0]
    output = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    tiling = _tiling(rows, x.dtype)
    if rows:
        _uniform_linear_kernel[(ceil_div(rows, tiling.rows) * ceil_div(outputs, tiling.outputs),)](
            output,
            TensorDescriptor.from_tensor(x, [tiling.rows, tiling.inputs]),
            TensorDescriptor.from_tensor(weight, [tiling.outputs, tiling.inputs]),
            weight if bias is None else bias,
            rows,
            OUTPUTS=outputs,
            INPUTS=inputs,
            BIAS=bias is not None,
            TILE_ROWS=tiling.rows,
            TILE_OUTPUTS=tiling.outputs,
            TILE_INPUTS=tiling.inputs,
            PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
            num_warps=tiling.warps,
            num_stages=tiling.stages,
            **overlap_options(x.device),
        )
    return output


def uniform_linear_reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`uniform_linear` in plain torch, computed in float32."""
    product = torch.nn.functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
    return product.to(x.dtype)
