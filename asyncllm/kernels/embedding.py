"""Rows of the embedding table, by token ids that are on the device."""

from __future__ import annotations

import torch

from asyncllm.kernels.language import await_previous, ceil_div, jit, launch_next, overlap_options, tl

_BLOCK = 1024


@jit
def _embedding_kernel(
    output: tl.tensor,
    table: tl.tensor,
    token_ids: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    await_previous(OVERLAP)
    launch_next(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    token = tl.load(token_ids + row).to(tl.int64)
    tl.store(output + row * SIZE + columns, tl.load(table + token * SIZE + columns, mask=inside), mask=inside)


def embedding(table: torch.Tensor, token_ids: torch.Tensor, output: torch.Tensor | None = None) -> torch.Tensor:
    """table[token_ids]: table [vocabulary, d] dense, token_ids [n] of any integer type, every one inside the table.

    Returns `output` [n, d], a new tensor unless given.
    """
    rows, size = token_ids.shape[0], table.shape[1]
    if output is None:
        output = torch.empty((rows, size), dtype=table.dtype, device=table.device)
    if rows:
        _embedding_kernel[(rows, ceil_div(size, _BLOCK))](
            output, table, token_ids, SIZE=size, BLOCK=_BLOCK, **overlap_options(table.device)
        )
    return output


def embedding_reference(table: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """`embedding` in plain torch."""
    return table[token_ids.long()]
