"""Weights in the order that the kernels read (`source/matrix.h`), and their product."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional

from asyncllm.kernels.cpu.build import Library
from asyncllm.kernels.cpu.team import TeamTime

GROUP = 32
"""Input features that share a scale and a zero, and of which a matrix has a multiple."""
FEATURES = 16
"""Output features of a block, of which a matrix has a multiple."""
ORDINARY = 6.0
"""Times the root of the mean of a row's squares: up to so large, numbers are ordinary (`mixed_rows`)."""
ACTIVATIONS = {None: 0, "silu": 1, "gelu": 2, "gelu_pytorch_tanh": 3}
"""By the name of a Hugging Face config's `hidden_act`, the number of `source/simd.h`."""


class MatrixStruct(ctypes.Structure):
    """`Matrix` of `source/matrix.h`."""

    _fields_ = (
        ("blocks", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("outputs", ctypes.c_int64),
        ("inputs", ctypes.c_int64),
        ("bits", ctypes.c_int64),
        ("activation", ctypes.c_int64),
        ("unit", ctypes.c_double),
    )


@dataclass(frozen=True)
class KernelMatrix:
    """A matrix as the kernels take it: with an activation, half of the outputs are a gate, and come first in a file."""

    blocks: Tensor  # uint8, at a multiple of 64 bytes
    bias: Tensor | None  # [outputs] float32, in the order of the blocks
    outputs: int
    inputs: int
    bits: int  # of a weight: 4, 8, or 16 for bfloat16
    activation: str | None
    unit: float = 1.0  # what scales and zeros are multiples of

    @cached_property
    def struct(self) -> MatrixStruct:
        """What a kernel reads; it points into this matrix."""
        return MatrixStruct(
            self.blocks.data_ptr(),
            None if self.bias is None else self.bias.data_ptr(),
            self.outputs,
            self.inputs,
            self.bits,
            ACTIVATIONS[self.activation],
            self.unit,
        )

    @property
    def width(self) -> int:
        """Features of a row of the product."""
        return self.outputs if self.activation is None else self.outputs // 2


def takes_shape(outputs: int, inputs: int, *, gated: bool) -> bool:
    """Whether a matrix can be brought into blocks."""
    return outputs > 0 and outputs % (2 * FEATURES if gated else FEATURES) == 0 and inputs % GROUP == 0


def takes_groups(scales: Tensor, zeros: Tensor, bits: int) -> bool:
    """Whether float16 can hold scales and zeros, as multiples of a unit."""
    if not (scales.isfinite().all() and zeros.isfinite().all()):
        return False
    exact = scales / _unit(scales, zeros, bits)
    return bool(((exact.half().float() - exact).abs() <= exact.abs() * 2**-10).all())


def matrix_bytes(outputs: int, inputs: int, bits: int) -> int:
    """Size of the blocks of a matrix."""
    groups = outputs * inputs // GROUP
    return outputs * inputs * bits // 8 + (4 * groups if bits < 16 else 0)


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """Blocks of a matrix, and what the scales and zeros in them are multiples of."""

    blocks: Tensor
    unit: float = 1.0


def pack_groups(codes: Tensor, scales: Tensor, zeros: Tensor, bits: int, *, gated: bool = False) -> PackedWeights:
    """Blocks of a matrix whose weights are `codes · scales + zeros`.

    `codes` [outputs, inputs] int8 from −2^(bits − 1) on, with 4 or 8 bits; `scales`, `zeros` [outputs, inputs / GROUP].
    """
    outputs, inputs = codes.shape
    groups = inputs // GROUP
    order = _order(outputs, gated)
    unsigned = codes[order].view(torch.uint8) + 2 ** (bits - 1)  # modulo 256
    if bits == 4:
        # of 8 inputs: bit 0 of their place tells the half of a lane, the others the place in it
        nibbles = unsigned.view(-1, FEATURES, groups, 4, 4, 2).permute(0, 2, 3, 1, 5, 4)
        packed = nibbles[..., 0::2] | nibbles[..., 1::2] << 4  # [blocks, groups, octets, features, halves, bytes]
    else:
        packed = unsigned.view(-1, FEATURES, groups, 8, 2, 2).permute(0, 2, 3, 1, 5, 4)
    unit = _unit(scales, zeros, bits)
    numbers = [
        (values[order] / unit).half().view(-1, FEATURES, groups).transpose(1, 2).contiguous().view(torch.uint8)
        for values in (scales, _lowest(scales, zeros, bits))
    ]
    return PackedWeights(torch.cat((packed.flatten(2), *numbers), dim=2).flatten(), unit)


def pack_bfloat16(weight: Tensor, *, gated: bool = False) -> Tensor:
    """Blocks of a matrix [outputs, inputs] of bfloat16."""
    outputs, inputs = weight.shape
    blocks = weight[_order(outputs, gated)].view(-1, FEATURES, inputs // GROUP, GROUP // 2, 2).permute(0, 2, 3, 1, 4)
    return blocks.contiguous().view(torch.uint8).flatten()


def pack_bias(bias: Tensor, *, gated: bool = False) -> Tensor:
    """A bias in the order of the blocks."""
    return bias.float()[_order(len(bias), gated)]


def kernel_product(
    library: Library,
    x: Tensor,
    matrix: KernelMatrix,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """x Wᵀ + b, and the activation, of x [n, inputs] bfloat16 or of its RMSNorm with the weights `norm` [inputs].

    [n, width] in bfloat16 or float32. Each row's result depends on how many rows there are, in its last bits, but not
    on what other rows hold, nor on how many threads there are.
    """
    x = x.contiguous()
    rows = len(x)
    out = torch.empty(rows, matrix.width, dtype=dtype)
    if not rows:
        return out
    functions, struct = library.functions, ctypes.byref(matrix.struct)

    def multiply(threads: int) -> TeamTime:
        workspace = aligned(functions.asyncllm_product_workspace_bytes(struct, rows, threads))
        lost: float = functions.asyncllm_product(
            struct,
            x.data_ptr(),
            None if norm is None else norm.data_ptr(),
            eps,
            rows,
            out.data_ptr(),
            dtype == torch.float32,
            workspace.data_ptr(),
            threads,
            library.tiles,
        )
        return TeamTime(lost)

    library.team.run(multiply, (matrix.outputs, matrix.inputs, matrix.bits, rows))
    return out


def aligned(size: int) -> Tensor:
    """[size] bytes at a multiple of 64, which is what torch allocates."""
    memory = torch.empty(size, dtype=torch.uint8)
    assert memory.data_ptr() % 64 == 0
    return memory


def product_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None
) -> Tensor:
    """`kernel_product` without a norm, in plain torch and the dtype of x; `weight` and `bias` as in a file."""
    product = functional.linear(x, weight, bias)
    if activation is None:
        return product
    gate, up = product.chunk(2, dim=-1)
    if activation == "silu":
        return functional.silu(gate).mul_(up)
    return functional.gelu(gate, approximate="tanh" if activation == "gelu_pytorch_tanh" else "none") * up


def mixed_rows(x: Tensor) -> Tensor:
    """Rows [n, inputs] as products of 4-bit codes by AVX2 take them, in plain torch.

    Each group is rounded to multiples of a 127th of its largest number; those with a number that is large for its row
    bear most of the error of that, and are rounded to multiples of a 32,512th.
    """
    groups = x.view(len(x), -1, GROUP)
    largest = groups.abs().amax(-1, keepdim=True)
    ordinary = ORDINARY * x.square().mean(-1)[..., None, None].sqrt()
    unit = torch.where(largest <= ordinary, largest / 127, largest / 32512)
    return torch.where(unit > 0, (groups / unit).round() * unit, groups).flatten(1)


def _lowest(scales: Tensor, zeros: Tensor, bits: int) -> Tensor:
    """Of each group, the weight whose code is the lowest: what an unsigned code counts from."""
    return zeros.sub(scales, alpha=2 ** (bits - 1))


def _unit(scales: Tensor, zeros: Tensor, bits: int) -> float:
    """The power of two that makes the largest weight lie between 128 and 256.

    So those of which float16 has few bits, or none, are a millionth of it.
    """
    lowest = _lowest(scales, zeros, bits)
    largest = float(torch.maximum(lowest.abs(), (lowest + (2**bits - 1) * scales).abs()).max())
    return 2.0 ** (math.frexp(largest)[1] - 8)


def _order(outputs: int, gated: bool) -> Tensor:
    """The outputs in the order of the blocks: those of a gate and of what is gated take turns."""
    order = torch.arange(outputs)
    return order.view(2, -1, FEATURES).transpose(0, 1).flatten() if gated else order
