"""ChoiceReader: a stream's place in what one choice has produced."""

from __future__ import annotations

from asyncllm.engine.mailbox import Mailbox
from asyncllm.results import Choice, PositionLogprobs, TokenDelta, Usage


class ChoiceReader:
    """Reads one box of a mailbox. On the stream's event loop."""

    __slots__ = ("_index", "_mailbox", "box", "read")

    def __init__(self, mailbox: Mailbox, index: int) -> None:
        self._mailbox = mailbox
        self._index = index
        self.read = 0  # how many of the ids are past
        self.box = mailbox.choices[index]

    @property
    def unread(self) -> bool:
        """Whether there are ids that are not past."""
        return len(self.box.ids) > self.read

    def next_delta(self) -> TokenDelta:
        """What is new, and not the end."""
        box, read = self.box, self.read
        known = self.read = len(box.ids)
        if box.scores is not None:
            text, ids = "".join(box.texts[read:known]), tuple(box.ids[read:known])
            return TokenDelta(text, ids, self._index, logprobs=self._logprobs(read, known))
        if known == read + 1:
            return TokenDelta(box.texts[read] if box.texts else "", (box.ids[read],), self._index)
        return TokenDelta("".join(box.texts[read:known]), tuple(box.ids[read:known]), self._index)

    def last_delta(self, usage: Usage | None) -> TokenDelta:
        """What is left of a choice that has ended. `usage`: where it is the request's last one."""
        box, end, read = self.box, self.box.end, self.read
        assert end is not None
        known = self.read = len(box.ids)
        text = "".join(box.texts[read:]) + box.tail
        logprobs = self._logprobs(read, known)
        return TokenDelta(text, tuple(box.ids[read:]), self._index, end.reason, end.stop_reason, usage, logprobs)

    def rest(self) -> TokenDelta | None:
        """What is left of a choice whose request has failed."""
        box, read = self.box, self.read
        if box.end is not None:
            return self.last_delta(None)
        known = self.read = len(box.ids)
        text = "".join(box.texts[read:]) + box.tail
        if known == read and not text:
            return None
        return TokenDelta(text, tuple(box.ids[read:]), self._index, logprobs=self._logprobs(read, known))

    def choice(self) -> Choice:
        """All of a choice that has ended."""
        box, end = self.box, self.box.end
        assert end is not None
        text, ids = "".join(box.texts) + box.tail, tuple(box.ids)
        return Choice(self._index, text, ids, end.reason, end.stop_reason, self._logprobs(0, len(ids)))

    def _logprobs(self, read: int, known: int) -> tuple[PositionLogprobs, ...] | None:
        """Of the ids from `read` to before `known`; None where they were not asked for."""
        scores, reader = self.box.scores, self._mailbox.reader
        return None if scores is None or reader is None else reader.read(scores[read:known])
