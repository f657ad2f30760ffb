"""Llama 3: `{"name": "f", "parameters": {"a": 1}}`, with or without `<|python_tag|>`, several joined by `;`.

Without the tag only an object that begins the text, or follows a call, is looked at.
"""

from __future__ import annotations

from asyncllm.outputs.text_reader import Reading, Tags, TextReader
from asyncllm.outputs.tool_calls.call_object import CallObject
from asyncllm.outputs.tool_calls.deltas import CallWriter

_OPEN = ("<|python_tag|>", "<|python_start|>")
_CLOSE = "<|python_end|>"
_TAGS = Tags(*_OPEN)


def read_llama3_json(reader: TextReader, calls: CallWriter) -> Reading[None]:
    """The parser of this format."""
    head = yield from reader.blank()
    head += yield from reader.accept(*_OPEN)
    while True:
        head += yield from reader.blank()
        if (yield from reader.peek()) == "{":
            if (yield from CallObject(reader, calls, head, strict=True).read()):
                head = yield from _after_call(reader)
                continue
        else:
            calls.content(head)
        head = yield from reader.until(_TAGS, calls.content)
        if not head:
            return


def _after_call(reader: TextReader) -> Reading[str]:
    """What may stand before the next call; shown as text where none comes."""
    head = yield from reader.blank()
    if (yield from reader.accept(_CLOSE)):
        head += yield from reader.blank()
    head += yield from reader.accept(";", *_OPEN)
    return head
