"""Where parameters live, and how one fills itself from a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from asyncllm.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Placement:
    """What parameters are made of and where."""

    dtype: torch.dtype
    device: torch.device
    kernels: bool = False  # layers run our kernels instead of torch's operators: what a GPU takes
    deterministic: bool = False  # what a row gives does not depend on the others; with kernels only

    def empty(self, *shape: int) -> Tensor:
        """An uninitialised tensor."""
        return torch.empty(*shape, dtype=self.dtype, device=self.device)


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of one checkpoint tensor: a view of a parameter, or of its shard of a packed one."""

    target: Tensor
    initial: float | None = None  # value of every element in a model without weights; None: random

    def load(self, tensor: Tensor) -> None:
        """Copy `tensor` into place, converting its dtype on the way. Raises `CheckpointError` on another shape."""
        if tensor.shape != self.target.shape:
            raise CheckpointError(f"has shape {tuple(tensor.shape)}, the model needs {tuple(self.target.shape)}")
        self.target.copy_(tensor)

    def fill(self, seed: int) -> None:
        """Stand-in values: `initial`, or uniform ones of variance 1 / columns, which keep activations near 1."""
        if self.initial is not None:
            self.target.fill_(self.initial)
            return
        generator = torch.Generator(self.target.device).manual_seed(seed)
        bound = (3.0 / self.target.shape[-1]) ** 0.5
        self.target.uniform_(-bound, bound, generator=generator)
