"""A decoder's layers as one kernel of the processor, where every one of them is made of what the kernel knows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from asyncllm.kernels.cpu.decoder import (
    DecoderCall,
    DecoderKernel,
    DecoderLayerWeights,
    DecoderOutputs,
    DecoderShape,
    DecoderStep,
    Draws,
    HeadWeights,
    TableLines,
    takes_head,
)
from asyncllm.kernels.cpu.further import Advance, FurtherSteps
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


@dataclass(slots=True)
class KernelBatch:
    """What all layers need to know of a step. Its tensors' numbers may change, and make another step of it."""

    rows: Tensor  # [n] int64: the line of a table of each token
    positions: Tensor  # [n] int64
    singles: int  # tokens alone in their rows; they come first
    span_starts: Tensor  # [chunks + 1] int64: the first token of each chunk, and the number of tokens
    reads_new: bool  # whether tokens may see keys that the step writes for other rows
    groups: tuple[TableBatch, ...]
    caches: tuple[Tensor, ...]  # [blocks, block_size, 2, kv_heads, head_dim] of each layer of a group
    draws: Draws | None = None  # from the logits of the sampled tokens; None: nothing is drawn
    further: FurtherSteps | None = None  # that the next call may compute behind this one
    described: DescribedStep | None = None  # once tokens were drawn


@dataclass(frozen=True, slots=True)
class DescribedStep:
    """What a batch was described to the kernel as."""

    token_ids: Tensor
    turns: Tensor  # [n] int64 the line of each token's rotation, where there is a table of them
    step: DecoderStep
    call: DecoderCall


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
    """All layers of a model, and its head if that is a kernel's product too."""

    def __init__(
        self, kernel: DecoderKernel, embedding: Tensor, rotary: RotaryEmbedding, vocabulary: int | None
    ) -> None:
        """`embedding` is the table of tokens; `vocabulary`: how many logits the kernel makes, if it does."""
        self._kernel = kernel
        self._embedding = embedding
        self._rotary = rotary
        self._vocabulary = vocabulary
        whole = rotary.whole() if isinstance(rotary, TabledRotary) else None
        self._turns = None if whole is None else (whole.cosine[:, 0].contiguous(), whole.sine[:, 0].contiguous())

    @property
    def has_head(self) -> bool:
        """Whether the kernel makes logits, and draws from them."""
        return self._vocabulary is not None

    @property
    def goes_on(self) -> bool:
        """Whether a step's tokens and their positions are all that the next one's computation begins with."""
        return self.has_head and self._turns is not None and not self._rotary.length_dependent

    def further(self, advance: Advance, told: int) -> FurtherSteps:
        """Steps behind one that `goes_on`; see `FurtherSteps`."""
        return FurtherSteps(self._kernel.library, advance, told)

    def __call__(self, token_ids: Tensor, lengths: Tensor | None, batch: KernelBatch) -> Residual:
        """What the embedding and all layers add up to."""
        described = self._describe(token_ids, batch, None)
        self._compute(described, lengths, batch)
        return Residual(described.step.residual.view(torch.bfloat16))

    def logits(self, token_ids: Tensor, lengths: Tensor | None, sampled: Tensor | None, batch: KernelBatch) -> Tensor:
        """[s, vocabulary] float32 of these tokens, None: of all. Nothing is drawn from them."""
        assert self._vocabulary is not None
        logits = torch.empty(len(token_ids if sampled is None else sampled), self._vocabulary)
        self._compute(self._describe(token_ids, batch, DecoderOutputs(sampled, logits)), lengths, batch)
        return logits

    def draw(self, token_ids: Tensor, lengths: Tensor | None, sampled: Tensor | None, batch: KernelBatch) -> None:
        """What the batch draws, from the logits of these tokens, None: of all. The same batch may be computed again, of
        what the same tensors hold then."""
        described = batch.described
        if described is None or described.token_ids is not token_ids:
            assert batch.draws is not None
            outputs = DecoderOutputs(sampled, batch.draws)
            described = batch.described = self._describe(token_ids, batch, outputs)
        self._compute(described, lengths, batch)

    def table_bytes(self) -> int:
        """Size of its own copies of the rotations' tables."""
        return 0 if self._turns is None else sum(turn.nbytes for turn in self._turns)

    def _describe(self, token_ids: Tensor, batch: KernelBatch, outputs: DecoderOutputs | None) -> DescribedStep:
        tokens, head_dim = len(token_ids), batch.caches[0].shape[-1]
        residual, cosine, sine = (_bits(tokens, width) for width in (self._embedding.shape[1], head_dim, head_dim))
        turns = torch.empty_like(batch.positions) if self._rotary.length_dependent else batch.positions
        lines = [TableLines(self._embedding, token_ids, residual)]
        if self._turns is not None:
            lines += [TableLines(table, turns, to) for table, to in zip(self._turns, (cosine, sine), strict=True)]
        step = DecoderStep(
            residual=residual,
            cosine=cosine,
            sine=sine,
            singles=batch.singles,
            span_starts=batch.span_starts,
            rows=batch.rows,
            positions=batch.positions,
            tables=[group.table for group in batch.groups],
            windows=[group.window for group in batch.groups],
            caches=batch.caches,
            reads_new=batch.reads_new,
            outputs=outputs,
            lines=lines,
        )
        return DescribedStep(token_ids, turns, step, DecoderCall(self._kernel, step))

    def _compute(self, described: DescribedStep, lengths: Tensor | None, batch: KernelBatch) -> None:
        """For most models nothing gives up the interpreter until the kernel is called: with the step before, whose
        tokens are delivered now, others wait for it, and would be waited for."""
        if self._turns is None or not isinstance(self._rotary, TabledRotary):
            rotation = self._rotary(batch.positions, lengths)
            assert isinstance(rotation, Rotation)
            described.step.cosine.copy_(rotation.cosine[:, 0].view(torch.int16))
            described.step.sine.copy_(rotation.sine[:, 0].view(torch.int16))
        elif self._rotary.length_dependent:
            described.turns.copy_(self._rotary.lines(batch.positions, lengths))
        described.call(batch.further)


def _bits(lines: int, width: int) -> Tensor:
    """[lines, width] int16, in memory that numpy gives without giving up the interpreter."""
    return torch.from_numpy(np.empty((lines, width), np.int16))


def give_float32(linear: WeightedLayer) -> None:
    """Let a kernel's product give its sums as they are: of logits, which are adjusted and sampled in float32."""
    if isinstance(linear, CpuLinear) and isinstance(linear.product, KernelProduct):
        linear.product.output_dtype = torch.float32


@dataclass(frozen=True, slots=True)
class DecoderEnds:
    """What comes before the layers, and after them."""

    embedding: Tensor  # [vocabulary, hidden] the table of tokens
    norm: RMSNorm
    head: WeightedLayer


def make_kernel_decoder(
    layers: Sequence[DecoderParts], ends: DecoderEnds, rotary: RotaryEmbedding
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
    head = _head_weights(ends)
    kernel = DecoderKernel(library, described, weights, head)
    return KernelDecoder(kernel, ends.embedding, rotary, None if head is None else head.matrix.outputs)


def _head_weights(ends: DecoderEnds) -> HeadWeights | None:
    product = ends.head.product if isinstance(ends.head, CpuLinear) else None
    if not isinstance(product, KernelProduct):
        return None
    return HeadWeights(ends.norm.weight, product.matrix, ends.norm.eps)
