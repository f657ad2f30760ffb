"""Matrix products with weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from asyncllm.kernels.skinny_linear import skinny_linear
from asyncllm.layers.cpu_linear import CpuLinear
from asyncllm.layers.parameter import CheckpointTensor, Loadable, Placement, Slot, dense


class LinearLayer(Protocol):
    """y = x Wᵀ + b in any form."""

    @property
    def weight_bytes(self) -> int:
        """Size of what it cannot do without."""
        ...

    @property
    def copy_bytes(self) -> int:
        """Size of what it holds only to be faster."""
        ...

    def __call__(self, x: Tensor) -> Tensor:
        """[n, in] → [n, out]."""
        ...

    def slots(self, prefix: str) -> Iterator[tuple[str, Loadable]]:
        """The checkpoint tensors of this layer, under `prefix`."""
        ...

    def tie(self, table: Tensor) -> Loadable:
        """Multiply with `table`, a parameter of another layer, once that is loaded through the place returned."""
        ...

    def replace(self, weight: CheckpointTensor) -> None:
        """Multiply with a copy of `weight` from now on."""
        ...


class Linear:
    """y = x Wᵀ + b, where W may be several checkpoint matrices below each other: one product instead of three."""

    def __init__(self, in_features: int, parts: Mapping[str, int], *, bias: bool, placement: Placement) -> None:
        """`parts` maps each checkpoint name (such as `q_proj`) to its output features, in the order of the output."""
        self.parts = dict(parts)
        out_features = sum(self.parts.values())
        self.weight = placement.empty(out_features, in_features)
        self.bias = placement.empty(out_features) if bias else None
        self._tied = False

    def __call__(self, x: Tensor) -> Tensor:
        """[n, in] → [n, out]."""
        return functional.linear(x, self.weight, self.bias)

    def slots(self, prefix: str) -> Iterator[tuple[str, Slot]]:
        """The checkpoint tensors of this layer, under `prefix`."""
        start = 0
        for name, size in self.parts.items():
            yield f"{prefix}{name}.weight", Slot(self.weight[start : start + size])
            if self.bias is not None:
                yield f"{prefix}{name}.bias", Slot(self.bias[start : start + size], initial=0.0)
            start += size

    @property
    def weight_bytes(self) -> int:
        """See `LinearLayer`; nothing for a table that belongs to another layer."""
        own = 0 if self._tied else self.weight.nbytes
        return own + (0 if self.bias is None else self.bias.nbytes)

    @property
    def copy_bytes(self) -> int:
        """See `LinearLayer`."""
        return 0

    def tie(self, table: Tensor) -> Slot:
        """See `LinearLayer`."""
        self.weight, self._tied = table, True
        return Slot(table)

    def replace(self, weight: CheckpointTensor) -> None:
        """See `LinearLayer`."""
        self.weight, self._tied = torch.empty_like(self.weight).copy_(dense(weight)), False


class KernelLinear(Linear):
    """The same; a single row is multiplied by our kernel, which reads the weights faster than the library does."""

    def __call__(self, x: Tensor) -> Tensor:
        """[n, in] → [n, out]."""
        if len(x) == 1:
            return skinny_linear(x, self.weight, self.bias)
        return super().__call__(x)


def make_linear(in_features: int, parts: Mapping[str, int], *, bias: bool, placement: Placement) -> LinearLayer:
    """The product in the form that suits `placement`."""
    if placement.products is not None:
        return CpuLinear(in_features, parts, bias=bias, placement=placement, forms=placement.products)
    return (KernelLinear if placement.kernels else Linear)(in_features, parts, bias=bias, placement=placement)
