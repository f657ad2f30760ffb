"""Hermes and Qwen: `<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>`, any number of times."""

from __future__ import annotations

from asyncllm.outputs.text_reader import Reading, Tags, TextReader
from asyncllm.outputs.tool_calls.call_object import CallObject
from asyncllm.outputs.tool_calls.deltas import CallWriter

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_OPEN = Tags(OPEN)
_OPEN_OR_CLOSE = Tags(OPEN, CLOSE)


def read_hermes(reader: TextReader, calls: CallWriter) -> Reading[None]:
    """The parser of this format."""
    while (yield from reader.until(_OPEN, calls.content)):
        yield from read_block(reader, calls, OPEN)


def read_block(reader: TextReader, calls: CallWriter, head: str) -> Reading[None]:
    """What comes after an opening tag, up to and with its closing one. `head` was read of the block already."""
    found = False
    while True:
        head += yield from reader.blank()
        if (yield from reader.peek()) == "{":
            if not (yield from CallObject(reader, calls, head).read()):
                return
            found, head = True, ""
        elif not found:
            calls.content(head)  # no call is in it: it is text, and so is what comes
            return
        elif (yield from reader.accept(CLOSE)):
            return
        else:  # something that is not JSON follows the call
            calls.content(head)
            if (yield from reader.until(_OPEN_OR_CLOSE, calls.content)) != OPEN:
                return
            found, head = False, OPEN
