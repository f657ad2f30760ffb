"""A decoder's layers as one kernel of the processor, where every one of them is made of what the kernel knows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from asyncllm.kernels.cpu.build import Library
from asyncllm.kernels.cpu.decoder import DecoderKernel, DecoderLayerWeights, DecoderShape, DecoderStep, takes_head
from asyncllm.kernels.cpu.lines import take_lines
from asyncllm.layers.attention import Attention, NormedAttention
from asyncllm.layers.cpu_linear import CpuLinear
from asyncllm.layers.cpu_product import KernelProduct
from asyncllm.layers.linear import WeightedLayer
from asyncllm.layers.norm import RMSNorm
from asyncllm.layers.paged_attention import AttentionLayer
from asyncllm.layers.residual import Residual
from asyncllm.layers.rope import RotaryEmbedding, Rotation, TabledRotary


@dataclass(frozen=True, slots=True)
class TableBatch:
    """What the layers of one cache group need to know of a step: where its tokens' rows keep keys and values."""

    table: Tensor  # [rows, most blocks] int64
    window: int | None


@dataclass(frozen=True, slots=True)
class KernelBatch:
    """What all layers need to know of a step."""

    rows: Tensor  # [n] int64: the line of a table of each token
    positions: Tensor  # [n] int64
    singles: int  # tokens alone in their rows; they come first
    span_starts: Tensor  # [chunks + 1] int64: the first token of each chunk, and the number of tokens
    longest: int  # the largest position + 1
    reads_new: bool  # whether tokens may see keys that the step writes for other rows
    groups: tuple[TableBatch, ...]
    caches: tuple[Tensor, ...]  # [blocks, block_size, 2, kv_heads, head_dim] of each layer of a group


class DecoderParts(Protocol):
    """What a layer of the architectures that share Llama's shape is made of."""

    @property
    def attention_norm(self) -> RMSNorm:
        """What the stream goes through to attention."""
        ...

    @property
    def qkv(self) -> WeightedLayer:
        """Queries, keys and values as one product."""
        ...

    @property
    def attention(self) -> AttentionLayer:
        """Between the two products."""
        ...

    @property
    def output(self) -> WeightedLayer:
        """Of what attention gives."""
        ...

    @property
    def mlp_norm(self) -> RMSNorm:
        """What the stream goes through to the feed-forward."""
        ...

    @property
    def gate_up(self) -> WeightedLayer:
        """With the activation."""
        ...

    @property
    def down(self) -> WeightedLayer:
        """Back to the stream."""
        ...


class KernelDecoder:
    """All layers of a model."""

    def __init__(self, library: Library, kernel: DecoderKernel, embedding: Tensor, rotary: RotaryEmbedding) -> None:
        """`embedding` is the table of tokens."""
        self._library = library
        self._kernel = kernel
        self._embedding = embedding
        self._rotary = rotary
        whole = rotary.whole() if isinstance(rotary, TabledRotary) else None
        self._turns = None if whole is None else (whole.cosine[:, 0].contiguous(), whole.sine[:, 0].contiguous())

    def __call__(self, token_ids: Tensor, lengths: Tensor | None, batch: KernelBatch) -> Residual:
        """What the embedding and all layers add up to.

        Until the kernel is called nothing gives up the interpreter: with the step before, whose tokens are delivered
        now, others wait for it, and would be waited for.
        """
        residual = self._lines(self._embedding, token_ids)
        cosine, sine = self._rotation(batch.positions, lengths)
        step = DecoderStep(
            singles=batch.singles,
            span_starts=batch.span_starts,
            rows=batch.rows,
            positions=batch.positions,
            tables=[group.table for group in batch.groups],
            windows=[group.window for group in batch.groups],
            longest=batch.longest,
            reads_new=batch.reads_new,
        )
        self._kernel(residual, cosine, sine, batch.caches, step)
        return Residual(residual.view(torch.bfloat16))

    def table_bytes(self) -> int:
        """Size of its own copies of the rotations' tables."""
        return 0 if self._turns is None else sum(turn.nbytes for turn in self._turns)

    def _rotation(self, positions: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
        if self._turns is None or not isinstance(self._rotary, TabledRotary):
            rotation = self._rotary(positions, lengths)
            assert isinstance(rotation, Rotation)
            return rotation.cosine, rotation.sine
        cosine, sine = self._turns
        lines = self._rotary.lines(positions, lengths)
        return self._lines(cosine, lines), self._lines(sine, lines)

    def _lines(self, table: Tensor, lines: Tensor) -> Tensor:
        """Their bits [n, width] int16, in memory that numpy gives without giving up the interpreter."""
        out = torch.from_numpy(np.empty((len(lines), table.shape[1]), np.int16))
        take_lines(self._library, table, lines, out)
        return out


def give_float32(linear: WeightedLayer) -> None:
    """Let a kernel's product give its sums as they are: of logits, which are adjusted and sampled in float32."""
    if isinstance(linear, CpuLinear) and isinstance(linear.product, KernelProduct):
        linear.product.output_dtype = torch.float32


def make_kernel_decoder(
    layers: Sequence[DecoderParts], embedding: Tensor, rotary: RotaryEmbedding
) -> KernelDecoder | None:
    """The layers as one kernel, once they have their weights; None where one of them needs what it does not have."""
    weights: list[DecoderLayerWeights] = []
    for layer in layers:
        linears = (layer.qkv, layer.output, layer.gate_up, layer.down)
        products = [linear.product for linear in linears if isinstance(linear, CpuLinear)]
        kernels = [product for product in products if isinstance(product, KernelProduct)]
        attention = layer.attention
        if len(kernels) < len(linears) or not isinstance(attention, Attention):
            return None
        library, shape = kernels[0].library, attention.shape
        if not takes_head(library, shape.head_dim):
            return None
        normed = attention if isinstance(attention, NormedAttention) else None
        qkv, output, gate_up, down = (kernel.matrix for kernel in kernels)
        weights.append(
            DecoderLayerWeights(
                attention_norm=layer.attention_norm.weight,
                mlp_norm=layer.mlp_norm.weight,
                query_norm=None if normed is None else normed.weight[0],
                key_norm=None if normed is None else normed.weight[1],
                qkv=qkv,
                output=output,
                gate_up=gate_up,
                down=down,
                eps=layer.attention_norm.eps,
                cache=attention.cache.index,
                group=attention.cache.group,
            )
        )
    hidden = len(weights[0].attention_norm)
    described = DecoderShape(hidden, shape.num_heads, shape.num_kv_heads, shape.head_dim)
    return KernelDecoder(library, DecoderKernel(library, described, weights), embedding, rotary)
