"""Matrix products with weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from asyncllm.kernels.gated_linear import GatedTiling, can_multiply, gated_linear
from asyncllm.kernels.skinny_linear import SPLIT_TILES, RowNorm, Tiling, VectorTiling, linear_parts, skinny_linear
from asyncllm.kernels.uniform_linear import uniform_linear
from asyncllm.layers.activation import GatedActivation, KernelGatedActivation, make_gated_activation
from asyncllm.layers.cpu_linear import CpuGatedLinear, CpuLinear
from asyncllm.layers.norm import RMSNorm
from asyncllm.layers.parameter import CheckpointTensor, Loadable, Placement, Slot, dense
from asyncllm.layers.product_table import Product, device_table
from asyncllm.layers.residual import Residual


class WeightedLayer(Protocol):
    """A layer that multiplies."""

    @property
    def weight_bytes(self) -> int:
        """Size of what it cannot do without."""
        ...

    @property
    def copy_bytes(self) -> int:
        """Size of what it holds only to be faster."""
        ...

    def slots(self, prefix: str) -> Iterator[tuple[str, Loadable]]:
        """The checkpoint tensors of this layer, under `prefix`."""
        ...

    def normed(self, residual: Residual, norm: RMSNorm) -> Tensor:
        """Of the norm of the stream: [n, in] → [n, out]."""
        ...


class LinearLayer(WeightedLayer, Protocol):
    """y = x Wᵀ + b in any form."""

    def __call__(self, x: Tensor) -> Tensor:
        """[n, in] → [n, out]."""
        ...

    def add(self, x: Tensor, residual: Residual) -> None:
        """Add the product of x [n, in] to the stream [n, out]."""
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

    def normed(self, residual: Residual, norm: RMSNorm) -> Tensor:
        """See `WeightedLayer`."""
        return self(norm.of(residual))

    def add(self, x: Tensor, residual: Residual) -> None:
        """See `LinearLayer`."""
        residual.settle().add_(self(x))

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
        """See `WeightedLayer`; nothing for a table that belongs to another layer."""
        own = 0 if self._tied else self.weight.nbytes
        return own + (0 if self.bias is None else self.bias.nbytes)

    @property
    def copy_bytes(self) -> int:
        """See `WeightedLayer`."""
        return 0

    def tie(self, table: Tensor) -> Slot:
        """See `LinearLayer`."""
        self.weight, self._tied = table, True
        return Slot(table)

    def replace(self, weight: CheckpointTensor) -> None:
        """See `LinearLayer`."""
        self.weight, self._tied = torch.empty_like(self.weight).copy_(dense(weight)), False


class KernelLinear(Linear):
    """The same on a GPU: by our kernel where that is faster than the library, together with what stands beside it."""

    def __init__(self, in_features: int, parts: Mapping[str, int], *, bias: bool, placement: Placement) -> None:
        super().__init__(in_features, parts, bias=bias, placement=placement)
        self.table = device_table(placement.device, placement.dtype)
        self.arrivals = torch.zeros(SPLIT_TILES, dtype=torch.int32, device=placement.device)

    def __call__(self, x: Tensor) -> Tensor:
        """[n, in] → [n, out]."""
        tiling = self.tiling(x)
        if tiling is None:
            return functional.linear(x, self.weight, self.bias)
        return skinny_linear(x, self.weight, self.bias, arrivals=self.arrivals, tiling=tiling)

    def normed(self, residual: Residual, norm: RMSNorm) -> Tensor:
        """See `WeightedLayer`."""
        tiling = self.tiling(residual.values)
        if len(residual.values) == 1 and tiling is not None:
            row_norm = RowNorm(norm.weight, norm.eps)
            return skinny_linear(residual.settle(), self.weight, self.bias, norm=row_norm, tiling=tiling)
        return self(norm.of(residual))

    def add(self, x: Tensor, residual: Residual) -> None:
        """See `LinearLayer`."""
        tiling, values = self.tiling(x, adds=True), residual.settle()
        if isinstance(tiling, Tiling) and tiling.splits > 1:
            residual.parts = linear_parts(x, self.weight, self.bias, tiling=tiling)
        elif tiling is not None:
            skinny_linear(x, self.weight, self.bias, residual=values, tiling=tiling)
        elif self.bias is not None:
            values += functional.linear(x, self.weight, self.bias)
        else:
            torch.addmm(values, x, self.weight.t(), out=values)

    def tiling(self, x: Tensor, *, adds: bool = False) -> Tiling | VectorTiling | None:
        """How our kernel multiplies x, or None: the library is faster."""
        outputs, inputs = self.weight.shape
        tiling = self.table.tiling(Product(outputs, inputs, adds=adds), len(x))
        return None if isinstance(tiling, GatedTiling) else tiling


class UniformLinear(Linear):
    """The same on a GPU, each row to the bit as if it were alone; the norm and the sum are kernels of their own."""

    def __call__(self, x: Tensor) -> Tensor:
        """[n, in] → [n, out]."""
        return uniform_linear(x, self.weight, self.bias)


class GatedLinear:
    """f(x Wg) · (x Wu): both products are one, and f is an activation."""

    def __init__(self, linear: LinearLayer, activation: GatedActivation | KernelGatedActivation) -> None:
        """`linear` has the gate's features first, then as many others."""
        self.linear = linear
        self.activation = activation

    def normed(self, residual: Residual, norm: RMSNorm) -> Tensor:
        """See `WeightedLayer`."""
        return self.activation(self.linear.normed(residual, norm))

    @property
    def weight_bytes(self) -> int:
        """See `WeightedLayer`."""
        return self.linear.weight_bytes

    @property
    def copy_bytes(self) -> int:
        """See `WeightedLayer`."""
        return self.linear.copy_bytes

    def slots(self, prefix: str) -> Iterator[tuple[str, Loadable]]:
        """The checkpoint tensors of this layer, under `prefix`."""
        return self.linear.slots(prefix)


