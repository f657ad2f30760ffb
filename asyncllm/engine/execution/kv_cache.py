"""The layout of the KV cache: which layers share block tables, and what a block costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from asyncllm.engine.plan import CacheGroup, Int32Array
from asyncllm.layers.attention import LayerCache
from asyncllm.layers.weight_memory import take_memory

_MOST_GROUPS = 8
"""Each group costs a block table per row; past this many, cache is better wasted on padding a group."""


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """One pool for all layers. A block holds `block_size` positions of every layer of one group."""

    groups: tuple[CacheGroup, ...]
    layers: tuple[LayerCache, ...]  # of each layer of the model
    layers_per_group: int
    num_kv_heads: int
    head_dim: int
    block_size: int

    def block_bytes(self, dtype: torch.dtype) -> int:
        """Size of one block."""
        return self.layers_per_group * self.layer_block_bytes(dtype)

    def layer_block_bytes(self, dtype: torch.dtype) -> int:
        """One layer's part of a block."""
        return 2 * self.num_kv_heads * self.block_size * self.head_dim * dtype.itemsize

    def request_blocks(self, length: int, step_tokens: int) -> int:
        """The most blocks that a request of `length` positions holds, when a step computes `step_tokens` at most."""
        whole = -(-length // self.block_size)
        held = 0
        for group in self.groups:
            # a window may start inside a block, and steps that are launched keep their part
            part = whole if group.window is None else -(-(group.window + 2 * step_tokens) // self.block_size) + 1
            held += min(whole, part)
        return held

    def allocate(self, num_blocks: int, dtype: torch.dtype) -> Tensor:
        """[layers_per_group, num_blocks + 1, block_size, 2 (keys, values), kv_heads, head_dim] of zeros in main memory;
        block 0 is the null block. Memory is taken page by page, when first written.
        """
        shape = (self.layers_per_group, num_blocks + 1, self.block_size, 2, self.num_kv_heads, self.head_dim)
        return take_memory((num_blocks + 1) * self.block_bytes(dtype)).view(dtype).view(shape)


def make_cache_layout(windows: Sequence[int | None], num_kv_heads: int, head_dim: int, block_size: int) -> CacheLayout:
    """Cut layers with these windows into groups of one window each, and of about equal size."""
    kinds = list(dict.fromkeys(windows))
    counts = [sum(window == kind for window in windows) for kind in kinds]
    size = min(counts)
    while sum(-(-count // size) for count in counts) > max(_MOST_GROUPS, len(kinds)):
        size += 1
    groups: list[CacheGroup] = []
    places: dict[int, LayerCache] = {}
    for kind in kinds:
        members = [layer for layer, window in enumerate(windows) if window == kind]
        for start in range(0, len(members), size):
            for index, layer in enumerate(members[start : start + size]):
                places[layer] = LayerCache(len(groups), index)
            groups.append(CacheGroup(kind))
    return CacheLayout(
        groups=tuple(groups),
        layers=tuple(places[layer] for layer in range(len(windows))),
        layers_per_group=size,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
    )


def allocate_device_cache(layout: CacheLayout, num_blocks: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[layers_per_group, 2, num_blocks + 1, kv_heads, block_size, head_dim] of zeros, the order that kernels read: what
    is never written is read by masked products, and must be finite.
    """
    shape = (layout.layers_per_group, 2, num_blocks + 1, layout.num_kv_heads, layout.block_size, layout.head_dim)
    return torch.zeros(shape, dtype=dtype, device=device)


def copy_blocks(cache: Tensor, pairs: Int32Array) -> None:
    """Copy blocks of all layers: `pairs` [c, 2] of (source, destination); every source is read before any write."""
    source, destination = torch.from_numpy(pairs.T.astype(np.int64))
    cache[:, destination] = cache[:, source]
