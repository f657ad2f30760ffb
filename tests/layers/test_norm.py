from __future__ import annotations

import torch

from asyncllm.layers.norm import RMSNorm
from asyncllm.layers.parameter import Placement


def test_norm() -> None:
    norm = RMSNorm(8, 1e-3, Placement(torch.float32, torch.device("cpu")))
    generator = torch.Generator().manual_seed(0)
    norm.weight.copy_(torch.randn(8, generator=generator))
    x = torch.randn(3, 8, generator=generator)
    expected = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-3).sqrt() * norm.weight
    assert torch.allclose(norm(x).double(), expected, atol=1e-6)
