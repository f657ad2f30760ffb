"""What an output repeats: the penalty of DRY, and whether it goes round in circles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

LARGEST_PENALTY = 1e30
"""Where the power would be larger; it leaves no doubt either."""
_ROUND_COST = 40
"""Of one more token of a sequence, for all its places at once, in tokens that the Z-function reads in that time."""


@dataclass(frozen=True, slots=True)
class DrySettings:
    """The parameters of DRY, see `SamplingParams`."""

    multiplier: float
    base: float
    allowed_length: int
    last_n: int | None  # None looks back to the beginning
    breakers: Set[int]  # ids over which no sequence is followed


def dry_penalties(tokens: Sequence[int] | NDArray[np.int32], settings: DrySettings) -> Mapping[int, float]:
    """What is to be taken off the logit of each token that would repeat a sequence of prompt and output.

    A token that followed an earlier occurrence of the last n tokens, n being the largest such number, would make the
    repetition n + 1 long. It costs multiplier * base ** (n - allowed_length) where n is at least allowed_length. A
    sequence ends at a breaker, and a breaker itself costs nothing. (Weidmann, "DRY: A modern repetition penalty that
    reliably prevents looping", 2024.)
    """
    history = np.asarray(tokens, np.int64)
    if settings.last_n is not None:
        history = history[max(len(history) - settings.last_n, 0) :]
    if len(history) < 2 or int(history[-1]) in settings.breakers:
        return {}
    return {
        token_id: _penalty(settings, count - settings.allowed_length)
        for token_id, count in _repetitions(history, settings.breakers).items()
        if count >= settings.allowed_length and token_id not in settings.breakers
    }


def _repetitions(history: NDArray[np.int64], breakers: Set[int]) -> Mapping[int, int]:
    """By token: how many last tokens, at most, it followed before. The last one is no breaker."""
    last = len(history) - 1
    places = np.flatnonzero(history[:last] == history[last])  # where the sequence may have ended before
    longest: dict[int, int] = {}
    length, cost = 1, 0.0
    while len(places):
        cost += _ROUND_COST + len(places) / 8
        if cost > len(history) + 10 * _ROUND_COST:
            return _repetitions_by_z(history.tolist(), breakers)
        for token_id in np.unique(history[places + 1]).tolist():
            longest[token_id] = length
        before = last - length
        if before < 0 or int(history[before]) in breakers:
            break
        places = places[places >= length]
        places = places[history[places - length] == history[before]]
        length += 1
    return longest


def _repetitions_by_z(history: Sequence[int], breakers: Set[int]) -> Mapping[int, int]:
    """The same in linear time, however repetitive the history is: by the Z-function of what it is read backwards.
    (Gusfield, "Algorithms on Strings, Trees, and Sequences", 1997, section 1.3.)"""
    backwards = history[::-1]
    reach = next((i for i, token_id in enumerate(backwards) if token_id in breakers), len(backwards))
    lengths = [0] * len(backwards)  # how much of what follows here is equal to the beginning
    longest: dict[int, int] = {}
    left = right = 0  # the match that ends last
    for i in range(1, len(backwards)):
        length = min(lengths[i - left], right - i) if i < right else 0
        if i + length >= right:
            while i + length < len(backwards) and backwards[length] == backwards[i + length]:
                length += 1
            left, right = i, i + length
        lengths[i] = length
        if length:
            follower = backwards[i - 1]
            longest[follower] = max(longest.get(follower, 0), min(length, reach))
    return longest


def _penalty(settings: DrySettings, power: int) -> float:
    try:
        return min(settings.multiplier * settings.base**power, LARGEST_PENALTY)
    except OverflowError:
        return LARGEST_PENALTY


class LoopWatch:
    """Looks whether an output ends with a pattern of `least` to `most` tokens that came `count` times in a row."""

    __slots__ = ("_at", "_least", "_most", "_needed", "_runs", "_tokens", "found")

    def __init__(self, least: int, most: int, count: int) -> None:
        self._least = least
        self._most = most
        # The newest token first, at `_at`; -1 where there is none. Longer than need be, so that it is rarely moved.
        self._tokens: NDArray[np.int32] = np.full(2 * most + 64, -1, np.int32)
        self._at = len(self._tokens) - most
        # _runs[i]: how many tokens in a row are equal to those `least + i` before them; _needed: how many are a loop
        self._runs: NDArray[np.int32] = np.zeros(most - least + 1, np.int32)
        needed = np.arange(least, most + 1) * (count - 1)
        self._needed: NDArray[np.int32] = np.minimum(needed, np.iinfo(np.int32).max).astype(np.int32)
        self.found = False

    def push(self, token_id: int) -> bool:
        """Whether the output goes round in circles with this token."""
        tokens, runs = self._tokens, self._runs
        if self._at == 0:
            self._at = len(tokens) - self._most
            tokens[self._at :] = tokens[: self._most]
        self._at -= 1
        tokens[self._at] = token_id
        runs += 1
        runs *= tokens[self._at + self._least : self._at + self._most + 1] == token_id
        self.found |= bool((runs >= self._needed).any())
        return self.found
