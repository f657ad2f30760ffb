"""GGUF blocks as groups of small integers, for the types that have one scale for every 32 weights.

The layouts are those of https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h. A type that is not here
(Q6_K has a scale for every 16 weights) is dequantised instead. Codes are centred on 0, so that zeros stay small and
may be rounded: Q4_1's d·q + m with q from 0 to 15 becomes d·(q − 8) + (m + 8·d).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from asyncllm.weights.grouped import GROUP, GroupedTensor


def group_bits(type_name: str) -> int | None:
    """Bits of a code of this tensor type; None where it has no such groups."""
    return _TYPES[type_name][0] if type_name in _TYPES else None


def read_groups(packed: Tensor, type_name: str) -> GroupedTensor:
    """Rows of packed bytes [rows, row_bytes] uint8 of a type that `group_bits` knows."""
    bits, block_bytes, read = _TYPES[type_name]
    rows = len(packed)
    codes, scales, zeros = read(packed.view(-1, block_bytes))
    return GroupedTensor(codes.view(rows, -1), scales.view(rows, -1), zeros.view(rows, -1), bits)


Groups = tuple[Tensor, Tensor, Tensor]
"""Codes [blocks, groups, GROUP] int8, scales and zeros [blocks, groups] float32."""


def _q4_0(blocks: Tensor) -> Groups:
    scales = _halves(blocks[:, :2])
    return _nibbles(blocks[:, 2:]).sub_(8).view(torch.int8), scales, torch.zeros_like(scales)


def _q4_1(blocks: Tensor) -> Groups:
    scales, minimum = _halves(blocks[:, :2]), _halves(blocks[:, 2:4])
    return _nibbles(blocks[:, 4:]).sub_(8).view(torch.int8), scales, minimum + 8 * scales


def _q5_0(blocks: Tensor) -> Groups:
    scales = _halves(blocks[:, :2])
    return _fifth_bits(_nibbles(blocks[:, 6:]), blocks[:, 2:6]), scales, torch.zeros_like(scales)


def _q5_1(blocks: Tensor) -> Groups:
    scales, minimum = _halves(blocks[:, :2]), _halves(blocks[:, 2:4])
    return _fifth_bits(_nibbles(blocks[:, 8:]), blocks[:, 4:8]), scales, minimum + 16 * scales


def _q8_0(blocks: Tensor) -> Groups:
    scales = _halves(blocks[:, :2])
    return blocks[:, 2:].contiguous().view(torch.int8), scales, torch.zeros_like(scales)


def _q4_k(blocks: Tensor) -> Groups:
    scales, minimum = _k_scales(blocks)
    return _k_nibbles(blocks[:, 16:]).sub_(8).view(torch.int8), scales, minimum + 8 * scales


def _q5_k(blocks: Tensor) -> Groups:
    scales, minimum = _k_scales(blocks)
    high = blocks[:, None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None] & 1  # [blocks, 8, GROUP]
    codes = _k_nibbles(blocks[:, 48:]) + (high << 4)
    return codes.sub_(16).view(torch.int8), scales, minimum + 16 * scales


_TYPES: dict[str, tuple[int, int, Callable[[Tensor], Groups]]] = {
    "Q4_0": (4, 18, _q4_0),
    "Q4_1": (4, 20, _q4_1),
    "Q4_K": (4, 144, _q4_k),
    "Q5_0": (8, 22, _q5_0),
    "Q5_1": (8, 24, _q5_1),
    "Q5_K": (8, 176, _q5_k),
    "Q8_0": (8, 34, _q8_0),
}


def _halves(data: Tensor) -> Tensor:
    """[blocks, 2] bytes, a float16 → [blocks, 1] float32."""
    return data.contiguous().view(torch.float16).float()


def _nibbles(data: Tensor) -> Tensor:
    """[blocks, 16] bytes → [blocks, 1, 32]: the low halves, then the high ones."""
    return torch.cat((data & 15, data >> 4), dim=1)[:, None]


def _fifth_bits(codes: Tensor, bits: Tensor) -> Tensor:
    """Codes [blocks, 1, 32] with a fifth bit from [blocks, 4] bytes, minus 16."""
    fifth = (bits[:, :, None] >> torch.arange(8, dtype=torch.uint8) & 1).view(len(bits), 1, GROUP)
    return codes.add_(fifth << 4).sub_(16).view(torch.int8)


def _k_nibbles(data: Tensor) -> Tensor:
    """[blocks, 128] bytes → [blocks, 8, 32]: 32 bytes hold a group in their low halves, the next in the high ones."""
    halves = data.reshape(len(data), 4, 1, GROUP)
    return torch.cat((halves & 15, halves >> 4), dim=2).view(len(data), 8, GROUP)


def _k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and minimum of the eight groups of each block: [blocks, 8] float32 each.

    Six bits each, in 12 bytes: 4 with the scales of the first groups, 4 with the minima, 4 with the low bits of the
    others, whose upper bits fill the first eight bytes.
    """
    factor, minimum_factor = _halves(blocks[:, :2]), _halves(blocks[:, 2:4])
    first, second, low = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat((first & 63, (low & 15) | ((first >> 6) << 4)), dim=1)
    minima = torch.cat((second & 63, (low >> 4) | ((second >> 6) << 4)), dim=1)
    return factor * scales, -minimum_factor * minima
