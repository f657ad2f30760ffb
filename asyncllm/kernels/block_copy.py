"""Copies of whole KV blocks in every layer of the pool: what copy on write needs."""

from __future__ import annotations

import torch

from asyncllm.kernels.language import ceil_div, jit, tl

_BLOCK = 4096


@jit
def _block_copy_kernel(
    pool: tl.tensor, pairs: tl.tensor, blocks: tl.int64, SIZE: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    pair = tl.program_id(0)
    plane = tl.program_id(1).to(tl.int64) * blocks  # keys or values of one layer
    columns = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    source = tl.load(pairs + 2 * pair)
    destination = tl.load(pairs + 2 * pair + 1)
    values = tl.load(pool + (plane + source) * SIZE + columns, mask=inside)
    tl.store(pool + (plane + destination) * SIZE + columns, values, mask=inside)


def copy_blocks(pool: torch.Tensor, pairs: torch.Tensor) -> None:
    """Copy block pairs[i, 0] over block pairs[i, 1] in every layer, for all i at once.

    pool [layers, 2, blocks, kv_heads, block_size, head_dim], dense; pairs [n, 2] of int32 or int64 on its device. No
    destination may be another pair's source or destination.
    """
    layers, _, blocks, kv_heads, block_size, head_dim = pool.shape
    size = kv_heads * block_size * head_dim
    pool = pool.view(torch.uint8) if pool.dtype.itemsize == 1 else pool
    if len(pairs):
        _block_copy_kernel[(len(pairs), 2 * layers, ceil_div(size, _BLOCK))](
            pool, pairs, blocks, SIZE=size, BLOCK=_BLOCK
        )


def copy_blocks_reference(pool: torch.Tensor, pairs: torch.Tensor) -> None:
    """`copy_blocks` in plain torch, which moves no 8-bit floats by index, but bytes."""
    pool = pool.view(torch.uint8) if pool.dtype.itemsize == 1 else pool
    pool[:, :, pairs[:, 1].long()] = pool[:, :, pairs[:, 0].long()]
