from __future__ import annotations

import torch

from asyncllm.layers.norm import RMSNorm
from asyncllm.layers.parameter import Placement


def test_norm_of_a_sum() -> None:
    norm = RMSNorm(8, 1e-3, Placement(torch.float32, torch.device("cpu")))
    generator = torch.Generator().manual_seed(0)
    norm.weight.copy_(torch.randn(8, generator=generator))
    residual, update = torch.randn(2, 3, 8, generator=generator)
    total = (residual + update).double()
    expected = total / (total.square().mean(-1, keepdim=True) + 1e-3).sqrt() * norm.weight
    assert torch.allclose(norm.add(residual, update).double(), expected, atol=1e-6)
    assert torch.equal(residual.double(), total.float().double())
    assert torch.allclose(norm(residual).double(), expected, atol=1e-6)
