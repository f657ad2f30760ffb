"""Draws a token of each row of logits (`source/draw.h`, `source/philox.h`)."""

from __future__ import annotations

import torch
from torch import Tensor

from asyncllm.kernels.cpu.build import Library
from asyncllm.kernels.cpu.matrix import aligned
from asyncllm.kernels.cpu.team import TeamTime


def draw_tokens(library: Library, logits: Tensor, temperature: Tensor, uniform: Tensor) -> Tensor:
    """[rows] int64: of each row the first token at which the sum of the weights reaches `uniform` of their whole.

    `logits` [rows, vocabulary], `temperature` [rows] above 0 and `uniform` [rows] are float32; a token's weight is
    e^(logit / temperature). -1 where one of a row's logits is not a number, or +infinity, or none is above -infinity.
    Rows are apart from each other.
    """
    logits, temperature, uniform = logits.contiguous(), temperature.contiguous(), uniform.contiguous()
    rows, vocabulary = logits.shape
    found = torch.empty(rows, dtype=torch.int64)

    def draw(threads: int) -> TeamTime:
        threads = min(threads, max(1, rows))
        workspace = aligned(library.functions.asyncllm_draw_workspace_bytes(vocabulary, threads))
        lost: float = library.functions.asyncllm_draw(
            logits.data_ptr(),
            rows,
            vocabulary,
            temperature.data_ptr(),
            uniform.data_ptr(),
            found.data_ptr(),
            workspace.data_ptr(),
            threads,
        )
        return TeamTime(lost)

    library.team.run(draw)
    return found


def draw_uniform(library: Library, seed: Tensor, position: Tensor, choice: Tensor, stream: int = 0) -> Tensor:
    """[rows] float32 of (0, 1]: the same for the same seed, position, choice [rows] int64 and stream.

    A seed has 64 bits, of which the sign is one. It does not give up the interpreter.
    """
    seed, position, choice = seed.contiguous(), position.contiguous(), choice.contiguous()
    out = torch.empty(len(seed))
    library.short.asyncllm_uniform(
        seed.data_ptr(), position.data_ptr(), choice.data_ptr(), stream, len(seed), out.data_ptr()
    )
    return out


def uniform_reference(seed: int, position: int, choice: int, stream: int = 0) -> float:
    """One number of `draw_uniform`."""
    low = 2**32 - 1
    counter, key = [position & low, position >> 32, choice, stream], [seed & low, seed >> 32 & low]
    for _ in range(10):
        first, second = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [second >> 32 ^ counter[1] ^ key[0], second & low, first >> 32 ^ counter[3] ^ key[1], first & low]
        key = [key[0] + 0x9E3779B9 & low, key[1] + 0xBB67AE85 & low]
    return float(torch.tensor((counter[0] >> 8) + 0.5) * 2.0**-24)


def draw_reference(logits: Tensor, temperature: Tensor, uniform: Tensor) -> Tensor:
    """`draw_tokens` in plain torch and float64."""
    sums = torch.softmax(logits.double() / temperature.double()[:, None], -1).cumsum(-1)
    target = uniform.double()[:, None] * sums[:, -1:]
    found = torch.searchsorted(sums, target).squeeze(-1).clamp_(max=logits.shape[-1] - 1)
    return torch.where(sums[:, -1] > 0, found, -1)
