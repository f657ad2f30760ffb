"""RMSNorm (https://arxiv.org/abs/1910.07467)."""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from asyncllm.kernels.rms_norm import rms_norm
from asyncllm.layers.parameter import Placement, Slot
from asyncllm.layers.residual import Residual

_FEW_ROWS = 32
"""Rows up to which the fewest calls are fastest."""


class RMSNorm:
    """x / sqrt(mean(x²) + eps) · weight, over the last dimension.

    Torch has one operator for LayerNorm and makes RMSNorm of seven. Of x and −x beside each other the mean is 0 and the
    variance mean(x²), so LayerNorm of the two holds RMSNorm of x in its first half: the fewest calls. Of many bfloat16
    rows that is the slowest part, and the normalisation of a trained batch norm is faster, whose means are told to be 0
    and whose variances mean(x²).
    """

    def __init__(self, size: int, eps: float, placement: Placement) -> None:
        self.eps = eps
        self._weights = torch.zeros(2, size, dtype=placement.dtype, device=placement.device)
        self.weight = self._weights[0]  # [size]
        self._signs = torch.tensor([[1.0], [-1.0]], dtype=placement.dtype, device=placement.device)
        self._few = _FEW_ROWS if placement.dtype == torch.bfloat16 else sys.maxsize

    def __call__(self, x: Tensor) -> Tensor:
        """[n, size] → [n, size], contiguous."""
        if x.shape[0] > self._few:
            variances = torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32).square_().div_(x.shape[1])
            means = torch.zeros_like(variances)
            normed, _, _ = torch.native_batch_norm(x[None], None, None, means, variances, False, 0.0, self.eps)
            return normed[0].mul_(self.weight)
        both = x.unsqueeze(1) * self._signs
        normed = torch.layer_norm(both, self._weights.shape, self._weights, None, self.eps)
        return normed.select(1, 0).contiguous()

    def of(self, residual: Residual) -> Tensor:
        """[n, size]; what was added last is in the residual stream then."""
        return self(residual.settle())

    def slot(self) -> Slot:
        """The checkpoint tensor of this layer."""
        return Slot(self.weight, initial=1.0)


class KernelRMSNorm(RMSNorm):
    """The same, by one kernel."""

    def __call__(self, x: Tensor) -> Tensor:
        """[n, size] → [n, size]."""
        return rms_norm(x, self.weight, self.eps)

    def of(self, residual: Residual) -> Tensor:
        """See `RMSNorm`."""
        normed = rms_norm(residual.values, self.weight, self.eps, parts=residual.parts)
        residual.parts = None
        return normed


def make_rms_norm(size: int, eps: float, placement: Placement) -> RMSNorm:
    """The norm in the form that suits `placement`."""
    return (KernelRMSNorm if placement.kernels else RMSNorm)(size, eps, placement)
