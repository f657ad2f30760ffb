"""The kernel forms of layers, beside the plain ones over the same weights."""

from __future__ import annotations

import pytest
import torch

from asyncllm.kernels.skinny_linear import Tiling
from asyncllm.layers.embedding import make_embedding
from asyncllm.layers.linear import GatedLinear, KernelGatedLinear, KernelLinear, make_gated_linear, make_linear
from asyncllm.layers.norm import RMSNorm, make_rms_norm
from asyncllm.layers.parameter import Placement
from asyncllm.layers.product_table import Product, ProductTable
from asyncllm.layers.residual import Residual

IN, OUT = 48, 36
TILING = Tiling(16, 32, 4, 2, splits=2)


def fill(*tensors: torch.Tensor | None) -> None:
    generator = torch.Generator().manual_seed(5)
    for tensor in tensors:
        if tensor is not None:
            tensor.copy_(torch.randn(tensor.shape, generator=generator) / 4)


def tabled(product: Product, rows: int) -> ProductTable:
    return ProductTable({}).with_choice(product, rows, TILING)


@pytest.fixture(params=[False, True], ids=["plain", "bias"])
def bias(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def make_norm(placement: Placement) -> RMSNorm:
    norm = make_rms_norm(IN, 1e-5, placement)
    fill(norm.weight)
    return norm


@pytest.mark.parametrize("ours", [False, True], ids=["library", "table"])
@pytest.mark.parametrize("rows", [1, 3])
def test_linear(rows: int, ours: bool, bias: bool, device: torch.device) -> None:
    placement = Placement(torch.float32, device, kernels=True)
    linear = make_linear(IN, {"a": 20, "b": OUT - 20}, bias=bias, placement=placement)
    assert isinstance(linear, KernelLinear)
    fill(linear.weight, linear.bias)
    norm = make_norm(placement)
    x, residual = torch.randn(rows, IN, device=device), torch.randn(rows, OUT, device=device)
    expected = torch.nn.functional.linear(x, linear.weight, linear.bias)
    if ours:
        linear.table = tabled(Product(OUT, IN), rows)
    torch.testing.assert_close(linear(x), expected, rtol=1e-4, atol=1e-5)
    normed = torch.nn.functional.linear(norm(x), linear.weight, linear.bias)
    torch.testing.assert_close(linear.normed(Residual(x), norm), normed, rtol=1e-4, atol=1e-5)
    if ours:
        linear.table = tabled(Product(OUT, IN, adds=True), rows)
    expected += residual
    stream = Residual(residual)
    linear.add(x, stream)
    assert (stream.parts is not None) == ours
    again = Residual(stream.values.clone())
    again.parts = stream.parts
    torch.testing.assert_close(stream.settle(), expected, rtol=1e-4, atol=1e-5)
    assert stream.parts is None
    after = make_rms_norm(OUT, 1e-5, placement)
    fill(after.weight)
    torch.testing.assert_close(after.of(again), after(expected), rtol=1e-4, atol=1e-5)
    assert again.parts is None
    torch.testing.assert_close(again.values, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("ours", [False, True], ids=["library", "table"])
@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh", "gelu"])
@pytest.mark.parametrize("rows", [1, 3])
def test_gated_linear(rows: int, activation: str, ours: bool, bias: bool, device: torch.device) -> None:
    placement = Placement(torch.float32, device, kernels=True)
    gated = make_gated_linear(IN, {"gate": OUT, "up": OUT}, activation, bias=bias, placement=placement)
    plain = make_gated_linear(
        IN, {"gate": OUT, "up": OUT}, activation, bias=bias, placement=Placement(torch.float32, device)
    )
    assert isinstance(plain, GatedLinear)
    assert isinstance(gated, GatedLinear if activation == "gelu" else KernelGatedLinear)
    for each in (gated, plain):
        fill(each.linear.weight, each.linear.bias)
    norm = make_norm(placement)
    if ours and isinstance(gated.linear, KernelLinear):
        gated.linear.table = tabled(Product(OUT, IN, gated=True), rows)
    x = torch.randn(rows, IN, device=device)
    torch.testing.assert_close(gated.normed(Residual(x), norm), plain.normed(Residual(x), norm), rtol=1e-4, atol=1e-5)
    assert [name for name, _ in gated.slots("p.")] == [name for name, _ in plain.slots("p.")]


def test_head_that_is_tied(device: torch.device) -> None:
    """It gets its weight later, and then has another shape."""
    placement = Placement(torch.float32, device, kernels=True)
    embedding = make_embedding(50, IN, placement)
    fill(embedding.weight)
    head = make_linear(IN, {"lm_head": 0}, bias=False, placement=placement)
    head.weight = embedding.weight
    norm = make_norm(placement)
    x = embedding(torch.tensor([3, 49], dtype=torch.int32, device=device))
    assert torch.equal(x, embedding.weight[[3, 49]])
    for rows in (x, x[:1]):
        logits = norm(rows) @ embedding.weight.T
        torch.testing.assert_close(head.normed(Residual(rows), norm), logits, rtol=1e-4, atol=1e-5)