class KernelGatedLinear(GatedLinear):
    """The same on a GPU: one kernel where that is faster than the library's product and another for the activation."""

    def __init__(self, linear: KernelLinear, activation: KernelGatedActivation) -> None:
        super().__init__(linear, activation)
        self._kernel_linear = linear
        self._kind = activation.activation
        out_features, in_features = linear.weight.shape
        self.product = Product(out_features // 2, in_features, gated=True)

    def normed(self, residual: Residual, norm: RMSNorm) -> Tensor:
        """See `WeightedLayer`."""
        linear, rows = self._kernel_linear, len(residual.values)
        tiling = linear.table.tiling(self.product, rows)
        if isinstance(tiling, GatedTiling):
            if linear.bias is None and can_multiply(residual.values, self.product.outputs):
                return gated_linear(norm.of(residual), linear.weight, self._kind, tiling=tiling)
            tiling = None
        if tiling is None:
            return self.activation(functional.linear(norm.of(residual), linear.weight, linear.bias))
        row_norm = RowNorm(norm.weight, norm.eps) if rows == 1 else None
        x = residual.settle() if rows == 1 else norm.of(residual)
        return skinny_linear(
            x,
            linear.weight,
            linear.bias,
            norm=row_norm,
            activation=self._kind,
            arrivals=linear.arrivals,
            tiling=tiling,
        )


def make_linear(in_features: int, parts: Mapping[str, int], *, bias: bool, placement: Placement) -> LinearLayer:
    """The product in the form that suits `placement`."""
    if placement.products is not None:
        return CpuLinear(in_features, parts, bias=bias, placement=placement)
    form = (UniformLinear if placement.deterministic else KernelLinear) if placement.kernels else Linear
    return form(in_features, parts, bias=bias, placement=placement)


def make_gated_linear(
    in_features: int, parts: Mapping[str, int], activation: str, *, bias: bool, placement: Placement
) -> WeightedLayer:
    """The gated product in the form that suits `placement`; `parts` are the gate and what is gated."""
    if placement.products is not None:
        return CpuGatedLinear(in_features, parts, activation, bias=bias, placement=placement)
    linear = make_linear(in_features, parts, bias=bias, placement=placement)
    gate = make_gated_activation(activation, placement)
    if isinstance(linear, KernelLinear) and isinstance(gate, KernelGatedActivation):
        return KernelGatedLinear(linear, gate)
    return GatedLinear(linear, gate)
