from __future__ import annotations

import pytest
import torch

from asyncllm.kernels.embedding import embedding, embedding_reference


@pytest.mark.parametrize("size", [8, 100, 1025])
@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
def test_equals_reference(size: int, ids: torch.dtype, device: torch.device, dtype: torch.dtype) -> None:
    table = torch.randn(17, size).to(device, dtype)
    tokens = torch.tensor([16, 0, 5, 5], dtype=ids, device=device)
    assert torch.equal(embedding(table, tokens), embedding_reference(table, tokens))


def test_writes_where_told(device: torch.device) -> None:
    table, output = torch.randn(4, 8, device=device), torch.empty(1, 8, device=device)
    assert embedding(table, torch.tensor([3], device=device), output) is output
    assert torch.equal(output[0], table[3])
