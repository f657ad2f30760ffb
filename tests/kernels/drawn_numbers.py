"""A kernel that does nothing but draw."""

from __future__ import annotations

import torch

from asyncllm.kernels.language import jit, tl
from asyncllm.kernels.uniform_draw import uniform_draw


@jit
def _draw_numbers_kernel(
    numbers: tl.tensor, seeds: tl.tensor, positions: tl.tensor, choices: tl.tensor, STREAM: tl.constexpr
) -> None:
    i = tl.program_id(0)
    draw = uniform_draw(tl.load(seeds + i), tl.load(positions + i), tl.load(choices + i), STREAM)
    tl.store(numbers + i, draw)


def draw_numbers(seeds: torch.Tensor, positions: torch.Tensor, choices: torch.Tensor, stream: int) -> torch.Tensor:
    """[n] float64 of seeds and positions [n] int64 and choices [n] int32."""
    numbers = torch.full(seeds.shape, torch.nan, dtype=torch.float64, device=seeds.device)
    _draw_numbers_kernel[(len(seeds),)](numbers, seeds, positions, choices, STREAM=stream)
    return numbers
