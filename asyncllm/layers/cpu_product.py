"""The forms in which a processor multiplies with a weight matrix, chosen once when the weights are there.

Where our own kernels run (`kernels/cpu`), they take every matrix that they can, in the form that the file has. The
other forms are torch's.

Torch's product of packed 4-bit weights reads a quarter of what bfloat16 takes, which is what counts for few rows; but
its work grows with the rows, where a product in the processor's own matrix instructions hardly takes longer. So a
packed matrix may have a dense copy, for steps of many rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from asyncllm.kernels.cpu.build import Library
from asyncllm.kernels.cpu.matrix import (
    ACTIVATIONS,
    KernelMatrix,
    PackedWeights,
    kernel_product,
    matrix_bytes,
    pack_bfloat16,
    pack_bias,
    pack_groups,
    takes_groups,
    takes_shape,
)
from asyncllm.layers.activation import GatedActivation
from asyncllm.layers.norm import RMSNorm
from asyncllm.layers.product_forms import ProductForms
from asyncllm.layers.weight_memory import WeightMemory, collapse_pages
from asyncllm.weights.grouped import GROUP, GroupedTensor

_PACKED_ROWS = 16
"""Output features that the packed product takes at a time."""
_PACKED_AT_ONCE = 4096
"""Output features that are packed at once: codes are 32 bits wide on the way. A multiple of the widest block."""


class CpuProduct(ABC):
    """x Wᵀ + b."""

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """[n, in] → [n, out], contiguous."""

    def normed(self, x: Tensor, norm: RMSNorm) -> Tensor:
        """The product of the norm of x [n, in]."""
        return self(norm(x))

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """`residual` [n, out], which may be overwritten, and the product of x [n, in]."""
        return residual.add_(self(x))


@dataclass(frozen=True, slots=True)
class Formed:
    """A product that was made, and what it takes beside the bias and a table that belongs to another layer."""

    product: CpuProduct
    weight_bytes: int  # of what it cannot do without
    copy_bytes: int = 0  # of what it holds only to be faster


class KernelProduct(CpuProduct):
    """Our kernel's product of bfloat16 rows, with weights packed as in the file or in bfloat16, and what follows it."""

    def __init__(self, library: Library, matrix: KernelMatrix, bias: Tensor | None) -> None:
        """`matrix` has no bias; `bias` may be filled until the first product."""
        self.library = library
        self.output_dtype = torch.bfloat16
        self._matrix = matrix
        self._bias = bias

    @cached_property
    def matrix(self) -> KernelMatrix:
        """With the bias."""
        bias, gated = self._bias, self._matrix.activation is not None
        return self._matrix if bias is None else replace(self._matrix, bias=pack_bias(bias, gated=gated))

    def __call__(self, x: Tensor) -> Tensor:
        """See `CpuProduct`."""
        return kernel_product(self.library, x, self.matrix, dtype=self.output_dtype)

    def normed(self, x: Tensor, norm: RMSNorm) -> Tensor:
        """See `CpuProduct`."""
        return kernel_product(self.library, x, self.matrix, norm=norm.weight, eps=norm.eps, dtype=self.output_dtype)


class DenseProduct(CpuProduct):
    """Torch's own product."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """See `CpuProduct`."""
        return functional.linear(x, self.weight, self.bias)


class BlockedProduct(CpuProduct):
    """oneDNN's product, with weights in the order that it would else bring them to at every call."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = _in_blocks(weight)
        self.bias = bias
        self._multiply = torch.ops.mkldnn._linear_pointwise.default
        self._add = torch.ops.mkldnn._linear_pointwise.binary

    def __call__(self, x: Tensor) -> Tensor:
        """See `CpuProduct`."""
        product: Tensor = self._multiply(x, self.weight, self.bias, "none", [], "")
        return product

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """See `CpuProduct`."""
        both: Tensor = self._add(x, residual, self.weight, self.bias, "add")
        return both


