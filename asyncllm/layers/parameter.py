"""Where parameters live, and how one fills itself from a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from asyncllm.errors import CheckpointError
from asyncllm.layers.product_forms import ProductForms
from asyncllm.weights.grouped import GroupedTensor

CheckpointTensor = Tensor | GroupedTensor
"""What a checkpoint yields: plain numbers, or packed ones where the loader asked for them."""


@dataclass(frozen=True, slots=True)
class Placement:
    """What parameters are made of and where."""

    dtype: torch.dtype
    device: torch.device
    kernels: bool = False  # layers run our kernels instead of torch's operators: what a GPU takes
    deterministic: bool = False  # what a row gives does not depend on the others; with kernels only
    products: ProductForms | None = None  # in which forms the CPU multiplies; None: in torch's own alone

    def empty(self, *shape: int) -> Tensor:
        """An uninitialised tensor."""
        return torch.empty(*shape, dtype=self.dtype, device=self.device)


class Loadable(Protocol):
    """The place of one checkpoint tensor."""

    @property
    def shape(self) -> torch.Size:
        """Of the tensor that belongs here."""
        ...

    def load(self, tensor: CheckpointTensor) -> None:
        """Take a copy of `tensor`, converting its dtype on the way. Raises `CheckpointError` on another shape."""
        ...

    def fill(self, seed: int) -> None:
        """Stand-in values, for a model without weights."""
        ...


@dataclass(frozen=True, slots=True)
class Slot:
    """A place that is a view of a parameter, or of its shard of a fused one."""

    target: Tensor
    initial: float | None = None  # value of every element in a model without weights; None: random

    @property
    def shape(self) -> torch.Size:
        """See `Loadable`."""
        return self.target.shape

    def load(self, tensor: CheckpointTensor) -> None:
        """See `Loadable`."""
        check_shape(tensor, self.shape)
        self.target.copy_(dense(tensor))

    def fill(self, seed: int) -> None:
        """`initial`, or random values."""
        if self.initial is None:
            fill_randomly(self.target, seed)
        else:
            self.target.fill_(self.initial)


def check_shape(tensor: CheckpointTensor, shape: torch.Size) -> None:
    """Raises `CheckpointError` where a tensor does not have this shape."""
    if tensor.shape != shape:
        raise CheckpointError(f"has shape {tuple(tensor.shape)}, the model needs {tuple(shape)}")


def dense(tensor: CheckpointTensor) -> Tensor:
    """The plain numbers."""
    return tensor.dequantize() if isinstance(tensor, GroupedTensor) else tensor


def fill_randomly(target: Tensor, seed: int) -> None:
    """Uniform values of variance 1 / columns, which keep activations near 1."""
    generator = torch.Generator(target.device).manual_seed(seed)
    bound = (3.0 / target.shape[-1]) ** 0.5
    target.uniform_(-bound, bound, generator=generator)
