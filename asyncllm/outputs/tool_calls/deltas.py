"""What a tool-call parser makes of a text, and CallWriter, which all formats write it with."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum, auto

from asyncllm.outputs.tool_calls.definitions import ToolDefinition

_CALLABLE = re.compile(r"[\w.:/-]{1,256}")


@dataclass(slots=True)
class ContentDelta:
    """Text that is no part of a call."""

    text: str


@dataclass(slots=True)
class ToolCallStart:
    """A call begins; calls are numbered from 0. All of its arguments come after it, and before the next one."""

    index: int
    id: str
    name: str


@dataclass(slots=True)
class ArgumentsDelta:
    """More of a call's arguments, which joined are a JSON object as the model wrote it."""

    index: int
    text: str


ToolDelta = ContentDelta | ToolCallStart | ArgumentsDelta
"""Not frozen, as `TokenDelta` is not: one is made per token."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A whole call. As with any model, `arguments` may be no JSON, or not fit the tool's schema."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ToolMessage:
    """All deltas of a text, joined."""

    content: str
    calls: tuple[ToolCall, ...]


def join_deltas(deltas: Iterable[ToolDelta]) -> ToolMessage:
    """What a stream of deltas comes to."""
    content: list[str] = []
    starts: list[ToolCallStart] = []
    arguments: list[list[str]] = []
    for delta in deltas:
        if isinstance(delta, ContentDelta):
            content.append(delta.text)
        elif isinstance(delta, ToolCallStart):
            starts.append(delta)
            arguments.append([])
        else:
            arguments[delta.index].append(delta.text)
    calls = [ToolCall(start.id, start.name, "".join(texts)) for start, texts in zip(starts, arguments, strict=True)]
    return ToolMessage("".join(content), tuple(calls))


def call_id() -> str:
    """An id as OpenAI's API writes them."""
    return f"call_{secrets.token_hex(12)}"


class _Kind(Enum):
    CONTENT = auto()
    ARGUMENTS = auto()


class CallWriter:
    """Collects the deltas of one text.

    White space at the start of the text and after a call is shown only if other text follows: it belongs to the call
    that comes next, or to the end.
    """

    def __init__(self, tools: Iterable[ToolDefinition] | None, make_id: Callable[[], str] = call_id) -> None:
        """`tools`: those that may be called; None: any. `make_id` makes an id for each call."""
        self.tools = None if tools is None else {tool.name: tool for tool in tools}
        self._make_id = make_id
        self._deltas: list[ToolDelta] = []
        self._kind = _Kind.CONTENT  # of the pieces
        self._pieces: list[str] = []  # to be joined to one delta
        self._index = -1
        self._blank: list[str] = []
        self._holding = True

    def knows(self, name: str) -> bool:
        """Whether a tool of this name may be called. What calls another one is text."""
        return bool(_CALLABLE.fullmatch(name)) if self.tools is None else name in self.tools

    def content(self, text: str) -> None:
        """Text that is no part of a call."""
        if self._holding:
            self._blank.append(text)
            if not text or text.isspace():
                return
            text = "".join(self._blank)
            self._blank.clear()
            self._holding = False
        self._write(_Kind.CONTENT, text)

    def start(self, name: str) -> None:
        """A call begins."""
        self._close()
        self._blank.clear()
        self._holding = True
        self._index += 1
        self._deltas.append(ToolCallStart(self._index, self._make_id(), name))

    def arguments(self, text: str) -> None:
        """More of the arguments of the call that began last."""
        self._write(_Kind.ARGUMENTS, text)

    def end(self) -> None:
        """The text has ended."""
        if self._index < 0 and self._blank:
            self._write(_Kind.CONTENT, "".join(self._blank))
            self._blank.clear()

    def take(self) -> list[ToolDelta]:
        """The deltas since they were last taken."""
        if self._pieces:
            self._close()
        if not self._deltas:
            return []
        deltas, self._deltas = self._deltas, []
        return deltas

    def _write(self, kind: _Kind, text: str) -> None:
        if kind is not self._kind:
            self._close()
            self._kind = kind
        self._pieces.append(text)

    def _close(self) -> None:
        pieces = self._pieces
        text = pieces[0] if len(pieces) == 1 else "".join(pieces)
        pieces.clear()
        if text:
            is_content = self._kind is _Kind.CONTENT
            self._deltas.append(ContentDelta(text) if is_content else ArgumentsDelta(self._index, text))
