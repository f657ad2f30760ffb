"""Attention over the paged cache, in plain torch: what the CPU runner uses.

One layer's part of the cache is [blocks, block_size, 2 (keys, values), kv_heads, head_dim]: a token's keys and values
are written as one line, a block is gathered as one, and a history whose blocks follow each other is read where it lies,
as one view. Of the tokens of a step those come first that are alone in their row (a decode step, a chunk of one); where
they do not lie so, they are attended in buckets of rows with about as long a history, few enough for what they read to
stay in the processor's cache. Chunks that begin their rows need nothing from the cache, and short ones of about one
length are attended together. Each other chunk is attended by itself. So no product is padded to the longest row.
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

    keys: Tensor  # [1, kv_heads, blocks · block_size, head_dim]
    values: Tensor  # the same
    lines: Tensor  # [blocks · block_size, 2 · kv_heads · head_dim]
    blocks: Tensor  # [blocks, block_size · 2 · kv_heads · head_dim]

    @classmethod
    def of(cls, layer: Tensor) -> CacheLayer:
        """Views of [blocks, block_size, 2, kv_heads, head_dim]."""
        lines = layer.flatten(0, 1)
        keys, values = _heads_first(lines.unsqueeze(0))
        return cls(keys, values, lines.flatten(1), layer.flatten(1))


class Source(Protocol):
    """Where keys and values of one or more sequences are."""

    def read(self, layer: CacheLayer, scratch: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values, [sequences, kv_heads, positions, head_dim] each; `scratch` may be overwritten."""
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

    blocks: Tensor  # [sequences · b] int64
    sequences: int
    first: int  # positions `first` to `last` of the b gathered blocks are wanted
    last: int

    def read(self, layer: CacheLayer, scratch: Tensor) -> tuple[Tensor, Tensor]:
        """See `Source`."""
        _, heads, _, dim = layer.keys.shape
        gathered = torch.index_select(layer.blocks, 0, self.blocks, out=scratch[: len(self.blocks)])
        return _heads_first(gathered.view(self.sequences, -1, 2, heads, dim)[:, self.first : self.last])


def _heads_first(lines: Tensor) -> tuple[Tensor, Tensor]:
    """Views of [sequences, positions, 2, kv_heads, head_dim]: keys and values, each as attention takes them."""
    keys, values = lines.permute(2, 0, 3, 1, 4)
    return keys, values


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tokens `start` to `stop`, each alone in its row, with histories of about the same length."""

    start: int
    stop: int
    source: Source
    mask: Tensor | None  # [rows, 1, 1, positions]: 0, or −inf where a row has nothing; None: all have all


@dataclass(frozen=True, slots=True)
class Padding:
    """Chunks of several lengths as if all had that of the longest. What is past a chunk's end comes after all of its
    tokens, so none of them sees it."""

    tokens: Tensor  # [chunks · longest] int64: the token of the step at each place, past the end any
    places: Tensor  # [n of the chunks] int64: where each token is among these


@dataclass(frozen=True, slots=True)
class FreshChunks:
    """Tokens `start` to `stop`: chunks that begin their rows, and that no window cuts."""

    start: int
    stop: int
    count: int
    padding: Padding | None  # None: all have one length


@dataclass(frozen=True, slots=True)
class Tile:
    """Queries `start` to `stop` of a span, and the keys `first` to `last` of it that some of them read."""

    start: int
    stop: int
    first: int
    last: int
    mask: Tensor  # [stop − start, last − first]


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens `start` to `stop`: a chunk of one row."""

    start: int
    stop: int
    source: Source
    tiles: tuple[Tile, ...]


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """What the layers of one cache group need to know of a step."""

    write: Tensor | slice  # [n] int64: the line of `CacheLayer.lines` of each token; or all of them, in a row
    buckets: tuple[Bucket, ...]
    fresh: tuple[FreshChunks, ...]
    spans: tuple[Span, ...]
    scratch: Tensor  # [m, as wide as `CacheLayer.blocks`]: room for what the largest bucket or span gathers


