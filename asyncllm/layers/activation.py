"""Gated activations of feed-forward layers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor
from torch.nn import functional

from asyncllm.kernels.activation import Activation, gated_activation
from asyncllm.layers.parameter import Placement

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
        size = gate_up.shape[-1] // 2
        gate, up = gate_up.narrow(-1, 0, size), gate_up.narrow(-1, size, size)  # chunk takes three times as long
        return self.activation(gate).mul_(up)


_KERNELS = {"silu": Activation.SILU, "gelu_pytorch_tanh": Activation.GELU_TANH}


class KernelGatedActivation:
    """The same, by one kernel, for the activations that it knows."""

    def __init__(self, name: str) -> None:
        self.activation = _KERNELS[name]

    def __call__(self, gate_up: Tensor) -> Tensor:
        """[n, 2 · size], gate first → [n, size]."""
        return gated_activation(gate_up, self.activation)


def make_gated_activation(name: str, placement: Placement) -> GatedActivation | KernelGatedActivation:
    """The activation in the form that suits `placement`."""
    return KernelGatedActivation(name) if placement.kernels and name in _KERNELS else GatedActivation(name)
