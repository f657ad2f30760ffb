"""Rotary position embeddings (https://arxiv.org/abs/2104.09864) and their scaling variants.

A variant is a frozen dataclass whose fields are the keys of a Hugging Face config's `rope_parameters`. The formulas are
those of the papers named below, with the choices that transformers made where the papers leave one.

Two variants depend on the length of a sequence, which transformers takes from each forward pass: the prompt's length
while it is computed in one pass, then the number of tokens so far. `RotaryEmbedding` makes of that a function of the
request: the token at position p is rotated for the length max(prompt tokens, p + 1). So it equals transformers for a
prompt and for its generation with a cache, whatever the chunks, the batch or a preemption. A fixed length, such as
`max_model_len`, would change short prompts; the position alone would change the first tokens of long ones. The price:
equal prefixes of prompts of different length hold different keys, so such a model shares no prefix blocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from asyncllm.layers.parameter import Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class DefaultRope:
    """No scaling: frequency i is theta^(−2i/dim)."""

    rope_theta: float

    @property
    def attention_scale(self) -> float:
        """Multiplies cosines and sines."""
        return 1.0

    def frequencies(self, dim: int) -> Tensor:
        """Angle per position of each pair of dimensions: [dim / 2], float32."""
        return _frequencies(self.rope_theta, dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearRope(DefaultRope):
    """Positions divided by a factor (https://arxiv.org/abs/2306.15595)."""

    factor: float

    def frequencies(self, dim: int) -> Tensor:
        """Angle per position of each pair of dimensions: [dim / 2], float32."""
        return _frequencies(self.rope_theta, dim) / self.factor


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicRope(DefaultRope):
    """Past the original length, theta grows with the sequence ("NTK-aware" scaling)."""

    factor: float
    original_max_position_embeddings: int

    def lengthened_frequencies(self, exponents: Tensor, lengths: Tensor) -> Tensor:
        """Frequencies for sequences of these lengths: [n] → [n, dim / 2], float32. `exponents` [dim / 2]: 2i/dim of
        each pair, on the lengths' device."""
        dim, original = 2 * len(exponents), self.original_max_position_embeddings
        ratio = lengths.clamp(min=original).float() / original
        theta = self.rope_theta * (self.factor * ratio - (self.factor - 1)) ** (dim / (dim - 2))
        return 1.0 / theta[:, None] ** exponents


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Rope(DefaultRope):
    """Long wavelengths divided by a factor, short ones kept, a ramp between (Llama 3.1)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def frequencies(self, dim: int) -> Tensor:
        """Angle per position of each pair of dimensions: [dim / 2], float32."""
        plain = _frequencies(self.rope_theta, dim)
        turns = self.original_max_position_embeddings * plain / (2 * math.pi)  # in the original context
        kept = ((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clamp(0, 1)
        return kept * plain + (1 - kept) * plain / self.factor


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnRope(DefaultRope):
    """YaRN (https://arxiv.org/abs/2309.00071): a ramp over dimensions, and a factor on attention."""

    factor: float
    original_max_position_embeddings: int
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    @property
    def attention_scale(self) -> float:
        """Multiplies cosines and sines."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._scale(self.mscale) / self._scale(self.mscale_all_dim)
        return self._scale(1.0)

    def _scale(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

    def frequencies(self, dim: int) -> Tensor:
        """Angle per position of each pair of dimensions: [dim / 2], float32."""
        low, high = self._dimension(self.beta_fast, dim), self._dimension(self.beta_slow, dim)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        width = high - low if high != low else 0.001
        interpolated = ((torch.arange(dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
        plain = _frequencies(self.rope_theta, dim)
        return plain / self.factor * interpolated + plain * (1 - interpolated)

    def _dimension(self, turns: float, dim: int) -> float:
        """The dimension that turns this often in the original context."""
        wavelength = self.original_max_position_embeddings / (turns * 2 * math.pi)
        return dim * math.log(wavelength) / (2 * math.log(self.rope_theta))


@dataclass(frozen=True, slots=True, kw_only=True)
class LongRope(DefaultRope):
    """LongRoPE (https://arxiv.org/abs/2402.13753): a factor per dimension, other ones past the original length."""

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_position_embeddings: int
    factor: float
    attention_factor: float | None = None

    @property
    def attention_scale(self) -> float:
        """Multiplies cosines and sines."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.factor <= 1:
            return 1.0
        return math.sqrt(1 + math.log(self.factor) / math.log(self.original_max_position_embeddings))

    def frequencies(self, dim: int) -> Tensor:
        """Up to the original length: [dim / 2], float32."""
        return _frequencies(self.rope_theta, dim) / torch.tensor(self.short_factor)

    def long_frequencies(self, dim: int) -> Tensor:
        """Past the original length: [dim / 2], float32."""
        return _frequencies(self.rope_theta, dim) / torch.tensor(self.long_factor)


@dataclass(frozen=True, slots=True)
class Rotation:
    """How the tokens of a step are rotated: made once per step, used by every layer."""

    cosine: Tensor  # [n, 1, dim]
    sine: Tensor  # [n, 1, dim], of the first half negated

    def apply_(self, heads: Tensor) -> Tensor:
        """Rotate [n, heads, dim] in place: dimension i turns with dimension i + dim / 2."""
        turned = heads.roll(heads.shape[-1] // 2, -1)
        return heads.mul_(self.cosine).addcmul_(turned, self.sine)


@dataclass(frozen=True, slots=True)
class TabledRotation:
    """The same for kernels, which look cosines and sines up themselves."""

    table: Tensor  # [any, dim], cosines, then sines
    lines: Tensor | None  # [n] the line of each token; None: its position


class RotaryEmbedding(Protocol):
    """Angles of tokens."""

    length_dependent: bool  # whether it reads the lengths

    def __call__(self, positions: Tensor, lengths: Tensor | None) -> Rotation | TabledRotation:
        """`positions` [n] integers; `lengths` [n] is the length to rotate for, None where it makes no difference.

        A `TabledRotation` for layers that run kernels.
        """
        ...

    def memory_bytes(self) -> int:
        """Size of its tables."""
        ...


def make_rotary_embedding(rope: DefaultRope, dim: int, max_length: int, placement: Placement) -> RotaryEmbedding:
    """The embedding of `dim` dimensions for positions below `max_length`."""
    original = getattr(rope, "original_max_position_embeddings", max_length)
    if isinstance(rope, DynamicRope) and max_length > original:
        return (_KernelComputedRotary if placement.kernels else _ComputedRotary)(rope, dim, placement)
    tabled = _KernelTabledRotary if placement.kernels else TabledRotary
    if isinstance(rope, LongRope) and max_length > original:
        frequencies = [rope.frequencies(dim), rope.long_frequencies(dim)]
        return tabled(frequencies, rope.attention_scale, max_length, original, placement)
    return tabled([rope.frequencies(dim)], rope.attention_scale, max_length, max_length, placement)


class TabledRotary:
    """Cosines and sines of every position, in one or two tables below each other; the second is for long lengths."""

    def __init__(
        self, frequencies: list[Tensor], scale: float, max_length: int, original: int, placement: Placement
    ) -> None:
        positions = torch.arange(max_length, dtype=torch.float32)
        angles = torch.cat([torch.outer(positions, table) for table in frequencies])
        table = torch.cat((angles.cos() * scale, angles.sin() * scale), dim=-1)
        self.table = table.to(placement.dtype).to(placement.device)  # [tables · max_length, dim]
        self.max_length = max_length
        self.original = original
        self.length_dependent = len(frequencies) > 1

    def __call__(self, positions: Tensor, lengths: Tensor | None) -> Rotation:
        """See `RotaryEmbedding`."""
        return _rotation(*self.table.index_select(0, self.lines(positions, lengths)).chunk(2, dim=-1))

    def whole(self) -> Rotation:
        """The rotation of each line of the table."""
        return _rotation(*self.table.chunk(2, dim=-1))

    def lines(self, positions: Tensor, lengths: Tensor | None) -> Tensor:
        """The line of the table of each token."""
        if not self.length_dependent:
            return positions
        assert lengths is not None
        return torch.where(lengths > self.original, positions + self.max_length, positions)

    def memory_bytes(self) -> int:
        """See `RotaryEmbedding`."""
        return self.table.nbytes


class _ComputedRotary:
    """Angles computed at every step, since each length has its own frequencies."""

    length_dependent = True

    def __init__(self, rope: DynamicRope, dim: int, placement: Placement) -> None:
        self.rope = rope
        self.exponents = _exponents(dim).to(placement.device)  # a copy at each step would wait, and no graph takes it
        self.dtype = placement.dtype

    def __call__(self, positions: Tensor, lengths: Tensor | None) -> Rotation:
        return _rotation(*self.cosine_and_sine(positions, lengths))

    def cosine_and_sine(self, positions: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
        """Of each token: [n, dim / 2] each."""
        assert lengths is not None
        angles = positions.float()[:, None] * self.rope.lengthened_frequencies(self.exponents, lengths)
        return angles.cos().to(self.dtype), angles.sin().to(self.dtype)

    def memory_bytes(self) -> int:
        return self.exponents.nbytes


class _KernelTabledRotary:
    """The tables of a `TabledRotary`, for kernels."""

    def __init__(
        self, frequencies: list[Tensor], scale: float, max_length: int, original: int, placement: Placement
    ) -> None:
        self.tabled = TabledRotary(frequencies, scale, max_length, original, placement)
        self.length_dependent = self.tabled.length_dependent

    def __call__(self, positions: Tensor, lengths: Tensor | None) -> TabledRotation:
        return TabledRotation(self.tabled.table, self.tabled.lines(positions, lengths))

    def memory_bytes(self) -> int:
        return self.tabled.memory_bytes()


class _KernelComputedRotary:
    """The angles of a `_ComputedRotary`, for kernels: a table with a line per token."""

    length_dependent = True

    def __init__(self, rope: DynamicRope, dim: int, placement: Placement) -> None:
        self.computed = _ComputedRotary(rope, dim, placement)

    def __call__(self, positions: Tensor, lengths: Tensor | None) -> TabledRotation:
        table = torch.cat(self.computed.cosine_and_sine(positions, lengths), dim=-1)
        return TabledRotation(table, torch.arange(len(table), dtype=torch.int32, device=table.device))

    def memory_bytes(self) -> int:
        return self.computed.memory_bytes()


def _rotation(cosine: Tensor, sine: Tensor) -> Rotation:
    return Rotation(torch.cat((cosine, cosine), -1)[:, None], torch.cat((-sine, sine), -1)[:, None])


def _exponents(dim: int) -> Tensor:
    return torch.arange(0, dim, 2, dtype=torch.float32) / dim


def _frequencies(theta: float, dim: int) -> Tensor:
    return 1.0 / theta ** _exponents(dim)
