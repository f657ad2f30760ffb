"""Attention over the paged cache, in plain torch: what the CPU runner uses.

One layer's part of the cache is [2 (keys, values), kv_heads, blocks, block_size, head_dim], so that a history whose
blocks follow each other is read where it lies, as one view. Of the tokens of a step those come first that are alone in
their row (a decode step, a chunk of one); where they do not lie so, they are attended in buckets of rows with about as
long a history, few enough for what they read to stay in the processor's cache. Each longer chunk is attended by itself.
So no product is padded to the longest row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from asyncllm.layers.parameter import Placement, Slot
from asyncllm.layers.rope import Rotation


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Heads of a layer; query head i reads KV head i // (num_heads / num_kv_heads)."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Where a layer keeps keys and values."""

    group: int  # whose block tables it uses
    index: int  # its layer in the cache tensor


@dataclass(frozen=True, slots=True)
class CacheLayer:
    """One layer's part of the cache, in the shapes it is used in."""

    keys: Tensor  # [kv_heads, 1, blocks · block_size, head_dim]
    values: Tensor  # the same
    lines: Tensor  # [2 · kv_heads · blocks · block_size, head_dim]
    blocks: Tensor  # [2 · kv_heads · blocks, block_size · head_dim]

    @classmethod
    def of(cls, layer: Tensor) -> CacheLayer:
        """Views of [2, kv_heads, blocks, block_size, head_dim]."""
        _, heads, _, size, dim = layer.shape
        keys, values = layer.view(2, heads, 1, -1, dim)
        return cls(keys, values, layer.view(-1, dim), layer.view(-1, size * dim))


