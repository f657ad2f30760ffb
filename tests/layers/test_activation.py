from __future__ import annotations

import pytest
import torch
from transformers.activations import ACT2FN

from asyncllm.layers.activation import ACTIVATIONS, GatedActivation


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_names_mean_what_transformers_means(name: str) -> None:
    gate, up = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(GatedActivation(name)(torch.cat((gate, up), -1)), ACT2FN[name](gate) * up, atol=1e-6)
