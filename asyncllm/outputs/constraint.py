"""Constraint: what a request's next tokens may be, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray


class Constraint(Protocol):
    """The state of one request's constraint. Used by one thread at a time, and not always the same one."""

    def accept(self, token_ids: Sequence[int]) -> None:
        """These tokens came next, in this order. Each of them was legal."""
        ...

    def mask(self) -> NDArray[np.uint32] | None:
        """[ceil(vocabulary / 32)] which tokens may come next: bit v % 32 of word v // 32 for token v; None: all may.

        An end-of-sequence id is legal only where the output is complete, ids beyond the vocabulary never are.
        """
        ...

    def forced(self) -> tuple[int, ...]:
        """The tokens that must come next, as far as there is exactly one way on; empty where there is more."""
        ...

    @property
    def finished(self) -> bool:
        """No token may come any more: the request ends."""
        ...

    def copy(self) -> Self:
        """The same state, on its own from now on. Cheap."""
        ...
