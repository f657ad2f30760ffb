"""Gated activations of feed-forward layers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor
from torch.nn import functional

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_pytorch_tanh": partial(functional.gelu, approximate="tanh"),
}
"""By the name that a Hugging Face config's `hidden_act` uses."""


class GatedActivation:
    """act(gate) · up, where both come from one product."""

    def __init__(self, name: str) -> None:
        self.activation = ACTIVATIONS[name]

    def __call__(self, gate_up: Tensor) -> Tensor:
        """[n, 2 · size], gate first → [n, size]."""
        gate, up = gate_up.chunk(2, dim=-1)
        return self.activation(gate).mul_(up)
