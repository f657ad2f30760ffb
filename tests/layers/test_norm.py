from __future__ import annotations

import pytest
import torch

from asyncllm.layers.norm import RMSNorm
from asyncllm.layers.parameter import Placement


@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)], ids=str)
def test_norm(rows: int, dtype: torch.dtype, bound: float) -> None:
    norm = RMSNorm(64, 1e-3, Placement(dtype, torch.device("cpu")))
    generator = torch.Generator().manual_seed(0)
    norm.weight.copy_(torch.randn(64, generator=generator))
    x = (torch.randn(rows, 64, generator=generator) + 0.5).to(dtype)
    x[0] *= 100
    expected = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-3).sqrt() * norm.weight
    found = norm(x)
    assert found.is_contiguous()
    torch.testing.assert_close(found.double(), expected, atol=bound, rtol=bound)
