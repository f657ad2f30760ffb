"""Guide: what the host has to say between two tokens of one late request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from asyncllm.engine.plan import Adjustment, Mask
from asyncllm.outputs.constraint import Constraint


@dataclass(frozen=True, slots=True)
class Word:
    """What comes next of a late request: first the forced tokens, then one that is sampled as adjusted, or the end."""

    adjustment: Adjustment | None  # None: the request ends
    forced: tuple[int, ...] = ()


class Guide:
    """Drives the constraint of one request. Used by one thread at a time.

    A constraint that leaves nothing but an end ends the request, whatever its min_tokens.
    """

    def __init__(
        self,
        constraint: Constraint,
        *,
        vocab_size: int,
        min_tokens: int = 0,
        stop_ids: frozenset[int] = frozenset(),
        jumps: bool = True,
    ) -> None:
        """`stop_ids` may not be sampled among the first `min_tokens` tokens. `jumps`: forced tokens are not sampled;
        where the log-probability of each token is asked for, they must be."""
        self._constraint = constraint
        self._jumps = jumps
        self._words = -(-vocab_size // 32)
        self._unending = min_tokens  # so many more tokens may not be an end
        self._banned: Mask | None = None
        if min_tokens and stop_ids:
            self._banned = np.zeros(self._words, np.uint32)
            for token_id in stop_ids:
                self._banned[token_id // 32] |= np.uint32(1 << token_id % 32)

    def advance(self, token_ids: Sequence[int]) -> Word:
        """From the tokens that came since the last call, forced ones apart, to what comes next. Raises what is wrong
        with the constraint."""
        constraint = self._constraint
        if token_ids:
            constraint.accept(token_ids)
        forced: tuple[int, ...] = ()
        if self._jumps and not constraint.finished:
            forced = tuple(constraint.forced())
            if forced:
                constraint.accept(forced)
        self._unending = max(0, self._unending - len(token_ids) - len(forced))
        if constraint.finished:
            return Word(None, forced)
        mask = constraint.mask()
        if mask is not None:
            if mask.shape != (self._words,) or mask.dtype != np.uint32:
                raise ValueError(f"a mask of {self._words} words of uint32 was due, got {mask.dtype} {mask.shape}")
            if not mask.any():
                raise ValueError("the constraint leaves no token, and is not finished")
            if self._unending and self._banned is not None and not (mask & ~self._banned).any():
                return Word(None, forced)
        return Word(Adjustment(mask), forced)
