"""ReasonedForm: a constraint on what follows a model's reasoning, and none on that."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from asyncllm.errors import InvalidParamsError
from asyncllm.outputs.constraint import Constraint
from asyncllm.outputs.thinking_budget import ThinkingBudget
from asyncllm.outputs.token_mask import Mask, token_mask


class ReasonedForm:
    """The output begins with the reasoning's opening tag, unless the prompt did, or with the form. What is between the
    tags is free, but does not end the output; right behind the closing tag the form begins."""

    def __init__(self, form: Constraint, thinking: ThinkingBudget, end_ids: Collection[int], vocab_size: int) -> None:
        """`thinking`: at its start. Raises `InvalidParamsError` where an opening tag could be taken for the form."""
        self._form = form
        self._thinking: ThinkingBudget | None = thinking  # until the form has begun
        self._opening = 0  # tokens of the opening tag that have come
        self._vocab_size = vocab_size
        self._free = ~token_mask(end_ids, vocab_size)
        if vocab_size % 32:
            self._free[-1] &= np.uint32((1 << vocab_size % 32) - 1)
        if not thinking.begun:
            first, tag = form.mask(), token_mask(thinking.start[:1], vocab_size)
            if first is None or (len(thinking.start) > 1 and (first & tag).any()):
                raise InvalidParamsError("structured_output.after_reasoning: this form may begin as the reasoning does")

    def accept(self, token_ids: Sequence[int]) -> None:
        """See `Constraint`."""
        for count, token_id in enumerate(token_ids):
            thinking = self._thinking
            if thinking is None:
                return self._form.accept(token_ids[count:])
            if not thinking.begun:
                if not self._opening and token_id != thinking.start[0]:
                    self._thinking = None
                    return self._form.accept(token_ids[count:])
                self._opening += 1
            thinking.accept((token_id,))
            if thinking.over:
                self._thinking = None
        return None

    def mask(self) -> Mask | None:
        """See `Constraint`."""
        thinking = self._thinking
        if thinking is None:
            return self._form.mask()
        if thinking.begun:
            closing = thinking.mask()
            return self._free if closing is None else closing
        tag = token_mask(thinking.start[self._opening : self._opening + 1], self._vocab_size)
        if self._opening:
            return tag
        first = self._form.mask()
        assert first is not None
        return first | tag

    def forced(self) -> tuple[int, ...]:
        """See `Constraint`."""
        thinking = self._thinking
        if thinking is None:
            return self._form.forced()
        if thinking.begun:
            return thinking.forced()
        return thinking.start[self._opening :] if self._opening else ()

    @property
    def finished(self) -> bool:
        """See `Constraint`."""
        return self._thinking is None and self._form.finished

    def copy(self) -> ReasonedForm:
        """See `Constraint`."""
        copy = object.__new__(ReasonedForm)
        copy._form, copy._vocab_size, copy._free = self._form.copy(), self._vocab_size, self._free
        copy._opening = self._opening
        copy._thinking = None if self._thinking is None else self._thinking.copy()
        return copy
