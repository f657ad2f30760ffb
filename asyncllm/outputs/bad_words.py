"""Words of several tokens that an output may not hold."""

from __future__ import annotations

from collections.abc import Sequence


class BadSequences:
    """Knows which tokens would complete a forbidden sequence."""

    def __init__(self, sequences: Sequence[Sequence[int]]) -> None:
        """Each of at least two tokens."""
        self._beginnings: dict[int, list[tuple[int, ...]]] = {}  # by their last token
        for sequence in sequences:
            self._beginnings.setdefault(sequence[-2], []).append(tuple(sequence))

    def banned(self, tokens: Sequence[int], start: int = 0) -> set[int]:
        """The tokens that may not come next; the output begins at `start`."""
        length = len(tokens)
        if length <= start:
            return set()
        candidates = self._beginnings.get(tokens[-1], ())
        return {s[-1] for s in candidates if length + 1 - len(s) >= start and tuple(tokens[1 - len(s) :]) == s[:-1]}
