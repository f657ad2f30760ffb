from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from asyncllm.kernels.cpu.build import Library
from asyncllm.kernels.cpu.matrix import (
    KernelMatrix,
    PackedWeights,
    aligned,
    kernel_product,
    matrix_bytes,
    mixed_rows,
    pack_bfloat16,
    pack_bias,
    pack_groups,
    product_reference,
    takes_groups,
    takes_shape,
)
from asyncllm.weights.grouped import GroupedTensor
from tests.layers.test_cpu_product import grouped, rows_of


def make(
    weight: GroupedTensor, bits: int, bias: Tensor | None = None, activation: str | None = None
) -> tuple[KernelMatrix, Tensor]:
    """The matrix, and the weights that it stands for in float64."""
    gated, plain = activation is not None, weight.dequantize()
    if bits == 16:
        plain = plain.bfloat16()
        packed = PackedWeights(pack_bfloat16(plain, gated=gated))
    else:
        packed = pack_groups(weight.codes, weight.scales, weight.zeros, bits, gated=gated)
    outputs, inputs = weight.shape
    assert packed.blocks.nbytes == matrix_bytes(outputs, inputs, bits)
    placed = aligned(packed.blocks.nbytes).copy_(packed.blocks)
    packed_bias = None if bias is None else pack_bias(bias, gated=gated)
    return KernelMatrix(placed, packed_bias, outputs, inputs, bits, activation, packed.unit), plain.double()


def taken(library: Library, bits: int, x: Tensor) -> Tensor:
    """Rows in float64, with what is rounded on purpose."""
    return mixed_rows(x.double()) if bits == 4 and not library.avx512 else x.double()


@pytest.mark.parametrize("bits", [4, 8, 16])
@pytest.mark.parametrize(("outputs", "inputs"), [(16, 32), (48, 96), (208, 576), (4224, 64)])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 12, 16, 17, 32, 33, 64, 70])
def test_nearer_than_bfloat16(library: Library, bits: int, outputs: int, inputs: int, count: int) -> None:
    """Nearer to float64 than torch's product with weights that are rounded to bfloat16."""
    weight, x = grouped(outputs, inputs, min(bits, 8)), rows_of(count, inputs)
    matrix, exact = make(weight, bits)
    wide = taken(library, bits, x)
    expected = product_reference(wide, exact)
    rounded = product_reference(wide.bfloat16(), exact.bfloat16())
    bound = (rounded.double() - expected).abs().mean()
    for dtype in (torch.float32, torch.bfloat16):
        found = kernel_product(library, x, matrix, dtype=dtype)
        assert found.shape == (count, outputs)
        assert found.dtype == dtype
        assert (found.double() - expected).abs().mean() < (1.0 if dtype == torch.float32 else 1.5) * bound


@pytest.mark.parametrize("bits", [4, 8, 16])
def test_rows_that_are_cut_into_parts(library: Library, bits: int) -> None:
    weight, x = grouped(48, 576, min(bits, 8)), rows_of(1000, 576)
    matrix, exact = make(weight, bits)
    expected = product_reference(taken(library, bits, x), exact)
    found = kernel_product(library, x, matrix, dtype=torch.float32)
    torch.testing.assert_close(found.double(), expected, rtol=0.01, atol=0.01 * float(expected.abs().mean()))


@pytest.mark.parametrize("count", [1, 3, 16])
def test_large_numbers_leave_the_others_their_bits(library: Library, count: int) -> None:
    """As activations have them, in a few columns of their own."""
    weight, x = grouped(208, 576, 4), rows_of(count, 576)
    row = torch.arange(count)
    for group in (0, 7):
        x[row, (32 * (group + 5 * row) + 3 * row) % 576] = 300.0
    matrix, exact = make(weight, 4)
    expected = product_reference(x.double(), exact)
    groups = x.double().unflatten(-1, (18, 32))
    unit = groups.abs().amax(-1, keepdim=True) / 127
    of_bytes = product_reference(((groups / unit).round() * unit).flatten(-2), exact)
    found = kernel_product(library, x, matrix, dtype=torch.float32)
    assert (found.double() - expected).abs().mean() < (of_bytes - expected).abs().mean() / 5


