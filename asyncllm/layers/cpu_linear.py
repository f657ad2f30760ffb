"""Products with weights in main memory, in the form that suits what the checkpoint holds: what the CPU runner uses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from asyncllm.layers.cpu_product import CpuProduct, Formed, make_gated_product, make_product, make_tied_product
from asyncllm.layers.norm import RMSNorm
from asyncllm.layers.parameter import (
    CheckpointTensor,
    Loadable,
    Placement,
    Slot,
    check_shape,
    dense,
    fill_randomly,
)
from asyncllm.layers.residual import Residual
from asyncllm.weights.grouped import GroupedTensor, concatenate


class CpuLinear:
    """y = x Wᵀ + b, where W may be several checkpoint matrices below each other.

    The matrices come one by one; with the last of them the product is made, and they are let go.
    """

    _formed: Formed  # once all matrices have come

    def __init__(self, in_features: int, parts: Mapping[str, int], *, bias: bool, placement: Placement) -> None:
        """`parts` maps each checkpoint name (such as `q_proj`) to its output features, in the order of the output."""
        self.in_features = in_features
        self.parts = dict(parts)
        self.bias = placement.empty(sum(self.parts.values())) if bias else None
        self._placement = placement
        assert placement.products is not None
        self._forms = placement.products
        self._matrices: dict[str, CheckpointTensor] = {}

    def __call__(self, x: Tensor) -> Tensor:
        """[n, in] → [n, out]."""
        return self._formed.product(x)

    def normed(self, residual: Residual, norm: RMSNorm) -> Tensor:
        """See `WeightedLayer`."""
        return self._formed.product.normed(residual.settle(), norm)

    def add(self, x: Tensor, residual: Residual) -> None:
        """See `LinearLayer`."""
        residual.values = self._formed.product.add(x, residual.settle())

    @property
    def product(self) -> CpuProduct:
        """In the form that was chosen for the weights."""
        return self._formed.product

    @property
    def dtype(self) -> torch.dtype:
        """Of activations, and of weights that are not packed."""
        return self._placement.dtype

    @property
    def weight_bytes(self) -> int:
        """See `LinearLayer`."""
        return self._formed.weight_bytes + (0 if self.bias is None else self.bias.nbytes)

    @property
    def copy_bytes(self) -> int:
        """See `LinearLayer`."""
        return self._formed.copy_bytes

    def slots(self, prefix: str) -> Iterator[tuple[str, Loadable]]:
        """The checkpoint tensors of this layer, under `prefix`."""
        start = 0
        for name, size in self.parts.items():
            yield f"{prefix}{name}.weight", _MatrixSlot(self, name, torch.Size((size, self.in_features)))
            if self.bias is not None:
                yield f"{prefix}{name}.bias", Slot(self.bias[start : start + size], initial=0.0)
            start += size

    def tie(self, table: Tensor) -> Loadable:
        """See `LinearLayer`."""
        return _TiedSlot(self, table)

    def tie_to(self, weight: CheckpointTensor, table: Tensor) -> None:
        """Multiply with `table`, which was filled with `weight`."""
        self._formed = make_tied_product(weight, table, self._forms)

    def replace(self, weight: CheckpointTensor) -> None:
        """See `LinearLayer`."""
        (name,) = self.parts
        self.take(name, weight)

    def take(self, name: str, matrix: CheckpointTensor) -> None:
        """Keep a copy of a matrix until the others have come."""
        grouped = isinstance(matrix, GroupedTensor)
        self._matrices[name] = matrix if grouped else dense(matrix).to(self.dtype, copy=True)
        if len(self._matrices) == len(self.parts):
            matrices = [self._matrices[part] for part in self.parts]
            self._matrices = {}
            self._formed = self._form(self._joined(matrices))

    def _form(self, weight: CheckpointTensor) -> Formed:
        return make_product(weight, self.bias, self.dtype, self._forms)

    def _joined(self, matrices: Sequence[CheckpointTensor]) -> CheckpointTensor:
        grouped = [matrix for matrix in matrices if isinstance(matrix, GroupedTensor)]
        if len(grouped) == len(matrices):
            return concatenate(grouped)
        plain = [dense(matrix).to(self.dtype) for matrix in matrices]
        return torch.cat(plain) if len(plain) > 1 else plain[0]


class CpuGatedLinear(CpuLinear):
    """f(x Wg) · (x Wu), where f is an activation."""

    def __init__(
        self, in_features: int, parts: Mapping[str, int], activation: str, *, bias: bool, placement: Placement
    ) -> None:
        """`parts` are the gate and what is gated."""
        super().__init__(in_features, parts, bias=bias, placement=placement)
        self.activation = activation

    def _form(self, weight: CheckpointTensor) -> Formed:
        return make_gated_product(weight, self.bias, self.activation, self.dtype, self._forms)


@dataclass(frozen=True, slots=True)
class _MatrixSlot:
    """The place of one of a layer's matrices."""

    linear: CpuLinear
    name: str
    shape: torch.Size

    def load(self, tensor: CheckpointTensor) -> None:
        check_shape(tensor, self.shape)
        self.linear.take(self.name, tensor)

    def fill(self, seed: int) -> None:
        values = torch.empty(self.shape, dtype=self.linear.dtype)
        fill_randomly(values, seed)
        self.linear.take(self.name, values)


@dataclass(frozen=True, slots=True)
class _TiedSlot:
    """The place of a table that another layer holds and this one multiplies with."""

    linear: CpuLinear
    table: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.table.shape

    def load(self, tensor: CheckpointTensor) -> None:
        Slot(self.table).load(tensor)
        self.linear.tie_to(tensor, self.table)

    def fill(self, seed: int) -> None:
        fill_randomly(self.table, seed)
        self.linear.tie_to(self.table, self.table)
