from __future__ import annotations

from typing import Any

import pytest
import torch

from asyncllm.errors import CheckpointError
from asyncllm.kernels.large_linear import LargeTiling
from asyncllm.kernels.skinny_linear import skinny_linear_reference
from asyncllm.layers import linear as linear_module
from asyncllm.layers.linear import KernelGatedLinear, KernelLinear, Linear, make_gated_linear, make_linear
from asyncllm.layers.norm import RMSNorm
from asyncllm.layers.parameter import Placement
from asyncllm.layers.product_table import Product, ProductTable
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


class LargeProducts:
    """Stands for the kernel of many rows, which computes on a GPU."""

    def __init__(self) -> None:
        self.taken: list[tuple[int, int]] = []

    def multiply(self, x: torch.Tensor, weight: torch.Tensor, *, tiling: LargeTiling, **options: Any) -> torch.Tensor:
        self.taken.append((len(x), tiling.groups))
        return skinny_linear_reference(x, weight, **options)


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> LargeProducts:
    products = LargeProducts()
    monkeypatch.setattr(linear_module, "large_linear", products.multiply)
    monkeypatch.setattr(linear_module, "can_multiply", lambda x, outputs: outputs % 8 == 0)
    return products


def many_rows(outputs: int, *, bias: bool = False) -> tuple[KernelLinear, torch.Tensor]:
    """A product whose table leaves up to 512 rows to the library, and 600 rows."""
    placement = Placement(torch.float32, torch.device("cpu"), kernels=True)
    linear = make_linear(16, {"a": outputs}, bias=bias, placement=placement)
    assert isinstance(linear, KernelLinear)
    generator = torch.Generator().manual_seed(outputs)
    for tensor in (linear.weight, linear.bias):
        if tensor is not None:
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
    linear.table = ProductTable({})
    for adds in (False, True):
        product = Product(outputs, 16, adds=adds)
        linear.table = linear.table.with_choice(product, 512, None).with_choice(product, 1024, LargeTiling(3))
    return linear, torch.randn(600, 16, generator=generator)


def test_many_rows_are_multiplied_by_the_kernel_that_the_table_says(large: LargeProducts) -> None:
    linear, x = many_rows(24)
    expected = x @ linear.weight.T
    torch.testing.assert_close(linear(x), expected)
    torch.testing.assert_close(linear(x[:512]), expected[:512])
    stream = Residual(torch.ones(600, 24))
    linear.add(x, stream)
    torch.testing.assert_close(stream.settle(), expected + 1)
    assert large.taken == [(600, 3), (600, 3)]


@pytest.mark.parametrize(("outputs", "bias"), [(24, True), (20, False)])
def test_what_that_kernel_does_not_take_is_the_library_s(large: LargeProducts, outputs: int, bias: bool) -> None:
    linear, x = many_rows(outputs, bias=bias)
    expected = torch.nn.functional.linear(x, linear.weight, linear.bias)
    torch.testing.assert_close(linear(x), expected)
    stream = Residual(torch.ones(600, outputs))
    linear.add(x, stream)
    torch.testing.assert_close(stream.settle(), expected + 1)
    assert large.taken == []


def test_gated_product_of_many_rows(large: LargeProducts) -> None:
    placement = Placement(torch.float32, torch.device("cpu"), kernels=True)
    gated = make_gated_linear(16, {"gate": 8, "up": 8}, "silu", bias=False, placement=placement)
    assert isinstance(gated, KernelGatedLinear)
    linear, x = many_rows(16)
    gated.linear.weight.copy_(linear.weight)
    gated.linear.table = ProductTable({}).with_choice(gated.product, 1024, LargeTiling(2))
    norm = RMSNorm(16, 1e-5, Placement(torch.float32, torch.device("cpu")))
    gate, up = (norm(x) @ linear.weight.T).chunk(2, dim=-1)
    torch.testing.assert_close(gated.normed(Residual(x), norm), torch.nn.functional.silu(gate) * up)
    assert large.taken == [(600, 2)]