class PackedProduct(CpuProduct):
    """Torch's product of bfloat16 rows with groups of 4-bit codes: sums in float32, scales and zeros in bfloat16."""

    def __init__(self, weight: GroupedTensor, memory: WeightMemory) -> None:
        codes, scales = _pack(weight)
        self.codes, self.scales = memory.place(codes), memory.place(scales)
        self._multiply = torch._weight_int4pack_mm_for_cpu

    @property
    def nbytes(self) -> int:
        """Size of codes, scales and zeros."""
        return self.codes.nbytes + self.scales.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """See `CpuProduct`; x is bfloat16."""
        product: Tensor = self._multiply(x, self.codes, GROUP, self.scales)
        return product


class BytePackedProduct(PackedProduct):
    """The same with codes of 8 bits: two matrices beside each other, both multiplied by the same x.

    One has the upper four bits, with sixteenfold scales, the other the lower four.
    """

    def __init__(self, weight: GroupedTensor, memory: WeightMemory) -> None:
        # c = 16 · (c >> 4) + (c & 15), and c & 15 = ((c & 15) − 8) + 8
        codes = torch.cat((weight.codes >> 4, (weight.codes & 15) - 8), dim=1)
        scales = torch.cat((16 * weight.scales, weight.scales), dim=1)
        zeros = torch.cat((torch.zeros_like(weight.zeros), weight.zeros + 8 * weight.scales), dim=1)
        super().__init__(GroupedTensor(codes, scales, zeros, 4), memory)

    def __call__(self, x: Tensor) -> Tensor:
        """See `CpuProduct`; x is bfloat16."""
        return super().__call__(x.repeat(1, 2))


class RoundedProduct(CpuProduct):
    """A product of bfloat16 rows, for activations of another dtype."""

    def __init__(self, product: CpuProduct) -> None:
        self.product = product

    def __call__(self, x: Tensor) -> Tensor:
        """See `CpuProduct`."""
        return self.product(x.bfloat16()).to(x.dtype)


class BiasedProduct(CpuProduct):
    """A product that has no bias of its own, and a bias."""

    def __init__(self, product: CpuProduct, bias: Tensor) -> None:
        self.product = product
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """See `CpuProduct`."""
        return self.product(x).add_(self.bias)


class ActivatedProduct(CpuProduct):
    """f(gate) · up, where both come from one product."""

    def __init__(self, product: CpuProduct, activation: GatedActivation) -> None:
        self.product = product
        self.activation = activation

    def __call__(self, x: Tensor) -> Tensor:
        """See `CpuProduct`."""
        return self.activation(self.product(x))


class BlockedGatedProduct(CpuProduct):
    """The same by two products of oneDNN's, which apply the activation and the gate to what they compute."""

    NAMES: ClassVar = {"silu": ("swish", ""), "gelu": ("gelu", "none"), "gelu_pytorch_tanh": ("gelu", "tanh")}
    """What oneDNN calls an activation."""

    def __init__(self, weight: Tensor, bias: Tensor | None, activation: str) -> None:
        """`weight` and `bias` have the gate's features first, then as many others."""
        gate, up = weight.chunk(2)
        self.gate = _in_blocks(gate.contiguous())
        self.up = _in_blocks(up.contiguous())
        biases = (None, None) if bias is None else bias.chunk(2)
        self.gate_bias: Tensor | None = biases[0]
        self.up_bias: Tensor | None = biases[1]
        self.activation, self.algorithm = self.NAMES[activation]
        self._activated = torch.ops.mkldnn._linear_pointwise.default
        self._multiplied = torch.ops.mkldnn._linear_pointwise.binary

    def __call__(self, x: Tensor) -> Tensor:
        """See `CpuProduct`."""
        gate = self._activated(x, self.gate, self.gate_bias, self.activation, [], self.algorithm)
        product: Tensor = self._multiplied(x, gate, self.up, self.up_bias, "mul")
        return product


