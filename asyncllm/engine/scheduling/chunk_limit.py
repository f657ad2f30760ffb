"""ChunkLimit: how many known tokens a step computes.

A decoding row waits for the whole step, so what is computed for others is in the time between two of its tokens. A
small step is bound by reading weights, and computes some tokens more for little; so a prompt that comes alone is
computed in small chunks. But each step more costs its fixed part, and who waits for a prompt produces nothing. So of
all that waits a step may compute the share that the waiting requests have among all that run: a burst goes through in
large chunks, and where nobody decodes there is no limit.

A *backlog*, more requests than there are rows for, is another matter: however fast prompts are computed, others wait
for rows. Were all rows taken at once, they would also end at about the same time, and all steps between two such waves
decode alone, which reads the weights for few tokens. So rows are taken little by little, in steps that are just large
enough to be worth the reading of the weights: then rows end little by little too, prompts are computed beside decoding
rows in nearly every step, and no row is held up for long.
"""

from __future__ import annotations

TAKING_STEPS = 16
"""In how many steps free rows are taken where as many requests as there are rows find none."""


def step_size(tokens: int) -> int:
    """The smallest 2ⁿ or 3 · 2ⁿ that is not smaller: of these sizes a GPU has graphs ready, and fills steps up."""
    power = 1 << max(0, tokens - 1).bit_length()
    return 3 * power // 4 if power >= 4 and tokens <= 3 * power // 4 else power


def tokens_worth_a_step(tokens: int, others: int, spare: int) -> int:
    """As many of `tokens` as a step should compute that a device fills up to its `step_size`: all, or where that would
    be much larger, what makes the size below. Then the rest has a step of its own, with `others` more tokens, and about
    an eighth to fill it up; that must save `spare` tokens, which are what a step more costs.
    """
    if tokens < 4:
        return tokens
    power = 1 << tokens.bit_length() - 1
    below = 3 * power // 2 if 2 * tokens >= 3 * power else power
    rest = (tokens - below + others) * 9 // 8
    return below if step_size(tokens) - below - rest >= spare else tokens


class ChunkLimit:
    """Asked and told of every step. No clock: a function of counts."""

    def __init__(self, small: int, full: int) -> None:
        """`small`: so many tokens hold nobody up for long; `full`: a step of so many is worth reading the weights."""
        self._small = small
        self._full = full
        self._piece = 0
        self._left = 0  # tokens of what is computed in pieces of this size

    def tokens(self, waiting: int, requests: int, decoding: int, behind: float = 0.0) -> int | None:
        """The most that the next step may compute of `waiting` known tokens of so many requests, beside `decoding`
        rows; None: no limit. `behind`: requests that wait and find no row, for each row that there is.

        The share is taken when the tokens are first seen, and stays until so many are computed: a burst ends in pieces
        as large as it began. What comes meanwhile can make them larger only. In a backlog the share counts anew in each
        step, and is cut down to what takes all free rows in some steps.
        """
        piece = -(-waiting * requests // max(1, requests + decoding))
        if behind > 0:
            self._left = 0
            even = int(waiting / max(1.0, TAKING_STEPS * min(1.0, behind)))
            piece = max(self._small, self._full - decoding, min(piece, even))
            return step_size(decoding + piece) - decoding
        self._left = min(self._left, waiting)  # some were cached, or are not asked for any more
        if self._left <= 0 or piece > self._piece:
            self._piece, self._left = piece, waiting
        if not decoding:
            return None
        return step_size(decoding + max(self._small, self._piece)) - decoding

    def took(self, tokens: int) -> None:
        """The step computes so many of them."""
        self._left -= tokens

    def rest(self) -> None:
        """Nothing waits."""
        self._left = 0
