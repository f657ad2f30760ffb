from __future__ import annotations

import pytest
import torch

from asyncllm.errors import CheckpointError
from asyncllm.layers.linear import Linear
from asyncllm.layers.parameter import Placement

CPU = Placement(torch.float32, torch.device("cpu"))


def test_parts_load_into_one_product() -> None:
    linear = Linear(4, {"q_proj": 6, "k_proj": 2, "v_proj": 2}, bias=True, placement=CPU)
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(slot.target.shape, generator=generator) for name, slot in linear.slots("a.")}
    assert list(tensors) == [
        f"a.{part}.{kind}" for part in ("q_proj", "k_proj", "v_proj") for kind in ("weight", "bias")
    ]
    for name, slot in linear.slots("a."):
        slot.load(tensors[name])
    x = torch.randn(3, 4, generator=generator)
    parts = [x @ tensors[f"a.{part}.weight"].T + tensors[f"a.{part}.bias"] for part in ("q_proj", "k_proj", "v_proj")]
    assert torch.allclose(linear(x), torch.cat(parts, -1), atol=1e-6)


def test_a_part_of_another_shape_is_refused() -> None:
    slots = dict(Linear(4, {"q_proj": 6, "k_proj": 2}, bias=False, placement=CPU).slots(""))
    with pytest.raises(CheckpointError, match=r"\(8, 4\).*\(6, 4\)"):
        slots["q_proj.weight"].load(torch.zeros(8, 4))


def test_loading_converts() -> None:
    linear = Linear(4, {"o_proj": 2}, bias=False, placement=Placement(torch.bfloat16, torch.device("cpu")))
    dict(linear.slots(""))["o_proj.weight"].load(torch.full((2, 4), 0.5))
    assert linear.weight.dtype == torch.bfloat16
    assert (linear.weight == 0.5).all()
