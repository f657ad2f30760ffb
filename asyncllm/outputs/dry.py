"""DRY: what a token costs that would repeat a sequence of prompt and output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

LARGEST_PENALTY = 1e30
"""Where the power would be larger; it leaves no doubt either."""
_GRAM = 3
"""Places are found by so many tokens at most: as many ids fit into 63 bits."""
_ID_BITS = 21
_ROUND_COST = 40
"""Of one more token of a sequence, for all its places at once, in tokens that the Z-function reads in that time."""

_Places = NDArray[np.int64]
_NOWHERE: _Places = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class DrySettings:
    """The parameters of DRY, see `SamplingParams`."""

    multiplier: float
    base: float
    allowed_length: int
    last_n: int | None  # None looks back to the beginning
    breakers: Set[int]  # ids over which no sequence is followed


class DryHistory:
    """Follows the tokens of one choice. What a token costs it in time is the number of places that its last tokens
    stand at as well, not the length of the history.

    A token that followed an earlier occurrence of the last n tokens, n being the largest such number, would make the
    repetition n + 1 long. It costs multiplier * base ** (n - allowed_length) where n is at least allowed_length. A
    sequence ends at a breaker, and a breaker itself costs nothing. (Weidmann, "DRY: A modern repetition penalty that
    reliably prevents looping", 2024.)
    """

    def __init__(self, settings: DrySettings) -> None:
        self._settings = settings
        self._gram = min(settings.allowed_length, _GRAM)
        self._seen = 0  # of the tokens told
        self._tokens: NDArray[np.int64] = _NOWHERE  # [capacity] those of them that can matter, the first `_count`
        self._count = 0
        self._since = 0  # how many have come after the last breaker
        # Where the grams of the tokens told first end, in the order of grams; and of those that came one by one.
        self._grams: NDArray[np.int64] = _NOWHERE
        self._ends: _Places = _NOWHERE
        self._later: dict[int, list[int]] = {}
        # Where the last tokens stand before, a gram of them at least: the places of the last one, ascending, and how
        # many tokens up to there are equal.
        self._places: _Places = _NOWHERE
        self._lengths: NDArray[np.int64] = _NOWHERE

    def penalties(self, tokens: Sequence[int]) -> Mapping[int, float]:
        """What is to be taken off the logit of each token that would repeat something; `tokens`: prompt and output, as
        at the call before, and what has come since."""
        if not self._seen:
            self._begin(tokens)
        else:
            for token_id in tokens[self._seen :]:
                self._push(token_id)
        self._seen = len(tokens)
        return self._costs() if len(self._places) else {}

    def _begin(self, tokens: Sequence[int]) -> None:
        last_n = self._settings.last_n
        told = tokens if last_n is None else tokens[max(len(tokens) - last_n, 0) :]
        self._tokens = np.array(told, np.int64)
        count = self._count = len(told)
        breakers = self._settings.breakers
        self._since = next((i for i in range(count) if told[count - 1 - i] in breakers), count)
        if count < self._gram:
            return
        grams = _grams(self._tokens, self._gram)
        order = np.argsort(grams[:-1], kind="stable")
        self._grams, self._ends = grams[order], order + (self._gram - 1)
        if self._since >= self._gram:
            gram = int(grams[-1])
            self._places = self._places_of(gram)
            self._lengths = _lengths(self._tokens, self._places, self._gram, self._since)
            self._later[gram] = [count - 1]

    def _push(self, token_id: int) -> None:
        place, before, lengths_before = self._count, self._places, self._lengths
        if place == len(self._tokens):
            self._tokens = np.concatenate((self._tokens, np.zeros(place + 64, np.int64)))
        self._tokens[place] = token_id
        self._count += 1
        self._since = 0 if token_id in self._settings.breakers else self._since + 1
        self._places = self._lengths = _NOWHERE
        if self._since < self._gram:
            return
        gram = int(_grams(self._tokens[place + 1 - self._gram : place + 1], self._gram)[0])
        places = self._places = self._places_of(gram)
        if len(places):
            self._lengths = np.full(len(places), self._gram)
            if len(before):  # the place before each of these
                at = np.minimum(np.searchsorted(before, places - 1), len(before) - 1)
                follows = before[at] == places - 1
                self._lengths[follows] = lengths_before[at[follows]] + 1
        self._later.setdefault(gram, []).append(place)

    def _places_of(self, gram: int) -> _Places:
        first, end = np.searchsorted(self._grams, (gram, gram + 1)).tolist()
        later = self._later.get(gram)
        if later is None:
            return self._ends[first:end] if first < end else _NOWHERE
        return np.concatenate((self._ends[first:end], np.array(later, np.int64)))

    def _costs(self) -> Mapping[int, float]:
        settings, places, lengths = self._settings, self._places, self._lengths
        if settings.last_n is not None:
            lengths = np.minimum(lengths, places - (self._count - settings.last_n) + 1)
        long = lengths >= settings.allowed_length
        followers, which = np.unique(self._tokens[places[long] + 1], return_inverse=True)
        longest = np.zeros(len(followers), np.int64)
        np.maximum.at(longest, which, lengths[long])
        return {
            token_id: _penalty(settings, length - settings.allowed_length)
            for token_id, length in zip(followers.tolist(), longest.tolist(), strict=True)
            if token_id not in settings.breakers
        }


def _grams(tokens: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """Each run of so many tokens as a number of its own."""
    grams = tokens[: len(tokens) - size + 1].copy()
    for i in range(1, size):
        grams = (grams << _ID_BITS) | tokens[i : len(tokens) - size + 1 + i]
    return grams


def _lengths(history: NDArray[np.int64], places: _Places, known: int, most: int) -> NDArray[np.int64]:
    """How many tokens up to each place are equal to the last ones of `history`: `known` at least, `most` at most."""
    lengths = np.full(len(places), known)
    last, longer, cost = len(history) - 1, np.arange(len(places)), 0.0
    for length in range(known, most):
        longer = longer[places[longer] >= length]
        longer = longer[history[places[longer] - length] == history[last - length]]
        if not len(longer):
            break
        lengths[longer] = length + 1
        cost += _ROUND_COST + len(longer) / 8
        if cost > len(history) + 10 * _ROUND_COST:
            return np.minimum(_z_function(history[::-1].tolist())[last - places], most)
    return lengths


def _z_function(text: Sequence[int]) -> NDArray[np.int64]:
    """How much of what follows each place is equal to the beginning, in linear time, however repetitive the text is.
    (Gusfield, "Algorithms on Strings, Trees, and Sequences", 1997, section 1.3.)"""
    lengths = [0] * len(text)
    left = right = 0  # the match that ends last
    for i in range(1, len(text)):
        length = min(lengths[i - left], right - i) if i < right else 0
        if i + length >= right:
            while i + length < len(text) and text[length] == text[i + length]:
                length += 1
            left, right = i, i + length
        lengths[i] = length
    return np.array(lengths, np.int64)


def _penalty(settings: DrySettings, power: int) -> float:
    try:
        return min(settings.multiplier * settings.base**power, LARGEST_PENALTY)
    except OverflowError:
        return LARGEST_PENALTY
