"""Pythonic: the whole text is a list of calls, `[f(a=1), g(b="x")]`, as of Llama 4 and ToolACE.

A call goes out when all of it is there: before its end it might still be something else than literals.
"""

from __future__ import annotations

import re

from asyncllm.outputs.text_reader import Reading, TextReader
from asyncllm.outputs.tool_calls.deltas import CallWriter
from asyncllm.outputs.tool_calls.python_literal import keywords_to_json

_OPEN, _CLOSE = "<|python_start|>", "<|python_end|>"
_NAME = re.compile(r"[\w.:/-]*")
_PLAIN = re.compile(r"[^()\[\]{}'\"]*")
_IN_STRING = {quote: re.compile(rf"[^\\{quote}]*") for quote in "'\""}


def read_pythonic(reader: TextReader, calls: CallWriter) -> Reading[None]:
    """The parser of this format."""
    head = yield from reader.blank()
    head += yield from reader.accept(_OPEN)
    head += yield from reader.blank()
    bracket = yield from reader.accept("[")
    head += bracket
    while bracket:
        head += yield from reader.blank()
        text = yield from _read_call(reader, calls)
        if text is not None:
            head += text
            break
        head = yield from reader.blank()
        if (yield from reader.accept("]")):
            yield from reader.accept(_CLOSE)
            head = ""
            break
        bracket = yield from reader.accept(",")
        head += bracket
    calls.content(head)
    yield from reader.rest(calls.content)


def _read_call(reader: TextReader, calls: CallWriter) -> Reading[str | None]:
    """Read one call. Returns what was read where it is none."""
    name = yield from reader.run(_NAME)
    if not calls.knows(name) or not (yield from reader.accept("(")):
        return name
    pieces: list[str] = []
    whole = yield from _read_arguments(reader, pieces)
    text = "".join(pieces)
    arguments = keywords_to_json(text[:-1]) if whole else None
    if arguments is None:
        return f"{name}({text}"
    calls.start(name)
    calls.arguments(arguments)
    return None


def _read_arguments(reader: TextReader, pieces: list[str]) -> Reading[bool]:
    """Read to the parenthesis that closes the call; False where the text ends before it."""
    depth = 1
    while depth:
        pieces.append((yield from reader.run(_PLAIN)))
        if not (yield from reader.take(1, pieces.append)):
            return False
        mark = pieces[-1]
        if mark in _IN_STRING:
            while True:
                pieces.append((yield from reader.run(_IN_STRING[mark])))
                if not (yield from reader.take(1, pieces.append)):
                    return False
                if pieces[-1] == mark:
                    break
                if not (yield from reader.take(1, pieces.append)):  # what a backslash stands before
                    return False
        else:
            depth += 1 if mark in "([{" else -1
    return True
