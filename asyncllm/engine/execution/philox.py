"""Philox4x32-10, a counter-based generator: the draw is a function of key and counter, on every device the same.

Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

UInt64Array = NDArray[np.uint64]
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_ROUNDS = 10


def philox(counter: tuple[UInt64Array, ...], key: tuple[UInt64Array, ...]) -> tuple[UInt64Array, ...]:
    """Four output words from four counter words and two key words: arrays of 32-bit values, in uint64."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (second >> _SHIFT) ^ c1 ^ k0, second & _LOW, (first >> _SHIFT) ^ c3 ^ k1, first & _LOW
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return c0, c1, c2, c3


def uniform_draws(
    seed: UInt64Array, position: NDArray[np.integer[Any]], choice: NDArray[np.integer[Any]], stream: int = 0
) -> NDArray[np.float32]:
    """One number of (0, 1] per element, a function of (seed, position, choice): ((w >> 8) + 0.5) · 2⁻²⁴ in float32.

    Each `stream` has numbers of its own.
    """
    where, which = position.astype(np.uint64), choice.astype(np.uint64)
    counter = (where & _LOW, where >> _SHIFT, which, np.full_like(where, stream))
    word = philox(counter, (seed & _LOW, seed >> _SHIFT))[0]
    return ((word >> np.uint64(8)).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-24)
