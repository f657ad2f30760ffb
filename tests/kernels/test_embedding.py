from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch

from asyncllm.kernels import embedding
from tests.kernels.mutants import mutant


def check(module: ModuleType, size: int, ids: torch.dtype, device: torch.device, dtype: torch.dtype) -> None:
    table = torch.randn((17, size), generator=torch.Generator().manual_seed(size)).to(device, dtype)
    tokens = torch.tensor([16, 0, 5, 5], dtype=ids, device=device)
    output = torch.full((5, size), 7.0, dtype=dtype, device=device)  # one row more than there are tokens
    module.embedding(table, tokens, output)
    assert torch.equal(output[:4], module.embedding_reference(table, tokens))
    assert bool((output[4] == 7.0).all())


@pytest.mark.parametrize("size", [8, 100, 1025])
@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
def test_equals_reference(size: int, ids: torch.dtype, device: torch.device, dtype: torch.dtype) -> None:
    check(embedding, size, ids, device, dtype)


def test_writes_where_told(device: torch.device) -> None:
    table, output = torch.randn(4, 8, device=device), torch.empty(1, 8, device=device)
    assert embedding.embedding(table, torch.tensor([3], device=device), output) is output
    assert torch.equal(output[0], table[3])


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("tl.load(token_ids + row)", "tl.load(token_ids + row // 2)"),
        ("tl.program_id(1) * BLOCK", "tl.program_id(1) * (BLOCK + 1)"),
        ("output + row * SIZE", "output + (row + 1) * SIZE"),
    ],
)
def test_planted_fault_is_caught(right: str, wrong: str, tmp_path: Path, device: torch.device) -> None:
    with mutant(embedding, tmp_path, right, wrong) as module, pytest.raises(AssertionError):
        check(module, 1025, torch.int32, device, torch.float32)
