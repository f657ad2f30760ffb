"""RMSNorm (https://arxiv.org/abs/1910.07467)."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from asyncllm.kernels.rms_norm import rms_norm
from asyncllm.layers.parameter import Placement, Slot


class RMSNorm:
    """x / sqrt(mean(x²) + eps) · weight, over the last dimension."""

    def __init__(self, size: int, eps: float, placement: Placement) -> None:
        self.weight = placement.empty(size)
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """[..., size] → [..., size]."""
        return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)

    def slot(self) -> Slot:
        """The checkpoint tensor of this layer."""
        return Slot(self.weight, initial=1.0)


class KernelRMSNorm(RMSNorm):
    """The same, by one kernel."""

    def __call__(self, x: Tensor) -> Tensor:
        """[n, size] → [n, size]."""
        return rms_norm(x, self.weight, self.eps)


def make_rms_norm(size: int, eps: float, placement: Placement) -> RMSNorm:
    """The norm in the form that suits `placement`."""
    return (KernelRMSNorm if placement.kernels else RMSNorm)(size, eps, placement)