class Source(Protocol):
    """Where keys and values of one or more sequences are."""

    def read(self, layer: CacheLayer, scratch: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values, [sequences · kv_heads, 1, positions, head_dim] each; `scratch` may be overwritten."""
        ...


@dataclass(frozen=True, slots=True)
class InPlace:
    """One sequence whose positions follow each other in the cache."""

    first: int  # of the cache's positions
    count: int

    def read(self, layer: CacheLayer, scratch: Tensor) -> tuple[Tensor, Tensor]:
        """See `Source`."""
        return layer.keys.narrow(2, self.first, self.count), layer.values.narrow(2, self.first, self.count)


@dataclass(frozen=True, slots=True)
class Gathered:
    """Sequences whose blocks lie anywhere, as many of each."""

    blocks: Tensor  # [2 · sequences · kv_heads · b] int64: the lines of `CacheLayer.blocks`, keys first
    sequence_heads: int  # sequences · kv_heads
    first: int  # positions `first` to `last` of the b gathered blocks are wanted
    last: int

    def read(self, layer: CacheLayer, scratch: Tensor) -> tuple[Tensor, Tensor]:
        """See `Source`."""
        gathered = torch.index_select(layer.blocks, 0, self.blocks, out=scratch[: len(self.blocks)])
        keys, values = gathered.view(2, self.sequence_heads, 1, -1, layer.lines.shape[1])[
            :, :, :, self.first : self.last
        ]
        return keys, values


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tokens `start` to `stop`, each alone in its row, with histories of about the same length."""

    start: int
    stop: int
    source: Source
    mask: Tensor | None  # [rows · kv_heads, 1, 1, positions]: 0, or −inf where a row has nothing; None: all have all


@dataclass(frozen=True, slots=True)
class Tile:
    """Queries `start` to `stop` of a span, and the keys `first` to `last` of it that some of them read."""

    start: int
    stop: int
    first: int
    last: int
    mask: Tensor | None  # [stop − start, last − first]; None: causal, and queries are the same tokens as keys


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens `start` to `stop`: a chunk of one row."""

    start: int
    stop: int
    source: Source | None  # None: the chunk is the whole history
    tiles: tuple[Tile, ...]


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """What the layers of one cache group need to know of a step."""

    write: Tensor  # [n · 2 · kv_heads] int64: the lines of `CacheLayer.lines` for keys, then values, of each token
    buckets: tuple[Bucket, ...]
    spans: tuple[Span, ...]
    scratch: Tensor  # [m, block_size · head_dim]: room for what the largest bucket or span gathers


class Attention:
    """One layer: optional norm of query and key heads, rotation, cache write, attention."""

    def __init__(self, shape: HeadShape, cache: LayerCache) -> None:
        self.shape = shape
        self.cache = cache

    def prepare(self, qk: Tensor, rotation: Rotation) -> None:
        """Make queries and keys [n, num_heads + num_kv_heads, head_dim] ready, in place."""
        rotation.apply_(qk)

    def __call__(
        self, qkv: Tensor, rotation: Rotation, cache: Sequence[CacheLayer], batch: AttentionBatch
    ) -> Tensor:
        """`qkv` [n, (num_heads + 2 · num_kv_heads) · head_dim], which is overwritten → [n, num_heads · head_dim].

        `cache`, one entry a layer of the group, takes the tokens' keys and values first.
        """
        shape, layer = self.shape, cache[self.cache.index]
        heads = qkv.view(qkv.shape[0], -1, shape.head_dim)
        self.prepare(heads.narrow(1, 0, shape.num_heads + shape.num_kv_heads), rotation)
        key_values = heads.narrow(1, shape.num_heads, 2 * shape.num_kv_heads)
        layer.lines.index_copy_(0, batch.write, key_values.reshape(-1, shape.head_dim))
        queries = heads.narrow(1, 0, shape.num_heads)
        found = [self._attend_bucket(bucket, queries, layer, batch.scratch) for bucket in batch.buckets]
        for span in batch.spans:
            found += self._attend_span(span, queries, key_values, layer, batch.scratch)
        return found[0] if len(found) == 1 else torch.cat(found)

    def _attend_bucket(self, bucket: Bucket, queries: Tensor, layer: CacheLayer, scratch: Tensor) -> Tensor:
        """`queries` [n, num_heads, dim] of the step → [rows, num_heads · dim]."""
        shape, rows = self.shape, bucket.stop - bucket.start
        keys, values = bucket.source.read(layer, scratch)
        # Rows and KV heads together are the batch, and the query heads that share a KV head the queries.
        attended = functional.scaled_dot_product_attention(
            queries.narrow(0, bucket.start, rows).reshape(-1, 1, shape.group, shape.head_dim),
            keys,
            values,
            attn_mask=bucket.mask,
        )
        return attended.view(rows, -1)

    def _attend_span(
        self, span: Span, queries: Tensor, key_values: Tensor, layer: CacheLayer, scratch: Tensor
    ) -> Iterator[Tensor]:
        """The parts of [n of the span, num_heads · dim]."""
        shape, count = self.shape, span.stop - span.start
        # [kv_heads, group, n, dim]
        queries = queries.narrow(0, span.start, count).view(count, -1, shape.group, shape.head_dim).permute(1, 2, 0, 3)
        if span.source is None:
            own = key_values.narrow(0, span.start, count).transpose(0, 1).unsqueeze(1)
            keys, values = own.chunk(2)
        else:
            keys, values = span.source.read(layer, scratch)
        # KV heads are the batch, the query heads that share one are the heads: keys need no repeating.
        keys, values = (each.expand(-1, shape.group, -1, -1) for each in (keys, values))
        for tile in span.tiles:
            attended = functional.scaled_dot_product_attention(
                queries[:, :, tile.start : tile.stop],
                keys[:, :, tile.first : tile.last],
                values[:, :, tile.first : tile.last],
                attn_mask=tile.mask,
                is_causal=tile.mask is None,
            )
            yield attended.permute(2, 0, 1, 3).reshape(tile.stop - tile.start, -1)


class NormedAttention(Attention):
    """Attention that takes the RMSNorm of each query and key head before the rotation (Qwen3)."""

    def __init__(self, shape: HeadShape, cache: LayerCache, eps: float, placement: Placement) -> None:
        super().__init__(shape, cache)
        self.weight = placement.empty(2, shape.head_dim)  # queries', keys'
        self.eps = eps
        self._head_kinds = torch.tensor(
            [0] * shape.num_heads + [1] * shape.num_kv_heads, dtype=torch.int64, device=placement.device
        )

    def prepare(self, qk: Tensor, rotation: Rotation) -> None:
        """Norm, then rotation, in place."""
        normed = functional.rms_norm(qk, (self.shape.head_dim,), None, self.eps)
        torch.mul(normed, self.weight[self._head_kinds], out=qk)
        rotation.apply_(qk)

    def slots(self, prefix: str) -> Iterator[tuple[str, Slot]]:
        """The checkpoint tensors of this layer, under `prefix`."""
        yield f"{prefix}q_norm.weight", Slot(self.weight[0], initial=1.0)
        yield f"{prefix}k_norm.weight", Slot(self.weight[1], initial=1.0)
