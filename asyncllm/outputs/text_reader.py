"""TextReader: reads a text that still comes, for parsers that must give the same however it is cut.

A parser is a generator. Where it needs a character that is not there yet, it yields, and goes on when more text was
pushed or the end was told. So it reads as if the whole text were there, and no decision of it can depend on the cuts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import TypeVar

Result = TypeVar("Result")
Reading = Generator[None, None, Result]
"""A step of a parser: `yield` is where it waits for text."""

Emit = Callable[[str], object]
"""Takes a piece of text; where the pieces are cut has no meaning."""

_STRING_END = re.compile(r'["\\]')
_BRACES = re.compile(r'[{}"]')
_BRACKETS = re.compile(r'[\[\]"]')
_BLANK = re.compile(r"\s*")


class Tags:
    """Fixed texts that mean something where they appear; none begins with, or lies inside, another one."""

    def __init__(self, *tags: str) -> None:
        self.tags = tags
        self.search = re.compile("|".join(map(re.escape, tags))).search
        self.initials = frozenset(tag[0] for tag in tags)
        self._longest = max(map(len, tags))

    def held_from(self, text: str, start: int) -> int:
        """Where the longest suffix of `text[start:]` begins that may become a tag; its end where none may."""
        for at in range(max(start, len(text) - self._longest + 1), len(text)):
            if text[at] in self.initials and any(tag.startswith(text[at:]) for tag in self.tags):
                return at
        return len(text)


class TextReader:
    """The text that was pushed and not read yet."""

    __slots__ = ("_at", "_awaited", "_text", "ended")

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self.ended = False
        self._awaited: tuple[frozenset[str], Emit] | None = None
        # while the parser sleeps in `until` or `rest` with all text emitted: what wakes it, and where the rest goes

    def passes(self, text: str) -> bool:
        """Whether all that the parser would do with this text is to emit it."""
        return self._awaited is not None and self._awaited[0].isdisjoint(text)

    def pass_on(self, text: str) -> bool:
        """Emit such a text at once: the parser stays asleep."""
        awaited = self._awaited
        if awaited is None or not awaited[0].isdisjoint(text):
            return False
        awaited[1](text)
        return True

    def push(self, text: str) -> None:
        """More text comes."""
        self._text = self._text[self._at :] + text
        self._at = 0

    def more(self) -> Reading[bool]:
        """Wait for a character; False at the end."""
        while self._at == len(self._text):
            if self.ended:
                return False
            yield
        return True

    def peek(self) -> Reading[str]:
        """The next character, not read yet; "" at the end."""
        return self._text[self._at] if (yield from self.more()) else ""

    def accept(self, *literals: str) -> Reading[str]:
        """Read one of these, if it comes next; "" if none does. No literal begins with another one."""
        longest = max(map(len, literals))
        while True:
            rest = self._text[self._at : self._at + longest]
            for literal in literals:
                if rest.startswith(literal):
                    self._at += len(literal)
                    return literal
            if self.ended or not any(literal.startswith(rest) for literal in literals):
                return ""
            yield

    def run(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Read the longest run of characters that each match; `pattern` is a character class and a star."""
        pieces = []
        while True:
            match = pattern.match(self._text, self._at)
            assert match is not None, "a star matches everywhere"
            pieces.append(match.group())
            self._at = match.end()
            if self._at < len(self._text) or not (yield from self.more()):
                return "".join(pieces)

    def blank(self) -> Reading[str]:
        """Read white space, if any comes."""
        return (yield from self.run(_BLANK))

    def until(self, tags: Tags, emit: Emit) -> Reading[str]:
        """Read up to and with the first tag. The text before it is emitted as it comes, but for a suffix that may
        become a tag. Returns the tag; "" at the end."""
        while True:
            text = self._text
            found = tags.search(text, self._at)
            if found is not None:
                self._pass(found.start(), emit)
                self._at = found.end()
                return found.group()
            self._pass(len(text) if self.ended else tags.held_from(text, self._at), emit)
            if self.ended:
                return ""
            if self._at == len(text):
                self._awaited = (tags.initials, emit)
            yield
            self._awaited = None

    def rest(self, emit: Emit) -> Reading[None]:
        """Read to the end."""
        while True:
            self._pass(len(self._text), emit)
            if self.ended:
                return
            self._awaited = (frozenset(), emit)
            yield

    def take(self, count: int, emit: Emit) -> Reading[bool]:
        """Read so many characters; False where the end comes first."""
        for _ in range(count):
            if not (yield from self.more()):
                return False
            self._pass(self._at + 1, emit)
        return True

    def json_container(self, emit: Emit) -> Reading[bool]:
        """Read a JSON object, or an array, whose first character comes next. False where the text ends inside.

        Only strings and the container's own kind of bracket are looked at: it ends where it should also if what is
        inside is not quite JSON.
        """
        opening = yield from self.peek()
        pattern = _BRACES if opening == "{" else _BRACKETS
        depth = 0
        while True:
            found = pattern.search(self._text, self._at)
            if found is None:
                self._pass(len(self._text), emit)
                if not (yield from self.more()):
                    return False
                continue
            self._pass(found.end(), emit)
            if found.group() == '"':
                if not (yield from self._string_end(emit)):
                    return False
            else:
                depth += 1 if found.group() == opening else -1
                if depth == 0:
                    return True

    def json_string(self, emit: Emit) -> Reading[bool]:
        """Read a JSON string, whose first quote comes next. False where the text ends inside."""
        yield from self.take(1, emit)
        return (yield from self._string_end(emit))

    def _string_end(self, emit: Emit) -> Reading[bool]:
        while True:
            found = _STRING_END.search(self._text, self._at)
            if found is None:
                self._pass(len(self._text), emit)
                if not (yield from self.more()):
                    return False
                continue
            self._pass(found.end(), emit)
            if found.group() == '"':
                return True
            if not (yield from self.take(1, emit)):  # what a backslash stands before
                return False

    def _pass(self, end: int, emit: Emit) -> None:
        if end > self._at:
            emit(self._text[self._at : end])
            self._at = end