class TwoFormProduct(CpuProduct):
    """The packed product for few rows, the dense one for more."""

    def __init__(self, packed: CpuProduct, dense: CpuProduct, few: int) -> None:
        self.packed = packed
        self.dense = dense
        self.few = few

    def __call__(self, x: Tensor) -> Tensor:
        """See `CpuProduct`."""
        return self.packed(x) if x.shape[0] <= self.few else self.dense(x)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """See `CpuProduct`."""
        return (self.packed if x.shape[0] <= self.few else self.dense).add(x, residual)


def make_product(
    weight: Tensor | GroupedTensor, bias: Tensor | None, dtype: torch.dtype, forms: ProductForms
) -> Formed:
    """The product with a matrix as it was read; `dtype` is that of the activations and of `bias`."""
    if (kernel := _make_kernel(weight, bias, None, dtype, forms)) is not None:
        return kernel
    return _form(
        weight,
        dtype,
        forms,
        make_packed=lambda grouped: _make_packed(grouped, bias, dtype, forms),
        make_dense=lambda plain: _make_dense(plain, bias, forms),
    )


def make_gated_product(
    weight: Tensor | GroupedTensor, bias: Tensor | None, activation: str, dtype: torch.dtype, forms: ProductForms
) -> Formed:
    """The same with a matrix that has a gate's features first, then as many others, and what comes of the two."""
    if (kernel := _make_kernel(weight, bias, activation, dtype, forms)) is not None:
        return kernel
    activate = GatedActivation(activation)

    def make_packed(grouped: GroupedTensor) -> Formed:
        packed = _make_packed(grouped, bias, dtype, forms)
        return Formed(ActivatedProduct(packed.product, activate), packed.weight_bytes)

    def make_dense(plain: Tensor) -> CpuProduct:
        if _takes_blocks(plain, forms) and activation in BlockedGatedProduct.NAMES:
            return BlockedGatedProduct(plain, bias, activation)
        return ActivatedProduct(_make_dense(plain, bias, forms), activate)

    return _form(weight, dtype, forms, make_packed=make_packed, make_dense=make_dense)


def make_tied_product(weight: Tensor | GroupedTensor, table: Tensor, forms: ProductForms) -> Formed:
    """The same with a matrix that another layer holds anyway, as the dense `table`."""
    if isinstance(weight, GroupedTensor) or forms.copies:
        kernel = _make_kernel(weight, None, None, table.dtype, forms)
        if kernel is not None:
            grouped = isinstance(weight, GroupedTensor)
            return kernel if grouped else Formed(kernel.product, 0, kernel.weight_bytes)
    blocked = forms.copies and _takes_blocks(table, forms)
    dense = _make_dense(table, None, forms) if blocked else DenseProduct(table, None)
    copy_bytes = table.nbytes if blocked else 0
    if isinstance(weight, Tensor) or not _is_packed(weight, forms):
        return Formed(dense, 0, copy_bytes)
    packed = _make_packed(weight, None, table.dtype, forms)
    both = TwoFormProduct(packed.product, dense, forms.packed_rows[weight.bits])
    return Formed(both, packed.weight_bytes, copy_bytes)


def _make_kernel(
    weight: Tensor | GroupedTensor, bias: Tensor | None, activation: str | None, dtype: torch.dtype, forms: ProductForms
) -> Formed | None:
    """The product by our kernel, where there is one and it takes the matrix."""
    gated = activation is not None
    if forms.library is None or dtype != torch.bfloat16 or activation not in ACTIVATIONS:
        return None
    if not takes_shape(*weight.shape, gated=gated):
        return None
    if isinstance(weight, Tensor):
        bits, packed = 16, PackedWeights(pack_bfloat16(weight.to(dtype), gated=gated))
    elif takes_groups(weight.scales, weight.zeros, weight.bits):
        bits, packed = weight.bits, pack_groups(weight.codes, weight.scales, weight.zeros, weight.bits, gated=gated)
    else:
        bits, packed = 16, PackedWeights(pack_bfloat16(weight.dequantize().to(dtype), gated=gated))
    outputs, inputs = weight.shape
    matrix = KernelMatrix(forms.memory.place(packed.blocks), None, outputs, inputs, bits, activation, packed.unit)
    return Formed(KernelProduct(forms.library, matrix, bias), matrix.blocks.nbytes)


