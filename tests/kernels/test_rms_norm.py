from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch

from asyncllm.kernels import rms_norm
from tests.kernels.mutants import mutant
from tests.kernels.precision import assert_as_good

SHAPES = [(3, 64), (5, 100), (1, 1), (2, 4096), (7, 33)]


def check(module: ModuleType, rows: int, size: int, device: torch.device, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(rows * size)
    x = torch.randn((rows, size), generator=generator).to(device, dtype)
    weight = torch.rand(size, generator=generator).to(device, dtype)
    wide = torch.full((rows, size + 8), 9.0, dtype=dtype, device=device)  # rows need not be dense
    wide[:, :size] = x
    plain = torch.nn.functional.rms_norm(x, (size,), weight, 1e-5)
    exact = module.rms_norm_reference(x.double(), weight.double(), 1e-5)
    assert_as_good(module.rms_norm(wide[:, :size], weight, 1e-5), exact, plain)


@pytest.mark.parametrize(("rows", "size"), SHAPES)
def test_equals_reference(rows: int, size: int, device: torch.device, dtype: torch.dtype) -> None:
    check(rms_norm, rows, size, device, dtype)


def check_parts(module: ModuleType, count: int, device: torch.device, dtype: torch.dtype) -> None:
    rows, size = 5, 100
    generator = torch.Generator().manual_seed(count)
    x = torch.randn((rows, size), generator=generator).to(device, dtype)
    parts = torch.randn((count, rows, size), generator=generator).to(device)
    weight = torch.rand(size, generator=generator).to(device, dtype)
    wide = torch.full((rows, size + 8), 9.0, dtype=dtype, device=device)
    wide[:, :size] = x
    total = x.double() + parts.double().sum(0)
    rounded = total.to(dtype)
    plain = torch.nn.functional.rms_norm(rounded, (size,), weight, 1e-5)
    exact = module.rms_norm_reference(total, weight.double(), 1e-5)
    assert_as_good(module.rms_norm(wide[:, :size], weight, 1e-5, parts=parts), exact, plain)
    assert_as_good(wide[:, :size], total, rounded)
    assert (wide[:, size:] == 9).all()
    module.rms_norm_reference(x, weight, 1e-5, parts=parts)
    torch.testing.assert_close(x, rounded)


@pytest.mark.parametrize("count", [1, 3])
def test_parts_of_a_product_are_added(count: int, device: torch.device, dtype: torch.dtype) -> None:
    check_parts(rms_norm, count, device, dtype)


def test_may_write_over_its_input(device: torch.device) -> None:
    x = torch.randn(4, 96, device=device)
    weight = torch.rand(96, device=device)
    expected = rms_norm.rms_norm_reference(x, weight, 1e-6)
    assert rms_norm.rms_norm(x, weight, 1e-6, output=x) is x
    torch.testing.assert_close(x, expected, rtol=1e-5, atol=1e-6)


def test_no_rows(device: torch.device) -> None:
    assert rms_norm.rms_norm(torch.empty(0, 8, device=device), torch.ones(8, device=device), 1e-5).shape == (0, 8)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("axis=0) / SIZE", "axis=0) / BLOCK"),
        ("weight + columns,", "weight + columns // 2,"),
        ("x + row * X_STRIDE", "x + row * SIZE"),
        ("output + row * SIZE + columns", "output + columns"),
    ],
)
def test_planted_fault_is_caught(right: str, wrong: str, tmp_path: Path, device: torch.device) -> None:
    with mutant(rms_norm, tmp_path, right, wrong) as module, pytest.raises(AssertionError):
        check(module, 5, 100, device, torch.float32)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("mine + part *", "mine + 0 * part *"),
        ("tl.store(source, ", "tl.store(source + 1, "),
        ("values = total.to(tl.float32)", "values -= total.to(tl.float32)"),
    ],
)
def test_planted_fault_in_parts_is_caught(right: str, wrong: str, tmp_path: Path, device: torch.device) -> None:
    with mutant(rms_norm, tmp_path, right, wrong) as module, pytest.raises(AssertionError):
        check_parts(module, 3, device, torch.float32)
