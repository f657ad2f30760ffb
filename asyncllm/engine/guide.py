"""Guide: what the host has to say between two tokens of one late request."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from asyncllm.engine.plan import Adjustment, RowBias, RowSampling
from asyncllm.errors import InvalidParamsError
from asyncllm.outputs.bad_words import BadSequences
from asyncllm.outputs.constraint import Constraint
from asyncllm.outputs.dry import DryHistory
from asyncllm.outputs.token_mask import Mask, token_mask


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
    dry: DryHistory | None = None
    jumps: bool = True
    """Forced tokens are not sampled. They must be where log-probabilities are asked for: for each token, or for the
    prompt's, which is not computed where the forced ones are all that comes."""
    tells_tokens: bool = False  # see `Word`
    end_ids: Collection[int] = ()  # with which the constraint marks an output that is complete


class Guide:
    """Follows the tokens of one choice. Used by one thread at a time.

    A constraint that leaves nothing but an end ends the request, whatever its min_tokens. So does a complete output
    after which nothing may follow that allowed_token_ids and bad_words leave.
    """

    def __init__(
        self, guidelines: Guidelines, *, prompt: Sequence[int], sampling: RowSampling, vocab_size: int
    ) -> None:
        self._guidelines = guidelines
        self._sampling = sampling
        self._vocab_size = vocab_size
        self._words = -(-vocab_size // 32)
        self._nothing = bytes(4 * self._words)
        self._suppressed = token_mask(sampling.suppressed, vocab_size)
        self._ends = token_mask(guidelines.end_ids, vocab_size)
        self._legal: Mask | None = None  # beside the constraint; None: all
        if sampling.banned or sampling.allowed is not None:
            self._legal = ~token_mask(sampling.banned, vocab_size)
            if sampling.allowed is not None:
                self._legal &= token_mask(sampling.allowed, vocab_size)
        self.prompt_tokens = len(prompt)
        self.token_ids = [*prompt]
        """Prompt and output, forced tokens included that were said last."""

    def advance(self, token_ids: Sequence[int]) -> Word:
        """From the tokens that came since the last call, forced ones apart, to what comes next. Raises what is wrong
        with the constraint, and `InvalidParamsError` where nothing may come next."""
        self.token_ids += token_ids
        constraint = self._guidelines.constraint
        if constraint is None:
            return self._word(None, self._banned())
        if token_ids:
            constraint.accept(token_ids)
        forced: tuple[int, ...] = ()
        finished = constraint.finished
        if self._guidelines.jumps and not finished:
            forced = constraint.forced()
            if forced:
                self._take_forced(forced)
                constraint.accept(forced)
                finished = constraint.finished
        mask = None if finished else constraint.mask()
        banned = self._banned()
        if mask is not None:
            self._check_mask(mask)
            legal = self._left(mask, banned)
            if legal is not mask and not legal.any():
                if not (mask & self._ends).any():
                    raise _nothing_left()
                finished = True
            elif len(self.token_ids) < self._sampling.suppress_before:
                finished = not (legal & ~self._suppressed).any()
        return Word(None, forced) if finished else self._word(mask, banned, forced)

    def _take_forced(self, token_ids: Sequence[int]) -> None:
        """Raises `InvalidParamsError` for one that allowed_token_ids or bad_words forbid."""
        free = self._legal is None and self._guidelines.bad_sequences is None
        for token_id in token_ids:
            if not free and not self._left(token_mask((token_id,), self._vocab_size), self._banned()).any():
                raise _nothing_left()
            self.token_ids.append(token_id)

    def _word(self, mask: Mask | None, banned: set[int], forced: tuple[int, ...] = ()) -> Word:
        dry = self._guidelines.dry
        biases: dict[int, float] = {}
        if dry is not None:
            biases = {token_id: -penalty for token_id, penalty in dry.penalties(self.token_ids).items()}
        if banned:
            if mask is None:
                self._check_left(banned)
            biases.update(dict.fromkeys(banned, -np.inf))
        bias = _row_bias(biases) if biases else None
        return Word(Adjustment(mask, bias), forced, self.token_ids.copy() if self._guidelines.tells_tokens else ())

    def _check_mask(self, mask: Mask) -> None:
        if mask.shape != (self._words,) or mask.dtype != np.uint32:
            raise ValueError(f"a mask of {self._words} words of uint32 was due, got {mask.dtype} {mask.shape}")
        if mask.tobytes() == self._nothing:  # a fifth of what any() takes
            raise ValueError("the constraint leaves no token, and is not finished")

    def _banned(self) -> set[int]:
        """What would complete a bad word of several tokens."""
        sequences = self._guidelines.bad_sequences
        return set() if sequences is None else sequences.banned(self.token_ids, self.prompt_tokens)

    def _left(self, mask: Mask, banned: set[int]) -> Mask:
        """What allowed_token_ids and bad_words leave of it; `mask` itself where there is nothing of the kind."""
        legal = mask if self._legal is None else mask & self._legal
        return legal & ~token_mask(banned, self._vocab_size) if banned else legal

    def _check_left(self, banned: set[int]) -> None:
        """Raise `InvalidParamsError` where these bans, with the others, leave nothing of the vocabulary."""
        sampling = self._sampling
        bans = {*banned, *sampling.banned}
        if len(self.token_ids) < sampling.suppress_before:
            bans.update(sampling.suppressed)
        if len(bans) >= self._vocab_size if sampling.allowed is None else bans.issuperset(sampling.allowed):
            raise InvalidParamsError("bad_words, with what else is banned, leave no token")


def _nothing_left() -> InvalidParamsError:
    return InvalidParamsError(
        "structured_output with allowed_token_ids or bad_words: these leave nothing of what may come next"
    )


def _row_bias(biases: Mapping[int, float]) -> RowBias:
    return RowBias(np.array(list(biases), np.int32), np.array(list(biases.values()), np.float32))
