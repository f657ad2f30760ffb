"""Attention over the paged cache, in plain torch: what the CPU runner uses.

One layer's part of the cache is [2 (keys, values), blocks, kv_heads, block_size, head_dim]. Of the tokens of a step
those come first that are alone in their row (a decode step, a chunk of one); they are attended in buckets of rows
with about as long a history, few enough for what they read to stay in the processor's cache. Each longer chunk is
attended by itself. So no product is padded to the longest row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

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
class Bucket:
    """Tokens `start` to `stop`, each alone in its row, with histories of about the same length."""

    start: int
    stop: int
    blocks: Tensor  # [2 · rows · kv_heads · b] int64: what to gather of the cache seen as [2 · blocks · kv_heads, ...]
    first: int  # positions `first` to `last` of the b gathered blocks are read
    last: int
    mask: Tensor | None  # [rows, 1, 1, last − first]: 0, or −inf where a row has nothing; None: all have all


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
    blocks: Tensor | None  # as in Bucket, with one row; None: the chunk is the whole history, nothing is gathered
    tiles: tuple[Tile, ...]


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """What the layers of one cache group need to know of a step."""

    write: Tensor  # [n · 2 · kv_heads] int64: where keys, then values, of each token go, in the cache seen as [-1, dim]
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

    def __call__(self, qkv: Tensor, rotation: Rotation, cache: Tensor, batch: AttentionBatch) -> Tensor:
        """`qkv` [n, (num_heads + 2 · num_kv_heads) · head_dim], which is overwritten → [n, num_heads · head_dim].

        `cache` [layers, 2, blocks, kv_heads, block_size, head_dim] takes the tokens' keys and values first.
        """
        shape, tokens = self.shape, qkv.shape[0]
        heads = qkv.view(tokens, -1, shape.head_dim)
        self.prepare(heads[:, : shape.num_heads + shape.num_kv_heads], rotation)
        layer = cache[self.cache.index]
        key_values = heads[:, shape.num_heads :]  # [n, 2 · kv_heads, dim]
        layer.view(-1, shape.head_dim).index_copy_(0, batch.write, key_values.reshape(-1, shape.head_dim))
        # [n, kv_heads, group, dim]
        queries = heads[:, : shape.num_heads].view(tokens, shape.num_kv_heads, shape.group, shape.head_dim)
        output = torch.empty_like(queries, memory_format=torch.contiguous_format)
        paged = layer.view(-1, layer.shape[-2] * shape.head_dim)
        for bucket in batch.buckets:
            rows = slice(bucket.start, bucket.stop)
            keys, values = self._gather(paged, bucket.blocks, batch.scratch, bucket.stop - bucket.start)
            read = slice(bucket.first, bucket.last)
            output[rows] = functional.scaled_dot_product_attention(
                queries[rows], keys[:, :, read], values[:, :, read], attn_mask=bucket.mask
            )
        for span in batch.spans:
            rows = slice(span.start, span.stop)
            if span.blocks is None:
                keys, values = key_values[rows].transpose(0, 1).chunk(2)
            else:
                keys, values = (each[0] for each in self._gather(paged, span.blocks, batch.scratch, 1))
            self._attend_span(span, queries[rows], keys, values, output[rows])
        return output.view(tokens, -1)

    def _gather(self, paged: Tensor, blocks: Tensor, scratch: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """Keys and values of some rows, in `scratch`: [rows, kv_heads, positions, dim] each."""
        gathered = torch.index_select(paged, 0, blocks, out=scratch[: len(blocks)])
        by_row = gathered.view(2, rows, self.shape.num_kv_heads, -1, self.shape.head_dim)
        return by_row[0], by_row[1]

    def _attend_span(self, span: Span, queries: Tensor, keys: Tensor, values: Tensor, output: Tensor) -> None:
        """`queries` and `output` are [n, kv_heads, group, dim], `keys` and `values` [kv_heads, positions, dim]."""
        shape = self.shape
        # KV heads are the batch, the query heads that share one are the heads: keys need no repeating.
        keys, values = (each.unsqueeze(1).expand(-1, shape.group, -1, -1) for each in (keys, values))
        for tile in span.tiles:
            attended = functional.scaled_dot_product_attention(
                queries[tile.start : tile.stop].permute(1, 2, 0, 3),  # [kv_heads, group, n, dim]
                keys[:, :, tile.first : tile.last],
                values[:, :, tile.first : tile.last],
                attn_mask=tile.mask,
                is_causal=tile.mask is None,
            )
            output[tile.start : tile.stop] = attended.permute(2, 0, 1, 3)


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
