"""DeepSeek: V3 and R1 write a call as

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f
    ```json
    {"a": 1}
    ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

and V3.1 without the fence: `<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>`. Both are read.
"""

from __future__ import annotations

import re

from asyncllm.outputs.text_reader import Reading, Tags, TextReader
from asyncllm.outputs.tool_calls.deltas import CallWriter

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
_OUTSIDE = Tags(CALLS_BEGIN, CALL_BEGIN)
_NAME = re.compile(r"[\w.:/-]*")


def read_deepseek(reader: TextReader, calls: CallWriter) -> Reading[None]:
    """The parser of this format."""
    while tag := (yield from reader.until(_OUTSIDE, calls.content)):
        head = tag
        if tag == CALLS_BEGIN:
            head += yield from reader.blank()
            begin = yield from reader.accept(CALL_BEGIN)
            head += begin
            if not begin:
                calls.content(head)
                continue
        while (yield from _read_call(reader, calls, head)):
            head = yield from reader.blank()
            following = yield from reader.accept(CALL_BEGIN, CALLS_END)
            if following != CALL_BEGIN:
                if not following:
                    calls.content(head)
                break
            head += following


def _read_call(reader: TextReader, calls: CallWriter, head: str) -> Reading[bool]:
    """What comes after `CALL_BEGIN`; False where it is no call and was given back."""
    name = yield from reader.run(_NAME)
    head += name
    separator = yield from reader.accept(SEPARATOR)
    head += separator
    if separator:
        head += yield from reader.blank()
        if (yield from reader.peek()) != "{":
            name = yield from reader.run(_NAME)
            head += name + (yield from reader.blank())
            if fence := (yield from reader.accept("```")):
                head += fence + (yield from reader.accept("json")) + (yield from reader.blank())
        if calls.knows(name) and (yield from reader.peek()) == "{":
            calls.start(name)
            yield from reader.json_container(calls.arguments)
            yield from _read_end(reader, calls)
            return True
    calls.content(head)
    return False


def _read_end(reader: TextReader, calls: CallWriter) -> Reading[None]:
    tail = yield from reader.blank()
    tail += yield from reader.accept("```")
    tail += yield from reader.blank()
    if not (yield from reader.accept(CALL_END)):
        calls.content(tail)
