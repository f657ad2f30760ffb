"""ThinkingBudget: a constraint that ends a model's reasoning after so many tokens."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from typing import Self

from asyncllm.outputs.token_mask import Mask, token_mask


class _Stage(Enum):
    BEFORE = auto()
    INSIDE = auto()
    AFTER = auto()


class ThinkingBudget:
    """Tokens are free until the reasoning has used up its budget; then those of its end are forced.

    Reasoning begins with the tokens of its beginning (in the output, or at the end of the prompt), which do not count,
    and is over with those of its end, or never begins.
    """

    def __init__(
        self, start: Sequence[int], end: Sequence[int], budget: int | None, vocab_size: int, *, begun: bool
    ) -> None:
        """`start` and `end`: the tokens between which a model reasons, at least one each; `begun`: the prompt has the
        first of them. A `budget` of None is never used up."""
        self.start = tuple(start)
        """With which the reasoning begins."""
        self.end = tuple(end)
        """What is forced."""
        self._left = budget
        self._vocab_size = vocab_size
        self._stage = _Stage.INSIDE if begun else _Stage.BEFORE
        self._tail: tuple[int, ...] = ()  # of the tokens, as many as the longer of the two
        self._closing: tuple[int, ...] = ()  # still to be forced
        self._settle()

    @property
    def begun(self) -> bool:
        """Whether the tokens of the beginning have come."""
        return self._stage is not _Stage.BEFORE

    @property
    def over(self) -> bool:
        """Whether those of the end have."""
        return self._stage is _Stage.AFTER

    def accept(self, token_ids: Sequence[int]) -> None:
        """See `Constraint`."""
        for token_id in token_ids:
            self._accept(token_id)

    def forced(self) -> tuple[int, ...]:
        """See `Constraint`."""
        return self._closing

    def mask(self) -> Mask | None:
        """See `Constraint`."""
        return token_mask(self._closing[:1], self._vocab_size) if self._closing else None

    @property
    def finished(self) -> bool:
        """See `Constraint`: it never ends a request."""
        return False

    def copy(self) -> Self:
        """See `Constraint`."""
        copy = type(self)(self.start, self.end, self._left, self._vocab_size, begun=False)
        copy._stage, copy._tail, copy._closing = self._stage, self._tail, self._closing
        return copy

    def _accept(self, token_id: int) -> None:
        if self._closing:
            self._closing = self._closing[1:]
            if not self._closing:
                self._stage = _Stage.AFTER
            return
        most = max(len(self.start), len(self.end))
        self._tail = (*self._tail, token_id)[-most:]
        if self._stage is _Stage.BEFORE and self._ends_with(self.start):
            self._stage, self._tail = _Stage.INSIDE, ()
        elif self._stage is _Stage.INSIDE:
            if self._left is not None:
                self._left -= 1
            if self._ends_with(self.end):
                self._stage = _Stage.AFTER
        self._settle()

    def _ends_with(self, tokens: tuple[int, ...]) -> bool:
        return self._tail[-len(tokens) :] == tokens

    def _settle(self) -> None:
        if self._stage is _Stage.INSIDE and self._left is not None and self._left <= 0:
            self._closing = self.end
