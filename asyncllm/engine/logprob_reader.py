"""LogprobReader: log-probabilities as a caller sees them. Made where a stream is read, not on the engine's thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import overload

from asyncllm.engine.plan import TokenScores
from asyncllm.results import PositionLogprobs, TokenLogprob

_MANY = 512
"""Entries of a position that are made only when they are looked at: a vocabulary's would hold up the event loop."""


def token_text(data: bytes) -> str:
    """The bytes of a token as text, or spelt out where they are no UTF-8 by themselves."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class LogprobReader:
    """For one request."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        """`token_bytes`: the raw bytes of an id, b"" without a tokenizer."""
        self.token_bytes = token_bytes

    def read(self, positions: Iterable[TokenScores]) -> tuple[PositionLogprobs, ...]:
        """Of positions by themselves."""
        return tuple([self._position(scores) for scores in positions])

    def _position(self, scores: TokenScores) -> PositionLogprobs:
        count = len(scores.token_ids)
        if count > _MANY:
            return PositionLogprobs(self.entry(scores, 0), ManyLogprobs(self, scores))
        entries = [self.entry(scores, place) for place in range(count)]
        return PositionLogprobs(entries[0], tuple(entries[1:]))

    def entry(self, scores: TokenScores, place: int) -> TokenLogprob:
        """One of a position's."""
        token_id = int(scores.token_ids[place])
        data = self.token_bytes(token_id)
        return TokenLogprob(token_id, float(scores.logprobs[place]), int(scores.ranks[place]), data, token_text(data))


class ManyLogprobs(Sequence[TokenLogprob]):
    """All but the first entry of a position."""

    def __init__(self, reader: LogprobReader, scores: TokenScores) -> None:
        self._reader = reader
        self._scores = scores

    def __len__(self) -> int:
        return len(self._scores.token_ids) - 1

    @overload
    def __getitem__(self, index: int) -> TokenLogprob: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[TokenLogprob]: ...

    def __getitem__(self, index: int | slice) -> TokenLogprob | Sequence[TokenLogprob]:
        places = range(1, len(self._scores.token_ids))[index]
        if isinstance(places, range):
            return tuple(self._reader.entry(self._scores, place) for place in places)
        return self._reader.entry(self._scores, places)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))
