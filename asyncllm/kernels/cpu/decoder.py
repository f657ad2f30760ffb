"""All layers of a decoder in one call: norms, products, rotation, cache write, attention (`source/decoder.cpp`); and
what follows them, if it is wanted: logits, or the tokens that are drawn from them (`source/logits.h`).

One call, because what lies between the kernels would take as long as they do: a step of one row has 150 of them, of
some ten microseconds each. And the interpreter is given up and taken again once, however busy the host keeps it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from asyncllm.kernels.cpu.build import Library
from asyncllm.kernels.cpu.further import MOST_STEPS, FurtherSteps
from asyncllm.kernels.cpu.matrix import KernelMatrix, MatrixStruct, aligned
from asyncllm.kernels.cpu.team import TeamTime

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
class HeadWeights:
    """What makes logits of what the layers leave."""

    norm: Tensor  # [hidden] bfloat16
    matrix: KernelMatrix  # [vocabulary, hidden], without an activation
    eps: float


@dataclass(frozen=True, slots=True)
class Draws:
    """How tokens are drawn from a step's logits. What a draw depends on beside these is the position of its token, that
    after the one whose logits it is from: `draw_uniform` and `draw_tokens` would draw the same."""

    temperature: Tensor  # [s] float32; 0 takes the first of the largest logits
    seed: Tensor  # [s] int64
    choice: Tensor  # [s] int64
    token_ids: Tensor
    """[s] int32, which the kernel writes: -1 as in `draw_tokens`; but with a temperature of 0, +infinity is a logit
    like any other."""


@dataclass(frozen=True, slots=True)
class DecoderOutputs:
    """What is wanted of a step beside what the layers leave: logits, or tokens that are drawn from them."""

    tokens: Tensor | None  # [s] int64 of the step's, those of whom it is wanted; None: all, in their order
    wanted: Tensor | Draws  # [s, vocabulary] float32, which the kernel writes; or draws, which need no such memory


@dataclass(frozen=True, slots=True)
class TableLines:
    """A tensor of a step that the kernel fills first, with lines of a table."""

    table: Tensor  # [any number, width]
    lines: Tensor  # [n] int64
    out: Tensor  # [n, width]; all dense, and items of one size


@dataclass(frozen=True, slots=True)
class DecoderStep:
    """The tokens of a step, those alone in their row first, then the chunks."""

    residual: Tensor  # [n, hidden] bfloat16, or its bits: goes through all layers, in place
    cosine: Tensor  # [n, head_dim] bfloat16, or its bits
    sine: Tensor  # the same, of the first half negated
    singles: int
    span_starts: Tensor  # [chunks + 1] int64: the first token of each chunk, and the number of tokens
    rows: Tensor  # [n] int64: the line of a table of each token
    positions: Tensor  # [n] int64
    tables: Sequence[Tensor]  # of each group: [rows, most blocks] int64
    windows: Sequence[int | None]  # of each group: how many keys a query sees, its own among them
    caches: Sequence[Tensor]
    """As many as layers name, [blocks, block_size, 2, kv_heads, head_dim] bfloat16; they take new keys and values."""
    reads_new: bool  # whether tokens may see keys that the step writes for other rows
    outputs: DecoderOutputs | None = None
    lines: Sequence[TableLines] = ()  # what of the above is found in tables, such as that of an embedding


class DecoderKernel:
    """The kernel, with one model's weights."""

    def __init__(
        self,
        library: Library,
        shape: DecoderShape,
        layers: Sequence[DecoderLayerWeights],
        head: HeadWeights | None = None,
    ) -> None:
        """`head`: for steps with outputs."""
        self.library = library
        self._weights, self._head_weights = list(layers), head  # their memory is what the structures point to
        self._layers = (_LayerStruct * len(layers))(*(_layer(each) for each in layers))
        self.decoder = _DecoderStruct(
            self._layers, len(layers), shape.hidden, shape.num_heads, shape.num_kv_heads, shape.head_dim
        )
        self.head = None if head is None else _HeadStruct(head.matrix.struct, head.norm.data_ptr(), head.eps)
        self._workspace = torch.empty(0, dtype=torch.uint8)
        self._windows: Sequence[int | None] = []
        self._addresses: list[int] = []  # of the caches that the structures point to; nothing here holds them

    def __call__(self, step: DecoderStep) -> None:
        """Compute a step."""
        DecoderCall(self, step)()

    def point_to(self, addresses: list[int], windows: Sequence[int | None]) -> None:
        """Of the caches, and of their groups."""
        if addresses != self._addresses:
            for struct, weights in zip(self._layers, self._weights, strict=True):
                struct.cache = addresses[weights.cache]
            self._addresses = addresses
        if windows != self._windows:
            for struct, weights in zip(self._layers, self._weights, strict=True):
                window = windows[weights.group]
                struct.window = _NO_WINDOW if window is None else window
            self._windows = list(windows)

    def workspace(self, size: int) -> int:
        """The address of so many bytes, until it is asked for more."""
        if size > self._workspace.nbytes:
            self._workspace = aligned(size)
        return self._workspace.data_ptr()


