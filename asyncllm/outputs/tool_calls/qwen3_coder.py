"""Qwen3-Coder: `<tool_call><function=f><parameter=a>1</parameter></function></tool_call>`.

A parameter's text is a JSON string where its schema says string, or says nothing; else the JSON that it is, if it is
any. A block that holds JSON, as Hermes has it, is read too.
"""

from __future__ import annotations

import json
import re
from typing import Any

from asyncllm.outputs.text_reader import Reading, Tags, TextReader
from asyncllm.outputs.tool_calls import hermes
from asyncllm.outputs.tool_calls.deltas import CallWriter

_FUNCTION, _END_FUNCTION, _PARAMETER = "<function=", "</function>", "<parameter="
_OUTSIDE = Tags(hermes.OPEN, _FUNCTION)
_AFTER = Tags(_PARAMETER, _END_FUNCTION)
_VALUE_END = Tags("\n</parameter>", "</parameter>")
_NAME = re.compile(r"[^\s<>=]*")
_CONSTANTS = {"True": "true", "False": "false", "None": "null"}


def read_qwen3_coder(reader: TextReader, calls: CallWriter) -> Reading[None]:
    """The parser of this format."""
    while tag := (yield from reader.until(_OUTSIDE, calls.content)):
        head = tag
        if tag == hermes.OPEN:
            head += yield from reader.blank()
            if (yield from reader.peek()) == "{":
                yield from hermes.read_block(reader, calls, head)
                continue
            if not (yield from reader.accept(_FUNCTION)):
                calls.content(head)
                continue
            head += _FUNCTION
        if (yield from _read_function(reader, calls, head)):
            blank = yield from reader.blank()
            if not (yield from reader.accept(hermes.CLOSE)):
                calls.content(blank)


def _read_function(reader: TextReader, calls: CallWriter, head: str) -> Reading[bool]:
    """What comes after `<function=`; False where it is no call and was given back."""
    name = yield from reader.run(_NAME)
    head += name
    closed = yield from reader.accept(">")
    if not closed or not calls.knows(name):
        calls.content(head + closed)
        return False
    calls.start(name)
    calls.arguments("{")
    schemas = {} if calls.tools is None else calls.tools[name].properties
    separator = ""
    while True:
        blank = yield from reader.blank()
        tag = yield from reader.accept(_PARAMETER, _END_FUNCTION)
        if not tag:
            calls.content(blank)
            tag = yield from reader.until(_AFTER, calls.content)
        if tag != _PARAMETER:
            break
        parameter = yield from reader.run(_NAME)
        if (yield from reader.accept(">")):
            calls.arguments(f"{separator}{json.dumps(parameter, ensure_ascii=False)}: ")
            yield from _read_value(reader, calls, schemas.get(parameter))
            separator = ", "
        else:
            calls.content(_PARAMETER + parameter)
    if tag:
        calls.arguments("}")
    return True


def _read_value(reader: TextReader, calls: CallWriter, schema: Any) -> Reading[None]:
    yield from reader.accept("\n")
    if _is_text(schema):
        calls.arguments('"')
        if (yield from reader.until(_VALUE_END, lambda text: calls.arguments(_escape(text)))):
            calls.arguments('"')
        return
    pieces: list[str] = []
    yield from reader.until(_VALUE_END, pieces.append)
    text = "".join(pieces)
    calls.arguments(_as_json(text))


def _is_text(schema: Any) -> bool:
    """Whether a parameter is text whatever it looks like."""
    if not isinstance(schema, dict):
        return True
    kinds = schema.get("type")
    if kinds is None:
        return not any(key in schema for key in ("anyOf", "oneOf", "allOf", "$ref", "enum", "const"))
    return "string" in kinds if isinstance(kinds, list) else kinds == "string"


def _as_json(text: str) -> str:
    plain = text.strip()
    plain = _CONSTANTS.get(plain, plain)
    try:
        json.loads(plain)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    return plain


def _escape(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