def test_rounds_as_torch_does(library: Library) -> None:
    """To the nearest, of two to the even one; what is no number stays so."""
    weight = GroupedTensor(torch.zeros(16, 32, dtype=torch.int8), torch.ones(16, 1), torch.zeros(16, 1), 8)
    weight.codes[:, :2] = 1
    matrix, _ = make(weight, 16)
    x = torch.zeros(400, 32)
    x[:128, 0], x[128:256, 0] = 1 + torch.arange(128) / 128, -1 - torch.arange(128) / 128
    x[:256, 1] = 2.0**-8  # half of the last place
    x[256:384, 0], x[256:384, 1] = 2.0, 2.0 ** -torch.arange(128.0)
    x[384:390, 0] = torch.tensor([math.nan, math.inf, -math.inf, -math.nan, 0.0, -0.0])
    for rows in (x[:4], x):
        exact = kernel_product(library, rows.bfloat16(), matrix, dtype=torch.float32)
        found = kernel_product(library, rows.bfloat16(), matrix)
        torch.testing.assert_close(found, exact.bfloat16(), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(exact[:384, 0], x[:384, :2].sum(1))


@pytest.mark.parametrize("bits", [4, 8, 16])
@pytest.mark.parametrize("activation", [None, "silu", "gelu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("count", [1, 9, 40])
def test_norm_bias_and_activation(
    library: Library, bits: int, activation: str | None, normed: bool, count: int
) -> None:
    generator = torch.Generator().manual_seed(count)
    bias = torch.randn(96, generator=generator)
    norm = (1 + torch.randn(64, generator=generator) / 8).bfloat16() if normed else None
    matrix, exact = make(grouped(96, 64, min(bits, 8)), bits, bias, activation)
    x = 3 * rows_of(count, 64)
    wide = x.double() if norm is None else functional.rms_norm(x.double(), norm.shape, norm.double(), 1e-5)
    wide = taken(library, bits, wide)
    expected = product_reference(wide, exact, bias.double(), activation)
    rounded = product_reference(wide.bfloat16(), exact.bfloat16(), bias.bfloat16(), activation)
    found = kernel_product(library, x, matrix, norm=norm, eps=1e-5, dtype=torch.float32)
    assert found.shape == (count, matrix.width)
    assert (found.double() - expected).abs().mean() < (rounded.double() - expected).abs().mean()


@pytest.mark.parametrize("bits", [4, 8, 16])
@pytest.mark.parametrize("count", [1, 4, 7, 16, 30, 70])
def test_any_number_of_threads_gives_the_same_bits(library: Library, bits: int, count: int) -> None:
    matrix, _ = make(grouped(208, 576, min(bits, 8)), bits)  # an odd number of blocks
    x, before = rows_of(count, 576), torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(kernel_product(library, x, matrix, dtype=torch.float32))
    finally:
        torch.set_num_threads(before)
    assert all(each.equal(found[0]) for each in found)


@pytest.mark.parametrize("bits", [4, 8])
def test_weights_are_those_of_the_file(library: Library, bits: int) -> None:
    """Few rows: one column at a time is read back exactly, but for float16's rounding of scale and zero."""
    weight = grouped(32, 64, bits)
    scales, zeros = weight.scales.half().float(), (64 * weight.scales).half().float()
    weight = GroupedTensor(weight.codes, scales, zeros + 2 ** (bits - 1) * scales, bits)
    matrix, exact = make(weight, bits)
    found = torch.cat(
        [kernel_product(library, row[None], matrix, dtype=torch.float32) for row in torch.eye(64).bfloat16()]
    )
    torch.testing.assert_close(found.double(), exact.T, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("count", [1, 16, 24, 40])
@pytest.mark.parametrize("size", [2.0**-24, 2.0**-9, 2.0**20])
def test_weights_of_any_size(library: Library, bits: int, count: int, size: float) -> None:
    """float16 holds them as multiples of a unit; what is much smaller than the others is there too."""
    weight, x = grouped(64, 96, bits), rows_of(count, 96)
    weight = GroupedTensor(weight.codes, size * weight.scales, size * weight.zeros, bits)
    weight.scales[3], weight.zeros[3] = 1e-4 * weight.scales[3], 0.0
    assert takes_groups(weight.scales, weight.zeros, bits)
    matrix, exact = make(weight, bits)
    wide = taken(library, bits, x)
    expected = product_reference(wide, exact)
    rounded = product_reference(wide.bfloat16(), exact.bfloat16())
    found = kernel_product(library, x, matrix, dtype=torch.float32)
    assert (found.double() - expected).abs().mean() < (rounded.double() - expected).abs().mean()


@pytest.mark.parametrize("count", [9, 40])
def test_small_and_large_inputs(library: Library, count: int) -> None:
    """No product of two numbers is lost, however small the result."""
    matrix, exact = make(grouped(64, 96, 4), 4)
    for size in (1e-12, 1e-6, 1e6, 1e30):
        x = (size * rows_of(count, 96)).bfloat16()
        found = kernel_product(library, x, matrix, dtype=torch.float32).double()
        torch.testing.assert_close(found / size, x.double() / size @ exact.T, rtol=0.02, atol=0.05)


@pytest.mark.parametrize("bits", [4, 8, 16])
@pytest.mark.parametrize("count", [1, 4, 7, 16, 40])
def test_a_row_depends_on_no_other(library: Library, bits: int, count: int) -> None:
    """To the bit, as long as there are as many; and what is not a number in one stays there."""
    matrix, _ = make(grouped(64, 96, min(bits, 8)), bits)
    x = rows_of(count, 96)
    found = kernel_product(library, x, matrix)
    others = x.flip(0) * 5
    others[::3, 40] = 1000.0
    for place in {0, count // 2, count - 1}:
        mixed = others.clone()
        mixed[place] = x[place]
        mixed[(place + 1) % count if count > 1 else 0, 5] = float("nan")
        again = kernel_product(library, mixed, matrix)
        if count > 1:
            assert torch.equal(again[place], found[place])
        assert again[(place + 1) % count].isnan().all()


def test_zeros_and_large_numbers(library: Library) -> None:
    matrix, exact = make(grouped(32, 64, 4), 4)
    for count in (1, 20):
        assert not kernel_product(library, torch.zeros(count, 64).bfloat16(), matrix).any()
        x = 1e30 * rows_of(count, 64)
        found = kernel_product(library, x, matrix, dtype=torch.float32)
        torch.testing.assert_close(found.double(), x.double() @ exact.T, rtol=0.02, atol=1e29)
    assert kernel_product(library, torch.zeros(0, 64).bfloat16(), matrix).shape == (0, 32)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("count", [1, 20])
def test_activations_of_large_numbers(library: Library, activation: str, count: int) -> None:
    """Whose cube, or power, is no float32."""
    weight = torch.zeros(32, 32).bfloat16()
    weight[:, 0] = 1.0
    matrix = KernelMatrix(aligned(2048).copy_(pack_bfloat16(weight, gated=True)), None, 32, 32, 16, activation)
    x = torch.zeros(count, 32).bfloat16()
    for number in (-3e38, -1e18, -1e14, -90.0, 1e14, 3e38):
        x[:, 0] = number
        expected = product_reference(x.float(), weight.float(), None, activation)
        found = kernel_product(library, x, matrix, dtype=torch.float32)
        torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-30)


def test_what_is_taken() -> None:
    assert takes_shape(48, 96, gated=False)
    assert not takes_shape(48, 96, gated=True)  # half is no multiple of 16
    assert not takes_shape(40, 96, gated=False)
    assert not takes_shape(48, 80, gated=False)
    assert not takes_shape(0, 96, gated=False)
    weight = grouped(16, 64, 4)
    assert takes_groups(weight.scales, weight.zeros, 4)
    assert takes_groups(weight.scales * 1e-8, weight.zeros * 1e-8, 4)
    assert not takes_groups(weight.scales * 1e-8, weight.zeros, 4)
    assert not takes_groups(weight.scales, weight.zeros + 1e6, 4)
    assert not takes_groups(weight.scales, weight.zeros + float("inf"), 4)
    assert not takes_groups(weight.scales * float("nan"), weight.zeros, 4)