class Attention:
    """One layer: optional norm of query and key heads, rotation, cache write, attention."""

    def __init__(self, shape: HeadShape, cache: LayerCache) -> None:
        self.shape = shape
        self.cache = cache

    def prepare(self, qk: Tensor, rotation: Rotation) -> None:
        """Make queries and keys [n, num_heads + num_kv_heads, head_dim] ready, in place."""
        rotation.apply_(qk)

    def __call__(self, qkv: Tensor, rotation: Rotation, cache: Sequence[CacheLayer], batch: AttentionBatch) -> Tensor:
        """`qkv` [n, (num_heads + 2 · num_kv_heads) · head_dim], which is overwritten → [n, num_heads · head_dim].

        `cache`, one entry a layer of the group, takes the tokens' keys and values first.
        """
        shape, layer = self.shape, cache[self.cache.index]
        heads = qkv.view(qkv.shape[0], -1, shape.head_dim)
        self.prepare(heads.narrow(1, 0, shape.num_heads + shape.num_kv_heads), rotation)
        written = qkv.narrow(1, shape.num_heads * shape.head_dim, layer.lines.shape[1])
        if isinstance(batch.write, slice):
            layer.lines[batch.write] = written
        else:
            layer.lines.index_copy_(0, batch.write, written)
        found = [self._attend_bucket(bucket, heads, layer, batch.scratch) for bucket in batch.buckets]
        found += [self._attend_fresh(fresh, heads) for fresh in batch.fresh]
        for span in batch.spans:
            found += self._attend_span(span, heads, layer, batch.scratch)
        return found[0] if len(found) == 1 else torch.cat(found)

    def _attend_bucket(self, bucket: Bucket, heads: Tensor, layer: CacheLayer, scratch: Tensor) -> Tensor:
        """`heads` [n, num_heads + 2 · num_kv_heads, head_dim] of the step → [rows, num_heads · head_dim]."""
        queries = heads.narrow(0, bucket.start, bucket.stop - bucket.start).narrow(1, 0, self.shape.num_heads)
        keys, values = bucket.source.read(layer, scratch)
        attended = functional.scaled_dot_product_attention(
            queries.unsqueeze(2), keys, values, attn_mask=bucket.mask, enable_gqa=True
        )
        return attended.flatten(1)

    def _attend_fresh(self, fresh: FreshChunks, heads: Tensor) -> Tensor:
        """[n of the chunks, num_heads · head_dim]; `heads` as in `_attend_bucket`."""
        shape, padding = self.shape, fresh.padding
        if padding is None:
            own = heads.narrow(0, fresh.start, fresh.stop - fresh.start)
        else:
            own = heads.index_select(0, padding.tokens)
        own = own.view(fresh.count, -1, *own.shape[1:]).transpose(1, 2)
        queries, keys, values = own.split_with_sizes([shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], 1)
        attended = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
        attended = attended.transpose(1, 2).flatten(2).flatten(0, 1)
        return attended if padding is None else attended.index_select(0, padding.places)

    def _attend_span(self, span: Span, heads: Tensor, layer: CacheLayer, scratch: Tensor) -> Iterator[Tensor]:
        """The parts of [n of the span, num_heads · head_dim]; `heads` as in `_attend_bucket`."""
        queries = heads[span.start : span.stop, : self.shape.num_heads].transpose(0, 1).unsqueeze(0)
        keys, values = span.source.read(layer, scratch)
        for tile in span.tiles:
            attended = functional.scaled_dot_product_attention(
                queries[:, :, tile.start : tile.stop],
                keys[:, :, tile.first : tile.last],
                values[:, :, tile.first : tile.last],
                attn_mask=tile.mask,
                enable_gqa=True,
            )
            yield attended.squeeze(0).transpose(0, 1).flatten(1)


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
