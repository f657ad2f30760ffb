"""Guide: what the host has to say between two tokens of one late request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from asyncllm.engine.plan import Adjustment, Mask, RowBias, RowSampling
from asyncllm.outputs.bad_words import BadSequences
from asyncllm.outputs.constraint import Constraint
from asyncllm.outputs.repetition import DrySettings, dry_penalties


@dataclass(frozen=True, slots=True)
class Word:
    """What comes next of a late request: first the forced tokens, then one that is sampled as adjusted, or the end."""

    adjustment: Adjustment | None  # None: the request ends
    forced: tuple[int, ...] = ()
    token_ids: Sequence[int] = ()  # prompt and output before that one, where the guide `tells_tokens`


@dataclass(frozen=True, slots=True)
class Guidelines:
    """What one choice asks of the host. Its own: `constraint` has a state."""

    constraint: Constraint | None = None
    bad_sequences: BadSequences | None = None
    dry: DrySettings | None = None
    jumps: bool = True
    """Forced tokens are not sampled; where the log-probability of each token is asked for, they must be."""
    tells_tokens: bool = False  # see `Word`


class Guide:
    """Follows the tokens of one choice. Used by one thread at a time.

    A constraint that leaves nothing but an end ends the request, whatever its min_tokens.
    """

    def __init__(
        self, guidelines: Guidelines, *, prompt: Sequence[int], sampling: RowSampling, vocab_size: int
    ) -> None:
        self._guidelines = guidelines
        self._sampling = sampling
        self._vocab_size = vocab_size
        self._words = -(-vocab_size // 32)
        self._nothing = bytes(4 * self._words)
        self._suppressed = _mask(sampling.suppressed, self._words)
        self._legal: Mask | None = None  # beside the constraint; None: all
        if sampling.banned or sampling.allowed is not None:
            self._legal = ~_mask(sampling.banned, self._words)
            if sampling.allowed is not None:
                self._legal &= _mask(sampling.allowed, self._words)
        self.prompt_tokens = len(prompt)
        self.token_ids = [*prompt]
        """Prompt and output, forced tokens included that were said last."""

    def advance(self, token_ids: Sequence[int]) -> Word:
        """From the tokens that came since the last call, forced ones apart, to what comes next. Raises what is wrong
        with the constraint, and `ValueError` where nothing may come next."""
        self.token_ids += token_ids
        constraint = self._guidelines.constraint
        if constraint is None:
            return self._word(None)
        if token_ids:
            constraint.accept(token_ids)
        forced: tuple[int, ...] = ()
        finished = constraint.finished
        if self._guidelines.jumps and not finished:
            forced = constraint.forced()
            if forced:
                constraint.accept(forced)
                self.token_ids += forced
                finished = constraint.finished
        if finished:
            return Word(None, forced)
        mask = constraint.mask()
        if mask is not None:
            self._check_mask(mask)
            legal = mask if self._legal is None else mask & self._legal
            if legal is not mask and not legal.any():
                raise ValueError("allowed_token_ids or bad_words leave nothing of what the constraint leaves")
            early = len(self.token_ids) < self._sampling.suppress_before
            if early and not (legal & ~self._suppressed).any():
                return Word(None, forced)
        return self._word(mask, forced)

    def _word(self, mask: Mask | None, forced: tuple[int, ...] = ()) -> Word:
        lines = self._guidelines
        bias = None if lines.dry is None and lines.bad_sequences is None else self._bias(mask)
        return Word(Adjustment(mask, bias), forced, self.token_ids.copy() if lines.tells_tokens else ())

    def _check_mask(self, mask: Mask) -> None:
        if mask.shape != (self._words,) or mask.dtype != np.uint32:
            raise ValueError(f"a mask of {self._words} words of uint32 was due, got {mask.dtype} {mask.shape}")
        if mask.tobytes() == self._nothing:  # a fifth of what any() takes
            raise ValueError("the constraint leaves no token, and is not finished")

    def _bias(self, mask: Mask | None) -> RowBias | None:
        lines, biases = self._guidelines, dict[int, float]()
        if lines.dry is not None:
            biases = {token_id: -penalty for token_id, penalty in dry_penalties(self.token_ids, lines.dry).items()}
        if lines.bad_sequences is not None:
            banned = lines.bad_sequences.banned(self.token_ids[self.prompt_tokens :])
            if banned:
                self._check_left(banned, mask)
                biases.update(dict.fromkeys(banned, -np.inf))
        return _row_bias(biases) if biases else None

    def _check_left(self, banned: set[int], mask: Mask | None) -> None:
        """Raise `ValueError` where these bans, with the others, leave nothing."""
        sampling = self._sampling
        bans = {*banned, *sampling.banned}
        if len(self.token_ids) < sampling.suppress_before:
            bans.update(sampling.suppressed)
        if sampling.allowed is None and mask is None:
            left = len(bans) < self._vocab_size
        elif mask is None:
            left = bool({*(sampling.allowed or ())} - bans)
        else:
            legal = mask if self._legal is None else mask & self._legal
            left = bool((legal & ~_mask(bans, self._words)).any())
        if not left:
            raise ValueError("bad_words, with what else is banned, leave no token")


def _mask(token_ids: Sequence[int] | set[int], words: int) -> Mask:
    legal = np.zeros(words * 32, np.bool_)
    legal[list(token_ids)] = True
    return np.packbits(legal, bitorder="little").view(np.uint32)


def _row_bias(biases: Mapping[int, float]) -> RowBias:
    return RowBias(np.array(list(biases), np.int32), np.array(list(biases.values()), np.float32))
