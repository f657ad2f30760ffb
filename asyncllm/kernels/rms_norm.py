"""RMSNorm (Zhang and Sennrich, 2019): y = x / sqrt(mean(x²) + epsilon) · weight.

What a product has left in parts (`linear_parts`) may be added to x first.
"""

from __future__ import annotations

import torch

from asyncllm.kernels.language import (
    SHARED_FIRST,
    await_previous,
    jit,
    launch_next,
    next_power_of_2,
    overlap_options,
    tl,
)


@jit
def _rms_norm_kernel(
    output: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    parts: tl.tensor,
    epsilon: tl.float32,
    X_STRIDE: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    CARVE_OUT: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    weights = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    await_previous(OVERLAP)
    launch_next(OVERLAP)
    source = x + row * X_STRIDE + columns
    values = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    if PARTS:
        mine = parts + row * SIZE + columns
        for part in tl.static_range(PARTS):
            values += tl.load(mine + part * tl.num_programs(0).to(tl.int64) * SIZE, mask=inside, other=0.0)
        total = values.to(x.dtype.element_ty)
        tl.store(source, total, mask=inside)
        values = total.to(tl.float32)
    scale = 1.0 / tl.sqrt_rn(tl.sum(values * values, axis=0) / SIZE + epsilon)
    tl.store(output + row * SIZE + columns, (values * scale * weights).to(output.dtype.element_ty), mask=inside)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    output: torch.Tensor | None = None,
    *,
    parts: torch.Tensor | None = None,
) -> torch.Tensor:
    """Normalise the rows of x [n, d] (its last dimension dense), d up to 65,536; weight [d], of any float type.

    Returns `output` [n, d], a new tensor unless given; without `parts` it may be x itself. Where given, the sum of
    `parts` [any number, n, d] float32, dense, is added to x first, in place.
    """
    rows, size = x.shape
    if output is None:
        output = torch.empty((rows, size), dtype=x.dtype, device=x.device)
    block = next_power_of_2(size)
    if rows:
        _rms_norm_kernel[(rows,)](
            output,
            x,
            weight,
            x if parts is None else parts,
            epsilon,
            X_STRIDE=x.stride(0),
            SIZE=size,
            BLOCK=block,
            PARTS=0 if parts is None else len(parts),
            CARVE_OUT=SHARED_FIRST,
            num_warps=min(max(block // 512, 1), 16),
            **overlap_options(x.device),
        )
    return output


def rms_norm_reference(
    x: torch.Tensor, weight: torch.Tensor, epsilon: float, *, parts: torch.Tensor | None = None
) -> torch.Tensor:
    """`rms_norm` in plain torch, computed in float32."""
    if parts is not None:
        x.copy_(x.float() + parts.sum(0))
    values = x.float()
    scale = torch.rsqrt(values.square().mean(-1, keepdim=True) + epsilon)
    return (values * scale * weight.float()).to(x.dtype)
