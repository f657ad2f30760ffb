from __future__ import annotations

import torch

from asyncllm.layers.embedding import Embedding
from asyncllm.layers.parameter import Placement


def test_rows_are_copies() -> None:
    """What comes out is the residual stream, which is added to in place."""
    embedding = Embedding(4, 2, Placement(torch.float32, torch.device("cpu")))
    table = torch.arange(8.0).view(4, 2)
    embedding.slot().load(table)
    rows = embedding(torch.tensor([2, 0, 2]))
    assert torch.equal(rows, table[[2, 0, 2]])
    rows.add_(1.0)
    assert torch.equal(embedding.weight, table)
