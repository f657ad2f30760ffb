from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch

from asyncllm.kernels import activation
from asyncllm.kernels.activation import Activation
from tests.kernels.mutants import mutant
from tests.kernels.precision import assert_as_good


def check(module: ModuleType, rows: int, size: int, kind: str, *, device: torch.device, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(size)
    gate_up = (3 * torch.randn((rows, 2 * size), generator=generator)).to(device, dtype)
    gate, up = gate_up.chunk(2, dim=-1)
    functional = torch.nn.functional
    plain = (functional.silu(gate) if kind == "silu" else functional.gelu(gate, approximate="tanh")) * up
    exact = module.gated_activation_reference(gate_up.float(), module.Activation(kind))
    assert_as_good(module.gated_activation(gate_up, module.Activation(kind)), exact, plain)


@pytest.mark.parametrize("kind", [each.value for each in Activation])
@pytest.mark.parametrize(("rows", "size"), [(3, 64), (2, 1025), (1, 1)])
def test_equals_reference(rows: int, size: int, kind: str, device: torch.device, dtype: torch.dtype) -> None:
    check(activation, rows, size, kind, device=device, dtype=dtype)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("+ SIZE + columns, mask=inside, other=0.0", "+ SIZE - 1 + columns, mask=inside, other=0.0"),
        ("* BLOCK +", "* (BLOCK + 1) +"),
    ],
)
def test_planted_fault_is_caught(right: str, wrong: str, tmp_path: Path, device: torch.device) -> None:
    with mutant(activation, tmp_path, right, wrong) as module, pytest.raises(AssertionError):
        check(module, 2, 1025, "silu", device=device, dtype=torch.float32)
