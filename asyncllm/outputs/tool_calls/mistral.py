"""Mistral: `[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, ...]`, and since its tokenizer 11
`[TOOL_CALLS]f[ARGS]{"a": 1}` for each call, with or without `[ARGS]`, and with a `[CALL_ID]` before it or not."""

from __future__ import annotations

import re
import secrets
import string

from asyncllm.outputs.text_reader import Reading, Tags, TextReader
from asyncllm.outputs.tool_calls.call_object import CallObject
from asyncllm.outputs.tool_calls.deltas import CallWriter

_OPEN, _ARGS, _CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_TAGS = Tags(_OPEN)
_NAME = re.compile(r"[\w.:/-]*")
_ALPHABET = string.ascii_letters + string.digits


def mistral_call_id() -> str:
    """Nine letters and digits: Mistral's templates refuse any other."""
    return "".join(secrets.choice(_ALPHABET) for _ in range(9))


def read_mistral(reader: TextReader, calls: CallWriter) -> Reading[None]:
    """The parser of this format."""
    while (yield from reader.until(_TAGS, calls.content)):
        head = _OPEN + (yield from reader.blank())
        following = yield from reader.peek()
        if following == "[":
            yield from _read_array(reader, calls, head)
        elif following == "{":
            yield from CallObject(reader, calls, head).read()
        else:
            yield from _read_named(reader, calls, head)


def _read_array(reader: TextReader, calls: CallWriter, head: str) -> Reading[None]:
    head += yield from reader.accept("[")
    while True:
        head += yield from reader.blank()
        if (yield from reader.peek()) != "{":
            break
        if not (yield from CallObject(reader, calls, head).read()):
            return
        head = yield from reader.blank()
        if (yield from reader.accept("]")):
            return
        comma = yield from reader.accept(",")
        if not comma:
            break
        head += comma
    calls.content(head)


def _read_named(reader: TextReader, calls: CallWriter, head: str) -> Reading[None]:
    name = yield from reader.run(_NAME)
    head += name
    if calls.knows(name):
        marker = yield from reader.accept(_CALL_ID, _ARGS)
        head += marker
        if marker == _CALL_ID:  # ids are our own, as in the other formats
            head += yield from reader.run(_NAME)
            head += yield from reader.accept(_ARGS)
        head += yield from reader.blank()
        if (yield from reader.peek()) == "{":
            calls.start(name)
            yield from reader.json_container(calls.arguments)
            return
    calls.content(head)