def _form(
    weight: Tensor | GroupedTensor,
    dtype: torch.dtype,
    forms: ProductForms,
    *,
    make_packed: Callable[[GroupedTensor], Formed],
    make_dense: Callable[[Tensor], CpuProduct],
) -> Formed:
    if isinstance(weight, Tensor):
        return Formed(make_dense(weight), weight.nbytes)
    packs = _is_packed(weight, forms)
    if packs and not forms.copies:
        return make_packed(weight)
    plain = weight.dequantize().to(dtype)
    if not packs:
        return Formed(make_dense(plain), plain.nbytes)
    packed = make_packed(weight)
    both = TwoFormProduct(packed.product, make_dense(plain), forms.packed_rows[weight.bits])
    return Formed(both, packed.weight_bytes, plain.nbytes)


def _make_dense(weight: Tensor, bias: Tensor | None, forms: ProductForms) -> CpuProduct:
    return (BlockedProduct if _takes_blocks(weight, forms) else DenseProduct)(weight, bias)


def _in_blocks(weight: Tensor) -> Tensor:
    """In oneDNN's order of elements, and in huge pages: read by few rows, it is the memory that counts."""
    blocked: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)
    if hasattr(torch.ops.mkldnn, "data_ptr"):
        collapse_pages(torch.ops.mkldnn.data_ptr(blocked), torch.ops.mkldnn._nbytes(blocked))
    return blocked


def _takes_blocks(weight: Tensor, forms: ProductForms) -> bool:
    return forms.blocked and weight.dtype == torch.bfloat16


def _is_packed(weight: GroupedTensor, forms: ProductForms) -> bool:
    return weight.bits in forms.packed_rows and packable(weight.shape)


def _make_packed(weight: GroupedTensor, bias: Tensor | None, dtype: torch.dtype, forms: ProductForms) -> Formed:
    packed = (PackedProduct if weight.bits == 4 else BytePackedProduct)(weight, forms.memory)
    product: CpuProduct = packed if dtype == torch.bfloat16 else RoundedProduct(packed)
    return Formed(product if bias is None else BiasedProduct(product, bias), packed.nbytes)


def packable(shape: torch.Size) -> bool:
    """Whether the packed product takes a matrix of this shape."""
    return shape[0] % _PACKED_ROWS == 0 and shape[1] % GROUP == 0


def kernel_bytes(shape: torch.Size, bits: int) -> int | None:
    """Size of a matrix of codes of so many bits, or of bfloat16, as our kernels take it; None for what they do not."""
    return matrix_bytes(*shape, bits) if len(shape) == 2 and takes_shape(*shape, gated=False) else None


def packed_bytes(shape: torch.Size, bits: int) -> int:
    """Size of a packed matrix as torch takes it."""
    planes = bits // 4
    return planes * shape.numel() // 2 + planes * shape.numel() // GROUP * 4


def _pack(weight: GroupedTensor) -> tuple[Tensor, Tensor]:
    """What the operator takes: codes [out, in / 2], and [in / GROUP, out, 2] of scale and zero.

    Its weight is (code − 8) · scale + zero, with codes from 0 to 15.
    """
    pack = torch.ops.aten._convert_weight_to_int4pack_for_cpu.default
    starts = range(0, len(weight.codes), _PACKED_AT_ONCE)
    pieces = [pack(weight.codes[start : start + _PACKED_AT_ONCE].int() + 8, 1) for start in starts]
    scales = torch.stack((weight.scales, weight.zeros), dim=-1).to(torch.bfloat16)
    return torch.cat(pieces) if len(pieces) > 1 else pieces[0], scales.transpose(0, 1).contiguous()
