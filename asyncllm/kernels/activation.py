"""Gated activations, f(gate) · up, from the packed product of both projections."""

from __future__ import annotations

from enum import Enum

import torch

from asyncllm.kernels.language import await_previous, ceil_div, jit, launch_next, overlap_options, tl

_BLOCK = 1024


class Activation(Enum):
    """What is applied to the gate."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"


@jit
def gate_up_product(gate: tl.tensor, up: tl.tensor, GELU: tl.constexpr) -> tl.tensor:
    """f(gate) · up, of float32: f is SiLU, or GELU by its approximation through tanh."""
    if GELU:
        # (1 + tanh(z)) / 2 = sigmoid(2 z), z = sqrt(2 / pi) (x + 0.044715 x³)
        gate *= tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    else:
        gate *= tl.sigmoid(gate)
    return gate * up


@jit
def _gated_kernel(
    output: tl.tensor,
    gate_up: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    GELU: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    await_previous(OVERLAP)
    launch_next(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    gate = tl.load(gate_up + row * (2 * SIZE) + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * (2 * SIZE) + SIZE + columns, mask=inside, other=0.0).to(tl.float32)
    product = gate_up_product(gate, up, GELU)
    tl.store(output + row * SIZE + columns, product.to(output.dtype.element_ty), mask=inside)


def gated_activation(gate_up: torch.Tensor, activation: Activation, output: torch.Tensor | None = None) -> torch.Tensor:
    """f(gate) · up, for dense gate_up [n, 2 d] with the gate in its first d columns.

    Returns `output` [n, d], a new tensor unless given.
    """
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    if output is None:
        output = torch.empty((rows, size), dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        _gated_kernel[(rows, ceil_div(size, _BLOCK))](
            output,
            gate_up,
            SIZE=size,
            BLOCK=_BLOCK,
            GELU=activation is Activation.GELU_TANH,
            num_warps=4,
            **overlap_options(gate_up.device),
        )
    return output


def gated_activation_reference(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """`gated_activation` in plain torch, computed in float32."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    if activation is Activation.GELU_TANH:
        gate = torch.nn.functional.gelu(gate, approximate="tanh")
    else:
        gate = torch.nn.functional.silu(gate)
    return (gate * up).to(gate_up.dtype)