class DecoderCall:
    """A step, described to the kernel once. Each call computes it with what its tensors hold then."""

    def __init__(self, kernel: DecoderKernel, step: DecoderStep) -> None:
        self._kernel = kernel
        self._step = step  # its memory is what the structures point to
        self._addresses = [cache.data_ptr() for cache in step.caches]
        self._block_size = step.caches[0].shape[1]
        self._tables = (ctypes.c_void_p * len(step.tables))(*(table.data_ptr() for table in step.tables))
        self._lines = (_LinesStruct * len(step.lines))(*map(_lines, step.lines))
        self._described = _StepStruct(
            tokens=len(step.residual),
            singles=step.singles,
            spans=len(step.span_starts) - 1,
            span_starts=step.span_starts.data_ptr(),
            rows=step.rows.data_ptr(),
            positions=step.positions.data_ptr(),
            tables=ctypes.cast(self._tables, ctypes.c_void_p),
            table_width=step.tables[0].shape[1],
            reads_new=step.reads_new,
            cosine=step.cosine.data_ptr(),
            sine=step.sine.data_ptr(),
            residual=step.residual.data_ptr(),
            lines=ctypes.cast(self._lines, ctypes.c_void_p),
            tables_read=len(self._lines),
        )
        outputs = None if step.outputs is None else _sampled(kernel, step.outputs)
        self._arguments = (
            ctypes.byref(kernel.decoder),
            ctypes.byref(self._described),
            None if outputs is None else ctypes.byref(outputs),
        )
        self._kind = (id(kernel), len(step.residual), len(step.span_starts), outputs is None)

    def __call__(self, further: FurtherSteps | None = None) -> None:
        """Compute it, and `further` steps, each of which draws as many tokens. The interpreter is given up once.

        Raises IndexError for a line that a table does not have. A further step whose token has none, or that draws a
        token that is none, is left as if it had not begun.
        """
        kernel = self._kernel
        kernel.point_to(self._addresses, self._step.windows)
        kernel.decoder.block_size = self._block_size
        kernel.library.team.run(partial(self._decode, further), self._kind)

    def _decode(self, further: FurtherSteps | None, threads: int) -> TeamTime:
        kernel, described = self._kernel, self._described
        library = kernel.library
        described.threads = threads
        most = 1 if further is None else further.limit(1 if library.team.tries else MOST_STEPS)
        described.workspace = kernel.workspace(library.short.asyncllm_workspace_bytes(*self._arguments, most))
        asked = None if further is None else further.address
        lost: float = library.functions.asyncllm_decode(*self._arguments, library.tiles, asked)
        if lost < 0:
            raise IndexError("a token has a line that is not one of its table's")
        return TeamTime(lost, 1 if further is None else max(1, further.done))


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
        ("lines", ctypes.c_void_p),
        ("tables_read", ctypes.c_int64),
    )


class _LinesStruct(ctypes.Structure):
    """`Lines` of `source/decoder.h`."""

    _fields_ = (
        ("table", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("bytes", ctypes.c_int64),
        ("chosen", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
    )


def _lines(taken: TableLines) -> _LinesStruct:
    table = taken.table
    width = table.itemsize * table.shape[1]
    return _LinesStruct(table.data_ptr(), len(table), width, taken.lines.data_ptr(), taken.out.data_ptr())


class _HeadStruct(ctypes.Structure):
    """`Head` of `source/logits.h`."""

    _fields_ = (("matrix", MatrixStruct), ("norm", ctypes.c_void_p), ("eps", ctypes.c_double))


class _SampledStruct(ctypes.Structure):
    """`Sampled` of `source/logits.h`."""

    _fields_ = (
        ("head", ctypes.POINTER(_HeadStruct)),
        ("count", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("tokens", "logits", "temperature", "seed", "choice", "found")),
    )


def _sampled(kernel: DecoderKernel, outputs: DecoderOutputs) -> _SampledStruct:
    assert kernel.head is not None, "a step with outputs, of a kernel without a head"
    wanted = outputs.wanted
    struct = _SampledStruct(
        head=ctypes.pointer(kernel.head), tokens=None if outputs.tokens is None else outputs.tokens.data_ptr()
    )
    if isinstance(wanted, Draws):
        struct.count = len(wanted.token_ids)
        struct.temperature, struct.found = wanted.temperature.data_ptr(), wanted.token_ids.data_ptr()
        struct.seed, struct.choice = wanted.seed.data_ptr(), wanted.choice.data_ptr()
    else:
        struct.count, struct.logits = len(wanted), wanted.data_ptr()
    return struct


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
    return bool(library.functions.asyncllm_takes_head(head_dim))


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
