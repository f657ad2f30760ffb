from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch

from asyncllm.kernels import block_copy
from tests.kernels.mutants import mutant


def check(module: ModuleType, device: torch.device, dtype: torch.dtype) -> None:
    pool = torch.randn(2, 2, 9, 3, 16, 80).to(device, dtype)  # a block of 3,840 numbers
    expected = pool.clone()
    pairs = torch.tensor([[1, 8], [3, 2], [1, 5]], dtype=torch.int32, device=device)
    module.copy_blocks(pool, pairs)
    module.copy_blocks_reference(expected, pairs)
    assert torch.equal(pool, expected)


def test_equals_reference(device: torch.device, dtype: torch.dtype) -> None:
    check(block_copy, device, dtype)


def test_large_blocks(device: torch.device) -> None:
    pool = torch.randn(1, 2, 3, 2, 64, 128, device=device)
    block_copy.copy_blocks(pool, torch.tensor([[2, 1]], device=device))
    assert torch.equal(pool[:, :, 1], pool[:, :, 2])


def test_nothing_to_copy(device: torch.device) -> None:
    pool = torch.randn(1, 2, 3, 1, 16, 8, device=device)
    before = pool.clone()
    block_copy.copy_blocks(pool, torch.empty((0, 2), dtype=torch.int32, device=device))
    assert torch.equal(pool, before)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("pairs + 2 * pair + 1", "pairs + 2 * pair"),
        ("to(tl.int64) * blocks", "to(tl.int64) // 2 * blocks"),
    ],
)
def test_planted_fault_is_caught(right: str, wrong: str, tmp_path: Path, device: torch.device) -> None:
    with mutant(block_copy, tmp_path, right, wrong) as module, pytest.raises(AssertionError):
        check(module, device, torch.float32)
