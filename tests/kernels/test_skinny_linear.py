from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch

from asyncllm.kernels import skinny_linear
from asyncllm.kernels.skinny_linear import Tiling
from tests.kernels.mutants import mutant
from tests.kernels.precision import assert_as_good


def check(
    module: ModuleType,
    shape: tuple[int, int, int],
    device: torch.device,
    dtype: torch.dtype,
    *,
    bias: bool = True,
    tiling: Tiling | None = None,
) -> None:
    rows, outputs, inputs = shape
    generator = torch.Generator().manual_seed(sum(shape))
    x = torch.randn((rows, inputs + 8), generator=generator).to(device, dtype)[:, :inputs]
    weight = torch.randn((outputs, inputs), generator=generator).to(device, dtype)
    added = torch.randn(outputs, generator=generator).to(device, dtype) if bias else None
    exact = torch.nn.functional.linear(x.double(), weight.double(), None if added is None else added.double())
    plain = torch.nn.functional.linear(x, weight, added)
    assert_as_good(module.skinny_linear(x, weight, added, tiling=tiling), exact, plain)


@pytest.mark.parametrize("shape", [(1, 5, 64), (1, 33, 100), (1, 2, 2500), (2, 40, 64), (17, 33, 100), (64, 65, 96)])
@pytest.mark.parametrize("bias", [False, True])
def test_equals_reference(shape: tuple[int, int, int], bias: bool, device: torch.device, dtype: torch.dtype) -> None:
    check(skinny_linear, shape, device, dtype, bias=bias)


@pytest.mark.parametrize("rows", [1, 5])
def test_other_tilings(rows: int, device: torch.device) -> None:
    check(skinny_linear, (rows, 37, 200), device, torch.float16, tiling=Tiling(16, 64, 8, 2))


def test_refuses_many_rows(device: torch.device) -> None:
    with pytest.raises(ValueError, match="at most 64 rows, got 65"):
        skinny_linear.skinny_linear(torch.ones(65, 16, device=device), torch.ones(16, 16, device=device))


@pytest.mark.parametrize(
    ("right", "wrong", "rows"),
    [
        ("x + start + columns", "x + start // 2 + columns", 1),
        ("bias + lines, mask=lines < OUTPUTS, other=0.0).to(tl.float32)\n", "bias + lines // 2).to(tl.float32)\n", 1),
        ("of_weight + start", "of_weight + start // 2", 3),
        ("x + row[:, None] * X_STRIDE", "x + row[:, None] * INPUTS", 3),
    ],
)
def test_planted_fault_is_caught(right: str, wrong: str, rows: int, tmp_path: Path, device: torch.device) -> None:
    with mutant(skinny_linear, tmp_path, right, wrong) as module, pytest.raises(AssertionError):
        check(module, (rows, 34, 600), device, torch.float32, tiling=Tiling(16, 128, 4, 2))
