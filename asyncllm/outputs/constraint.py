"""What the engine needs of anything that says which tokens a choice may go on with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, Self

from asyncllm.outputs.token_mask import Mask


class Constraint(Protocol):
    """The state of one choice. Used by one thread at a time, and not always the same one. Every method may raise a
    `RequestError`, which ends the request and no other.

    What comes next is a function of the tokens accepted so far, never of which methods were called when: `forced` only
    names early what sampling under `mask` would give.
    """

    def accept(self, token_ids: Sequence[int]) -> None:
        """These tokens came next. Each must have been legal."""
        ...

    def mask(self) -> Mask | None:
        """Which tokens may come next; None where all may. Not once it is finished. The array may be written again at
        the next call, which a word about the token after that one needs."""
        ...

    def forced(self) -> tuple[int, ...]:
        """Tokens that must come next, in this order: at each of them `mask` has that token alone. May be empty."""
        ...

    @property
    def finished(self) -> bool:
        """The output is complete and nothing may follow: the choice ends here, by `stop`.

        It is True after an end-of-sequence id, and already before one where nothing else could follow; none need be
        sampled then. Such an id is legal only where the output is complete.
        """
        ...

    def copy(self) -> Self:
        """The same state, to go on with on its own: cheap."""
        ...
