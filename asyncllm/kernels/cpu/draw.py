"""Draws a token of each row of logits (`source/draw.h`)."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from asyncllm.kernels.cpu.build import Library
from asyncllm.kernels.cpu.matrix import aligned

_TILE = 256
"""`kDrawTile` of the source."""


def draw_tokens(library: Library, logits: Tensor, temperature: Tensor, uniform: Tensor) -> Tensor:
    """[rows] int64: of each row the first token at which the sum of the weights reaches `uniform` of their whole.

    `logits` [rows, vocabulary], `temperature` [rows] above 0 and `uniform` [rows] are float32; a token's weight is
    e^(logit / temperature). -1 where one of a row's logits is not a number, or +infinity, or none is above -infinity.
    Rows are apart from each other.
    """
    logits, temperature, uniform = logits.contiguous(), temperature.contiguous(), uniform.contiguous()
    rows, vocabulary = logits.shape
    found = torch.empty(rows, dtype=torch.int64)

    def draw(threads: int) -> float:
        threads = min(threads, max(1, rows))
        ends = aligned(8 * threads * (vocabulary // _TILE + 1))
        lost: float = library.functions.asyncllm_draw(
            ctypes.c_void_p(logits.data_ptr()),
            ctypes.c_int64(rows),
            ctypes.c_int64(vocabulary),
            ctypes.c_void_p(temperature.data_ptr()),
            ctypes.c_void_p(uniform.data_ptr()),
            ctypes.c_void_p(found.data_ptr()),
            ctypes.c_void_p(ends.data_ptr()),
            ctypes.c_int64(threads),
        )
        return lost

    library.team.run(draw)
    return found


def draw_reference(logits: Tensor, temperature: Tensor, uniform: Tensor) -> Tensor:
    """`draw_tokens` in plain torch and float64."""
    sums = torch.softmax(logits.double() / temperature.double()[:, None], -1).cumsum(-1)
    target = uniform.double()[:, None] * sums[:, -1:]
    found = torch.searchsorted(sums, target).squeeze(-1).clamp_(max=logits.shape[-1] - 1)
    return torch.where(sums[:, -1] > 0, found, -1)
