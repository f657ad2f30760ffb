from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch

from asyncllm.kernels import uniform_linear
from tests.kernels.mutants import mutant
from tests.kernels.precision import assert_as_good


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 48, 64), (70, 130, 80), (17, 33, 200)])
@pytest.mark.parametrize("biased", [False, True])
def test_equals_reference(
    rows: int, outputs: int, inputs: int, *, biased: bool, device: torch.device, dtype: torch.dtype
) -> None:
    x, weight = normal(rows, inputs).to(device, dtype), normal(outputs, inputs).to(device, dtype)
    bias = normal(outputs).to(device, dtype) if biased else None
    exact = uniform_linear.uniform_linear_reference(x.float(), weight.float(), None if bias is None else bias.float())
    plain = torch.nn.functional.linear(x, weight, bias)
    assert_as_good(uniform_linear.uniform_linear(x, weight, bias), exact, plain)


def check_bands(module: ModuleType, device: torch.device) -> None:
    """More rows than a band of tiles, and more outputs than a tile."""
    x, weight, bias = normal(32 * 9 + 5, 48).to(device), normal(70, 48).to(device), normal(70).to(device)
    actual, expected = module.uniform_linear(x, weight, bias), module.uniform_linear_reference(x, weight, bias)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_more_rows_than_a_band_of_tiles(device: torch.device) -> None:
    check_bands(uniform_linear, device)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("x.load([first_row, first])", "x.load([0, first])"),
        ("x.load([first_row, first])", "x.load([first_row, 0])"),
        ("weight.load([first_output, first])", "weight.load([0, first])"),
        ("tl.load(bias + outputs,", "tl.load(bias + outputs // 2,"),
        ("band + program % (8 * across) % height", "band + program % (8 * across) // across"),
        ("first_output = program % (8 * across) // height", "first_output = program % (8 * across) // 8"),
        ("row = first_row + tl.arange", "row = tl.arange"),
    ],
)
def test_planted_fault_is_caught(right: str, wrong: str, tmp_path: Path, device: torch.device) -> None:
    with mutant(uniform_linear, tmp_path, right, wrong) as module, pytest.raises(AssertionError):
        check_bands(module, device)
