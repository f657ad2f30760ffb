"""Python's literals as JSON text: the arguments of a pythonic call. Nothing is ever executed, and no name but the
constants' means anything."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import NamedTuple

MAX_DEPTH = 64

_TOKEN = re.compile(
    r"""\s*(?:
        (?P<string>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')
      | (?P<number>[-+]?(?:\d[\d_]*(?:\.[\d_]*)?|\.\d[\d_]*)(?:[eE][-+]?\d+)?)
      | (?P<name>[^\W\d]\w*)
      | (?P<mark>[][{}(),:=])
    )""",
    re.VERBOSE | re.DOTALL,
)
_JSON_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?")
_ESCAPE = re.compile(r"\\(\n|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[0-7]{1,3}|.)", re.DOTALL)
_SIMPLE_ESCAPES = {
    "\n": "", "\\": "\\", "'": "'", '"': '"', "a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t",
    "v": "\v",
}  # fmt: skip
_CONSTANTS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}


class _Token(NamedTuple):
    kind: str  # a group of `_TOKEN`; "end"
    text: str


class _NotLiteral(Exception):
    """The text is something else."""


def keywords_to_json(text: str) -> str | None:
    """`a=1, b="x"` as `{"a": 1, "b": "x"}`; None where it is anything but keywords with literals."""
    try:
        return _Literals(text).keywords()
    except _NotLiteral:
        return None


class _Literals:
    """A reader of one text. Numbers keep their digits; strings become JSON's, in the same order of keys."""

    def __init__(self, text: str) -> None:
        self._tokens = _tokens(text)
        self._next = next(self._tokens)

    def keywords(self) -> str:
        """The whole text."""
        pieces: dict[str, str] = {}
        while self._next.kind != "end":
            name = self._take()
            if name.kind != "name" or name.text in pieces or self._take().text != "=":
                raise _NotLiteral
            pieces[name.text] = self._value(0)
            if self._next.kind != "end" and self._take().text != ",":
                raise _NotLiteral
        return _object({json.dumps(name, ensure_ascii=False): value for name, value in pieces.items()})

    def _take(self) -> _Token:
        token = self._next
        if token.kind != "end":
            self._next = next(self._tokens)
        return token

    def _value(self, depth: int) -> str:
        token = self._take()
        if depth > MAX_DEPTH:
            raise _NotLiteral
        if token.kind == "string":
            return _string(token.text)
        if token.kind == "number":
            return _number(token.text)
        if token.kind == "name" and token.text in _CONSTANTS:
            return _CONSTANTS[token.text]
        if token.text in ("[", "("):
            return self._sequence("]" if token.text == "[" else ")", depth + 1)
        if token.text == "{":
            return self._mapping(depth + 1)
        raise _NotLiteral

    def _sequence(self, closing: str, depth: int) -> str:
        items, comma = [], False
        while self._next.text != closing or self._next.kind != "mark":
            items.append(self._value(depth))
            comma = self._next == ("mark", ",")
            if not comma:
                break
            self._take()
        if self._take() != ("mark", closing) or (closing == ")" and len(items) == 1 and not comma):
            raise _NotLiteral  # (1) is no tuple
        return f"[{', '.join(items)}]"

    def _mapping(self, depth: int) -> str:
        items: dict[str, str] = {}
        while self._next != ("mark", "}"):
            key = self._take()
            if key.kind != "string" or self._take() != ("mark", ":"):
                raise _NotLiteral  # JSON has no other keys
            items[_string(key.text)] = self._value(depth)
            if self._next != ("mark", ","):
                break
            self._take()
        if self._take() != ("mark", "}"):
            raise _NotLiteral
        return _object(items)


def _tokens(text: str) -> Iterator[_Token]:
    at, end = 0, len(text.rstrip())
    while at < end:
        match = _TOKEN.match(text, at)
        if match is None or match.lastgroup is None:
            raise _NotLiteral
        yield _Token(match.lastgroup, match.group(match.lastgroup))
        at = match.end()
    yield _Token("end", "")


def _object(items: dict[str, str]) -> str:
    return "{" + ", ".join(f"{key}: {value}" for key, value in items.items()) + "}"


def _number(text: str) -> str:
    plain = text.replace("_", "").removeprefix("+")
    if text.endswith("_") or "__" in text or "_." in text or "._" in text:
        raise _NotLiteral
    if _JSON_NUMBER.fullmatch(plain):
        return plain
    fixed = re.sub(r"^(-?)\.", r"\g<1>0.", plain)
    fixed = re.sub(r"\.(?=$|[eE])", ".0", fixed)  # .5 and 5. are Python's
    if not _JSON_NUMBER.fullmatch(fixed):
        raise _NotLiteral
    return fixed


def _string(text: str) -> str:
    value = _ESCAPE.sub(_unescape, text[1:-1])
    try:
        value = value.encode("utf-16", "surrogatepass").decode("utf-16")
    except UnicodeDecodeError:
        raise _NotLiteral from None  # half of a surrogate pair
    return json.dumps(value, ensure_ascii=False)


def _unescape(match: re.Match[str]) -> str:
    escape = match.group(1)
    if escape[0] in "xuU" and len(escape) > 1:
        code = int(escape[1:], 16)
        if code > 0x10FFFF:
            raise _NotLiteral
        return chr(code)
    if escape[0] in "01234567":
        return chr(int(escape, 8))
    if escape in "xuUN":
        raise _NotLiteral
    return _SIMPLE_ESCAPES.get(escape, match.group())
