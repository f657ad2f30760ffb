from __future__ import annotations

import torch

from asyncllm.layers.norm import RMSNorm
from asyncllm.layers.parameter import Placement
from asyncllm.layers.residual import Residual


def test_what_is_in_parts_is_added_once() -> None:
    values, parts = torch.ones(3, 4, dtype=torch.bfloat16), torch.full((2, 3, 4), 0.25)
    residual = Residual(values.clone())
    assert torch.equal(residual.settle(), values)
    residual.parts = parts
    for _ in range(2):
        assert torch.equal(residual.settle(), torch.full_like(values, 1.5))
    assert residual.values.dtype == torch.bfloat16


def test_a_norm_reads_all_of_it() -> None:
    norm = RMSNorm(4, 1e-5, Placement(torch.float32, torch.device("cpu")))
    norm.weight.fill_(1.0)
    residual = Residual(torch.randn(3, 4))
    residual.parts = torch.randn(2, 3, 4)
    total = residual.values + residual.parts.sum(0)
    torch.testing.assert_close(norm.of(residual), norm(total))
    torch.testing.assert_close(residual.values, total)
