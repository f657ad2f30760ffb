"""All layers of a decoder in one call: norms, products, rotation, cache write, attention (`source/decoder.cpp`).

One call, because what lies between the kernels would take as long as they do: a step of one row has 150 of them, of
some ten microseconds each. And the interpreter is given up and taken again once, however busy the host keeps it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from asyncllm.kernels.cpu.build import Library
from asyncllm.kernels.cpu.matrix import KernelMatrix, MatrixStruct, aligned

_NO_WINDOW = 1 << 40


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """What all layers have in common."""

    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class DecoderLayerWeights:
    """One layer: attention and a gated feed-forward, each behind an RMSNorm and added to the stream."""

    attention_norm: Tensor  # [hidden] bfloat16, as all norms' weights
    mlp_norm: Tensor
    query_norm: Tensor | None  # [head_dim], before the rotation
    key_norm: Tensor | None
    qkv: KernelMatrix
    output: KernelMatrix
    gate_up: KernelMatrix  # with an activation
    down: KernelMatrix
    eps: float
    cache: int  # which of a step's caches is its own
    group: int  # which of a step's tables it uses


@dataclass(frozen=True, slots=True)
class DecoderStep:
    """The tokens of a step, those alone in their row first, then the chunks."""

    singles: int
    span_starts: Tensor  # [chunks + 1] int64: the first token of each chunk, and the number of tokens
    rows: Tensor  # [n] int64: the line of a table of each token
    positions: Tensor  # [n] int64
    tables: Sequence[Tensor]  # of each group: [rows, most blocks] int64
    windows: Sequence[int | None]  # of each group: how many keys a query sees, its own among them
    longest: int  # the largest position + 1
    reads_new: bool  # whether tokens may see keys that the step writes for other rows


class DecoderKernel:
    """The kernel, with one model's weights."""

    def __init__(self, library: Library, shape: DecoderShape, layers: Sequence[DecoderLayerWeights]) -> None:
        self._library = library
        self._shape = shape
        self._weights = list(layers)  # their memory is what the structures point to
        self._layers = (_LayerStruct * len(layers))(*(_layer(each) for each in layers))
        self._workspace = torch.empty(0, dtype=torch.uint8)
        self._windows: Sequence[int | None] = []
        self._addresses: list[int] = []  # of the caches that the structures point to; nothing here holds them
        self._workspace_bytes = library.short.asyncllm_workspace_bytes
        self._decode = library.functions.asyncllm_decode

    def __call__(
        self, residual: Tensor, cosine: Tensor, sine: Tensor, caches: Sequence[Tensor], step: DecoderStep
    ) -> None:
        """Put `residual` [n, hidden] bfloat16, or its bits, through all layers, in place.

        `cosine`, `sine` [n, head_dim] bfloat16, or their bits, the sines of the first half negated; `caches` as many as
        layers name, [blocks, block_size, 2, kv_heads, head_dim] bfloat16, take the tokens' keys and values.
        """
        shape, layers = self._shape, self._layers
        addresses = [cache.data_ptr() for cache in caches]
        if addresses != self._addresses:
            for struct, weights in zip(layers, self._weights, strict=True):
                struct.cache = addresses[weights.cache]
            self._addresses = addresses
        if step.windows != self._windows:
            for struct, weights in zip(layers, self._weights, strict=True):
                window = step.windows[weights.group]
                struct.window = _NO_WINDOW if window is None else window
            self._windows = list(step.windows)
        decoder = _DecoderStruct(
            layers,
            len(layers),
            shape.hidden,
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            caches[0].shape[1],
        )
        tables = (ctypes.c_void_p * len(step.tables))(*(table.data_ptr() for table in step.tables))
        described = _StepStruct(
            tokens=len(residual),
            singles=step.singles,
            spans=len(step.span_starts) - 1,
            span_starts=step.span_starts.data_ptr(),
            rows=step.rows.data_ptr(),
            positions=step.positions.data_ptr(),
            tables=ctypes.cast(tables, ctypes.c_void_p),
            table_width=step.tables[0].shape[1],
            longest=step.longest,
            reads_new=step.reads_new,
            cosine=cosine.data_ptr(),
            sine=sine.data_ptr(),
            residual=residual.data_ptr(),
        )

        def decode(threads: int) -> float:
            described.threads = threads
            size = self._workspace_bytes(ctypes.byref(decoder), ctypes.byref(described))
            if size > self._workspace.nbytes:
                self._workspace = aligned(size)
            described.workspace = self._workspace.data_ptr()
            lost: float = self._decode(ctypes.byref(decoder), ctypes.byref(described), tiles)
            return lost

        tiles = ctypes.c_int64(self._library.tiles)
        self._library.team.run(decode, (id(self), len(residual), len(step.span_starts)))


