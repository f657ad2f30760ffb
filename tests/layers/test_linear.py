from __future__ import annotations

import pytest
import torch

from asyncllm.errors import CheckpointError
from asyncllm.kernels.activation import Activation, gated_activation_reference
from asyncllm.kernels.gated_linear import GatedTiling
from asyncllm.kernels.skinny_linear import skinny_linear_reference
from asyncllm.layers import activation as activation_module
from asyncllm.layers import linear as linear_module
from asyncllm.layers.linear import GatedLinear, KernelGatedLinear, KernelLinear, Linear, make_gated_linear
from asyncllm.layers.norm import RMSNorm
from asyncllm.layers.parameter import Placement, Slot
from asyncllm.layers.product_table import ProductTable
from asyncllm.layers.residual import Residual

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


class GatedProducts:
    """Stands for the kernel of many rows, which computes on a GPU."""

    def __init__(self) -> None:
        self.taken: list[tuple[int, int]] = []

    def multiply(
        self, x: torch.Tensor, weight: torch.Tensor, activation: Activation, *, tiling: GatedTiling
    ) -> torch.Tensor:
        self.taken.append((len(x), tiling.groups))
        return skinny_linear_reference(x, weight, activation=activation)


@pytest.mark.parametrize(
    ("outputs", "bias", "rows", "ours"),
    [(24, False, 600, True), (24, False, 512, False), (24, True, 600, False), (20, False, 600, False)],
    ids=["many rows", "fewer", "bias", "columns that cannot be copied"],
)
def test_gated_product_of_many_rows(
    outputs: int, bias: bool, rows: int, ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the kernel where the table says so, and it takes what is there."""
    products = GatedProducts()
    monkeypatch.setattr(linear_module, "gated_linear", products.multiply)
    monkeypatch.setattr(linear_module, "can_multiply", lambda x, outputs: outputs % 8 == 0)
    monkeypatch.setattr(activation_module, "gated_activation", gated_activation_reference)
    cpu = torch.device("cpu")
    parts = {"gate": outputs, "up": outputs}
    gated, plain = (
        make_gated_linear(16, parts, "silu", bias=bias, placement=Placement(torch.float32, cpu, kernels=kernels))
        for kernels in (True, False)
    )
    assert isinstance(gated, KernelGatedLinear)
    assert isinstance(plain, GatedLinear)
    generator = torch.Generator().manual_seed(outputs)
    for own, other in zip(gated.slots(""), plain.slots(""), strict=True):
        for slot in (own[1], other[1]):
            assert isinstance(slot, Slot)
        values = torch.randn(own[1].target.shape, generator=generator)
        own[1].load(values)
        other[1].load(values)
    table = ProductTable({}).with_choice(gated.product, 512, None).with_choice(gated.product, 1024, GatedTiling(3))
    assert isinstance(gated.linear, KernelLinear)
    gated.linear.table = table
    norm = RMSNorm(16, 1e-5, Placement(torch.float32, cpu))
    norm.weight.fill_(1.0)
    x = torch.randn(rows, 16, generator=generator)
    torch.testing.assert_close(gated.normed(Residual(x), norm), plain.normed(Residual(x), norm))
    assert products.taken == ([(rows, 3)] if ours else [])
