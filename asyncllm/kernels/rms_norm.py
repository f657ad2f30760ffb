"""RMSNorm (Zhang and Sennrich, 2019): y = x / sqrt(mean(x²) + epsilon) · weight."""

from __future__ import annotations

import torch

from asyncllm.kernels.language import await_previous, jit, launch_next, next_power_of_2, overlap_options, tl


@jit
def _rms_norm_kernel(
    output: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    epsilon: tl.float32,
    X_STRIDE: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    weights = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    await_previous(OVERLAP)
    launch_next(OVERLAP)
    values = tl.load(x + row * X_STRIDE + columns, mask=inside, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt_rn(tl.sum(values * values, axis=0) / SIZE + epsilon)
    tl.store(output + row * SIZE + columns, (values * scale * weights).to(output.dtype.element_ty), mask=inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float, output: torch.Tensor | None = None) -> torch.Tensor:
    """Normalise the rows of x [n, d] (its last dimension dense), d up to 65,536; weight [d], of any float type.

    Returns `output` [n, d], a new tensor unless given; it may be x itself.
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
            epsilon,
            X_STRIDE=x.stride(0),
            SIZE=size,
            BLOCK=block,
            num_warps=min(max(block // 512, 1), 16),
            **overlap_options(x.device),
        )
    return output


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """`rms_norm` in plain torch, computed in float32."""
    values = x.float()
    scale = torch.rsqrt(values.square().mean(-1, keepdim=True) + epsilon)
    return (values * scale * weight.float()).to(x.dtype)