class _LayerStruct(ctypes.Structure):
    """`Layer` of `source/decoder.h`."""

    _fields_ = (
        ("attention_norm", ctypes.c_void_p),
        ("mlp_norm", ctypes.c_void_p),
        ("query_norm", ctypes.c_void_p),
        ("key_norm", ctypes.c_void_p),
        ("qkv", MatrixStruct),
        ("output", MatrixStruct),
        ("gate_up", MatrixStruct),
        ("down", MatrixStruct),
        ("cache", ctypes.c_void_p),
        ("group", ctypes.c_int64),
        ("window", ctypes.c_int64),
        ("eps", ctypes.c_double),
    )


class _DecoderStruct(ctypes.Structure):
    """`Decoder` of `source/decoder.h`."""

    _fields_ = (
        ("layers", ctypes.POINTER(_LayerStruct)),
        *((name, ctypes.c_int64) for name in ("count", "hidden", "queries", "keys", "dim", "block_size")),
    )


class _StepStruct(ctypes.Structure):
    """`Step` of `source/decoder.h`."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("tokens", "singles", "spans")),
        *((name, ctypes.c_void_p) for name in ("span_starts", "rows", "positions", "tables")),
        *((name, ctypes.c_int64) for name in ("table_width", "longest", "reads_new")),
        *((name, ctypes.c_void_p) for name in ("cosine", "sine", "residual", "workspace")),
        ("threads", ctypes.c_int64),
    )


def _layer(weights: DecoderLayerWeights) -> _LayerStruct:
    return _LayerStruct(
        attention_norm=weights.attention_norm.data_ptr(),
        mlp_norm=weights.mlp_norm.data_ptr(),
        query_norm=None if weights.query_norm is None else weights.query_norm.data_ptr(),
        key_norm=None if weights.key_norm is None else weights.key_norm.data_ptr(),
        qkv=weights.qkv.struct,
        output=weights.output.struct,
        gate_up=weights.gate_up.struct,
        down=weights.down.struct,
        group=weights.group,
        eps=weights.eps,
    )


def takes_head(library: Library, head_dim: int) -> bool:
    """Whether the kernel has attention for heads of this size."""
    return bool(library.functions.asyncllm_takes_head(ctypes.c_int64(head_dim)))


@dataclass(frozen=True, slots=True)
class PlainLayer:
    """A layer's weights as `decoder_reference` takes them: matrices as in a file, in any dtype."""

    attention_norm: Tensor
    mlp_norm: Tensor
    query_norm: Tensor | None
    key_norm: Tensor | None
    qkv: Tensor
    qkv_bias: Tensor | None
    output: Tensor
    gate_up: Tensor
    down: Tensor
    window: int | None
    eps: float


def decoder_reference(
    shape: DecoderShape, layers: Sequence[PlainLayer], residual: Tensor, cosine: Tensor, sine: Tensor
) -> Tensor:
    """`DecoderKernel` in plain torch, for one row whose tokens are all there: [n, hidden] → [n, hidden]; SiLU."""
    count, dim = len(residual), shape.head_dim
    distance = torch.arange(count)[:, None] - torch.arange(count)

    def turned(heads: Tensor, norm: Tensor | None, eps: float) -> Tensor:
        if norm is not None:
            heads = functional.rms_norm(heads, norm.shape, norm, eps)
        return heads * cosine[:, None] + heads.roll(dim // 2, -1) * sine[:, None]

    for layer in layers:
        normed = functional.rms_norm(residual, layer.attention_norm.shape, layer.attention_norm, layer.eps)
        heads = functional.linear(normed, layer.qkv, layer.qkv_bias).view(count, -1, dim)
        queries, keys, values = heads.split_with_sizes([shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], 1)
        queries = turned(queries, layer.query_norm, layer.eps).transpose(0, 1)
        keys = turned(keys, layer.key_norm, layer.eps).transpose(0, 1)
        seen = (distance >= 0) & (distance < (layer.window or count))
        attended = functional.scaled_dot_product_attention(
            queries[None], keys[None], values.transpose(0, 1)[None], attn_mask=seen, enable_gqa=True
        )
        residual = residual + functional.linear(attended[0].transpose(0, 1).flatten(1), layer.output)
        normed = functional.rms_norm(residual, layer.mlp_norm.shape, layer.mlp_norm, layer.eps)
        gate, up = functional.linear(normed, layer.gate_up).chunk(2, -1)
        residual = residual + functional.linear(functional.silu(gate) * up, layer.down)
    return residual
