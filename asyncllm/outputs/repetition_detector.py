"""RepetitionDetector: whether an output repeats itself (`SamplingParams.repetition_detection`)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class RepetitionDetector:
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
        """Whether the output repeats itself with this token."""
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
