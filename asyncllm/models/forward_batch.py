"""What one forward pass works on."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from asyncllm.layers.attention import AttentionBatch, CacheLayer
from asyncllm.layers.kernel_decoder import KernelBatch
from asyncllm.layers.paged_attention import PagedBatch


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """The tokens of a step, flattened over rows, in the order that `AttentionBatch` wants.

    Integers are int64 on the CPU, int32 on a GPU.
    """

    token_ids: Tensor  # [n]
    positions: Tensor  # [n]
    lengths: Tensor | None  # [n], for a rope that depends on length: see `layers/rope.py`
    sampled: Tensor | None  # [s]: the tokens whose logits are wanted; None: all, in their order
    attention: tuple[AttentionBatch, ...] | tuple[PagedBatch, ...]  # one per cache group
    cache: tuple[CacheLayer, ...] | Tensor
    """Of each layer of a group; on a GPU [layers of a group, 2, blocks, kv_heads, block_size, head_dim]."""
    layers: KernelBatch | None = None  # for all layers as one kernel of the processor; the two above are empty then
