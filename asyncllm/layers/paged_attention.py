"""Attention over the paged cache with our kernels: what the GPU runner uses (`attention` is its counterpart)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from asyncllm.kernels.attention_plan import AttentionPlan
from asyncllm.kernels.paged_attention import paged_attention
from asyncllm.kernels.rope_cache import HeadNorm, rope_cache
from asyncllm.layers.attention import Attention, HeadShape, LayerCache, NormedAttention
from asyncllm.layers.parameter import Placement, Slot
from asyncllm.layers.rope import TabledRotation


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """What the layers of one cache group need to know of a step."""

    positions: Tensor  # [n] int32
    rows: Tensor  # [n] int32: the line of `block_table` of each token
    num_tokens: Tensor  # [1] int32: tokens past this many do not exist
    block_table: Tensor  # [rows, most blocks] int32
    plan: AttentionPlan  # of this step
    chunks: bool  # False: every sequence computes a single token


class PagedAttention:
    """One layer: optional norm of query and key heads, rotation, cache write, attention."""

    def __init__(self, shape: HeadShape, cache: LayerCache, placement: Placement) -> None:
        self.shape = shape
        self.cache = cache
        self.norm: HeadNorm | None = None
        self._deterministic = placement.deterministic

    def __call__(self, qkv: Tensor, rotation: TabledRotation, cache: Tensor, batch: PagedBatch) -> Tensor:
        """As `Attention` does: `qkv` [n, (num_heads + 2 · num_kv_heads) · head_dim] → [n, num_heads · head_dim]."""
        layer = cache[self.cache.index]
        query = rope_cache(
            qkv,
            batch.positions,
            batch.rows,
            batch.num_tokens,
            table=rotation.table,
            angles=rotation.lines,
            cache=layer,
            block_table=batch.block_table,
            norm=self.norm,
            uniform=self._deterministic,
        )
        attended = paged_attention(
            query,
            layer,
            batch.block_table,
            batch.plan,
            scale=self.shape.head_dim**-0.5,
            chunks=batch.chunks,
            overlap=True,
        )
        return attended.view(len(qkv), -1)


class NormedPagedAttention(PagedAttention):
    """Paged attention that takes the RMSNorm of each query and key head before the rotation (Qwen3)."""

    def __init__(self, shape: HeadShape, cache: LayerCache, eps: float, placement: Placement) -> None:
        super().__init__(shape, cache, placement)
        self.norm = HeadNorm(placement.empty(shape.head_dim), placement.empty(shape.head_dim), eps)

    def slots(self, prefix: str) -> Iterator[tuple[str, Slot]]:
        """The checkpoint tensors of this layer, under `prefix`."""
        assert self.norm is not None
        yield f"{prefix}q_norm.weight", Slot(self.norm.query, initial=1.0)
        yield f"{prefix}k_norm.weight", Slot(self.norm.key, initial=1.0)


class AttentionLayer(Protocol):
    """What a decoder layer needs of either form; `rotation`, `cache` and `batch` are of the kind that goes with it."""

    cache: LayerCache

    def __call__(self, qkv: Tensor, rotation: Any, cache: Any, batch: Any) -> Tensor:
        """[n, (num_heads + 2 · num_kv_heads) · head_dim] → [n, num_heads · head_dim]."""
        ...


def make_attention(shape: HeadShape, cache: LayerCache, norm_eps: float | None, placement: Placement) -> AttentionLayer:
    """Attention in the form that suits `placement`; `norm_eps` is None where heads have no norm."""
    if norm_eps is None:
        return PagedAttention(shape, cache, placement) if placement.kernels else Attention(shape, cache)
    return (NormedPagedAttention if placement.kernels else NormedAttention)(shape, cache, norm_eps, placement)
