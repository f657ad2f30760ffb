from __future__ import annotations

import pytest
import torch
from torch import Tensor

from asyncllm.layers.activation import ACTIVATIONS
from asyncllm.layers.cpu_product import (
    BlockedProduct,
    DenseProduct,
    Formed,
    PackedProduct,
    TwoFormProduct,
    make_gated_product,
    make_product,
    make_tied_product,
    packed_bytes,
)
from asyncllm.layers.product_forms import ProductForms
from asyncllm.weights.grouped import GROUP, GroupedTensor

FORMS = ProductForms(packed_rows={4: 5, 8: 2})
WITHOUT_COPIES = ProductForms(packed_rows={4: 5, 8: 2}, copies=False)
pytestmark = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"), reason="there is no packed product"
)


def grouped(rows: int, columns: int, bits: int) -> GroupedTensor:
    """Weights of about 1 / sqrt(columns), in codes that use their whole range."""
    generator = torch.Generator().manual_seed(rows * columns + bits)
    codes = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (rows, columns), generator=generator, dtype=torch.int8)
    shape = (rows, columns // GROUP)
    scales = (0.5 + torch.rand(shape, generator=generator)) / 2 ** (bits - 1) / columns**0.5
    return GroupedTensor(codes, scales, scales * torch.randn(shape, generator=generator), bits)


def rows_of(count: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(count, columns, generator=torch.Generator().manual_seed(count)).to(dtype)


def error(found: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> float:
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    return float((found.double() - expected).abs().mean())


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("rows", "columns"), [(16, 32), (48, 96), (208, 576), (4208, 64)])
@pytest.mark.parametrize("count", [1, 3, 5, 17])
def test_packed_is_as_near_as_bfloat16_weights(bits: int, rows: int, columns: int, count: int) -> None:
    weight, x = grouped(rows, columns, bits), rows_of(count, columns)
    found = make_product(weight, None, torch.bfloat16, WITHOUT_COPIES).product(x)
    assert found.shape == (count, rows)
    assert found.dtype == torch.bfloat16
    exact = weight.dequantize()
    rounded = error(torch.nn.functional.linear(x, exact.bfloat16()), x, exact)
    assert error(found, x, exact) < 2 * rounded


def test_packed_has_the_numbers_of_the_file() -> None:
    """Scales and zeros that bfloat16 can hold lose nothing: one column at a time is read back exactly."""
    for bits, zero in ((4, 16.0), (8, 0.0)):
        codes, scales = grouped(32, 64, bits).codes, grouped(32, 64, bits).scales.bfloat16().float()
        weight = GroupedTensor(codes, scales, zero * scales, bits)
        product = make_product(weight, None, torch.bfloat16, WITHOUT_COPIES).product
        found = torch.cat([product(row[None]) for row in torch.eye(64).bfloat16()])
        assert torch.equal(found, weight.dequantize().T.bfloat16())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("count", [2, 9])
def test_bias_and_dtype(dtype: torch.dtype, count: int) -> None:
    weight, x = grouped(64, 96, 4), rows_of(count, 96, dtype)
    bias = torch.randn(64, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = make_product(weight, bias, dtype, FORMS).product(x)
    assert found.dtype == dtype
    assert error(found, x, weight.dequantize(), bias) < 0.01


def test_few_rows_are_multiplied_packed_and_more_are_not() -> None:
    formed = make_product(grouped(64, 96, 4), None, torch.float32, FORMS)
    product = formed.product
    assert isinstance(product, TwoFormProduct)
    x = rows_of(6, 96, torch.float32)
    assert torch.equal(product(x[:5]), product.packed(x[:5]))
    assert torch.equal(product(x), product.dense(x))
    assert not torch.equal(product.packed(x), product.dense(x))
    assert (formed.weight_bytes, formed.copy_bytes) == (packed_bytes(torch.Size((64, 96)), 4), 64 * 96 * 4)


def test_what_the_packed_product_does_not_take_is_dense() -> None:
    for weight in (grouped(24, 64, 4), grouped(32, 64, 8)):
        formed = make_product(weight, None, torch.float32, ProductForms(packed_rows={4: 5}))
        assert isinstance(formed.product, DenseProduct)
        assert torch.equal(formed.product.weight, weight.dequantize())
        assert (formed.weight_bytes, formed.copy_bytes) == (4 * weight.codes.numel(), 0)


def test_without_copies_all_rows_are_multiplied_packed() -> None:
    formed = make_product(grouped(64, 96, 8), None, torch.bfloat16, WITHOUT_COPIES)
    assert isinstance(formed.product, PackedProduct)
    assert (formed.weight_bytes, formed.copy_bytes) == (packed_bytes(torch.Size((64, 96)), 8), 0)


def test_a_table_is_not_counted_twice() -> None:
    weight = grouped(64, 96, 8)
    table = weight.dequantize()
    tied: Formed = make_tied_product(weight, table, FORMS)
    assert isinstance(tied.product, TwoFormProduct)
    assert isinstance(tied.product.dense, DenseProduct)
    assert tied.product.dense.weight is table
    assert (tied.weight_bytes, tied.copy_bytes) == (packed_bytes(torch.Size((64, 96)), 8), 0)
    plain = make_tied_product(table, table, FORMS)
    assert isinstance(plain.product, DenseProduct)
    assert (plain.weight_bytes, plain.copy_bytes) == (0, 0)


@pytest.mark.skipif(not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="torch was built without oneDNN")
@pytest.mark.parametrize("count", [1, 4, 33])
@pytest.mark.parametrize("biased", [False, True])
def test_blocked(count: int, biased: bool) -> None:
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this processor has no bfloat16 product of oneDNN's")
    generator = torch.Generator().manual_seed(count)
    weight = (torch.randn(50, 70, generator=generator) / 8).bfloat16()
    bias = torch.randn(50, generator=generator).bfloat16() if biased else None
    x = rows_of(count, 70)
    formed = make_product(weight, bias, torch.bfloat16, ProductForms(blocked=True))
    assert isinstance(formed.product, BlockedProduct)
    rounded = error(torch.nn.functional.linear(x, weight, bias), x, weight, bias)
    assert error(formed.product(x), x, weight, bias) < 1.5 * rounded + 1e-6


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("count", [2, 9])  # packed, and not
@pytest.mark.parametrize("blocked", [False, True])
def test_gated(activation: str, biased: bool, count: int, blocked: bool) -> None:
    if blocked and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this processor has no bfloat16 product of oneDNN's")
    weight, x = grouped(64, 96, 4), 2 * rows_of(count, 96)
    bias = torch.randn(64, generator=torch.Generator().manual_seed(0)).bfloat16() if biased else None
    forms = ProductForms(blocked=blocked, packed_rows={4: 5})
    found = make_gated_product(weight, bias, activation, torch.bfloat16, forms).product(x)
    exact = x.double() @ weight.dequantize().double().T + (0 if bias is None else bias.double())
    gate, up = exact.chunk(2, dim=1)
    expected = ACTIVATIONS[activation](gate) * up
    assert found.shape == (count, 32)
    torch.testing.assert_close(found.double(), expected, rtol=0.03, atol=0.03)
