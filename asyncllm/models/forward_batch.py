"""What one forward pass works on."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from asyncllm.layers.attention import AttentionBatch


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """The tokens of a step, flattened over rows, in the order that `AttentionBatch` wants."""

    token_ids: Tensor  # [n] int64
    positions: Tensor  # [n] int64
    lengths: Tensor | None  # [n] int64, for a rope that depends on length: see `layers/rope.py`
    sampled: Tensor  # [s] int64: the tokens whose logits are wanted
    attention: tuple[AttentionBatch, ...]  # one per cache group
    cache: Tensor  # [layers of a group, 2, blocks, kv_heads, block_size, head_dim], keys and values
