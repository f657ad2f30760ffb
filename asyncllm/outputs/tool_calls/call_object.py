"""CallObject: reads `{"name": ..., "arguments": {...}}`, the JSON that most formats put a call into.

A call is certain once the name of a tool that may be called and the opening brace of its arguments were read; from
then on the arguments go out as they come. What turns out earlier to be no call is given back as text.
"""

from __future__ import annotations

import json
import re

from asyncllm.outputs.text_reader import Reading, TextReader
from asyncllm.outputs.tool_calls.deltas import CallWriter

_ARGUMENT_KEYS = frozenset(("arguments", "parameters"))
_OTHER_KEYS = frozenset(("type", "id"))
_SCALAR = re.compile(r"[-+.\w]*")


class CallObject:
    """One object. `head` is the text before it that belongs to it, given back with it.

    `strict`: an object with a key that no call has is none; else such keys are passed over.
    """

    def __init__(self, reader: TextReader, calls: CallWriter, head: str, *, strict: bool = False) -> None:
        self._reader = reader
        self._calls = calls
        self._strict = strict
        self._read = [head]
        self._name: str | None = None
        self._arguments: str | None = None  # read before the name was known
        self._started = False

    def read(self) -> Reading[bool]:
        """Read the object, whose brace comes next. False where it was no call and was given back."""
        reader = self._reader
        yield from reader.take(1, self._keep)
        sound = True
        if not (yield from self._accept("}")):
            while sound := (yield from self._member()):
                if not (yield from self._accept(",")):
                    sound = yield from self._accept("}")
                    break
        if sound and not self._started and self._name is not None:
            self._start(self._arguments or "{}")
        if not sound or not self._started:  # after a call began: what is wrong behind its arguments
            self._calls.content("".join(self._read))
        return self._started

    def _member(self) -> Reading[bool]:
        """One key and its value; False where the text is not that, or rules a call out."""
        key = yield from self._string()
        if key is None or not (yield from self._accept(":")):
            return False
        self._keep((yield from self._reader.blank()))
        if key == "name":
            self._name = yield from self._string()
            if self._name is None or not self._calls.knows(self._name):
                return False
            if self._arguments is not None:
                self._start(self._arguments)
            return True
        if key in _ARGUMENT_KEYS and not self._started:
            return (yield from self._read_arguments())
        if self._strict and key not in _OTHER_KEYS:
            return False
        return (yield from self._value()) is not None

    def _read_arguments(self) -> Reading[bool]:
        opening = yield from self._reader.peek()
        if opening == "{" and self._name is not None:
            self._start("")
            return (yield from self._reader.json_container(self._calls.arguments))
        if opening not in ("{", '"', "n"):  # an object, an object in a string, null
            return False
        value = yield from self._value()
        if value is None:
            return False
        if opening == '"':
            value = _object_in(value)
        elif opening == "n":
            value = "{}" if value == "null" else None
        if value is None:
            return False
        self._arguments = value
        if self._name is not None:
            self._start(value)
        return True

    def _start(self, arguments: str) -> None:
        assert self._name is not None
        self._started = True
        self._read.clear()
        self._calls.start(self._name)
        self._calls.arguments(arguments)

    def _value(self) -> Reading[str | None]:
        """The text of a value; None where there is none."""
        pieces: list[str] = []
        opening = yield from self._reader.peek()
        if opening and opening in "{[":
            whole = yield from self._reader.json_container(pieces.append)
        elif opening == '"':
            whole = yield from self._reader.json_string(pieces.append)
        else:
            pieces.append((yield from self._reader.run(_SCALAR)))
            whole = bool(pieces[0])
        text = "".join(pieces)
        self._keep(text)
        return text if whole else None

    def _string(self) -> Reading[str | None]:
        self._keep((yield from self._reader.blank()))
        if (yield from self._reader.peek()) != '"':
            return None
        text = yield from self._value()
        if text is None:
            return None
        try:
            return str(json.loads(text))
        except ValueError:
            return None

    def _accept(self, literal: str) -> Reading[bool]:
        blank = yield from self._reader.blank()
        found = yield from self._reader.accept(literal)
        self._keep(blank + found)
        return bool(found)

    def _keep(self, text: str) -> None:
        self._read.append(text)


def _object_in(text: str) -> str | None:
    """The object that a JSON string holds as text."""
    try:
        inner = json.loads(text)
        return str(inner).strip() if isinstance(json.loads(inner), dict) else None
    except (ValueError, RecursionError):
        return None
