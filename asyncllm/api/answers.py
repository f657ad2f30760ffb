"""Answers: a choice's text, taken apart into reasoning, content and tool calls while it streams.

A streamed answer is made of pieces; a collected one is the same pieces put together, so both agree field by field.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from asyncllm.outputs.reasoning import ReasoningParser, make_reasoning_parser, opens_in_prompt
from asyncllm.outputs.tool_calls import (
    ArgumentsDelta,
    ContentDelta,
    ToolCallStart,
    ToolDefinition,
    ToolDelta,
    ToolParser,
    make_tool_parser,
)


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that the model thinks with."""

    text: str


Piece = ToolDelta | Reasoning


class Answer(Protocol):
    """Takes one choice's text apart."""

    def push(self, text: str) -> Iterable[Piece]:
        """What this text makes certain."""
        ...

    def flush(self) -> Iterable[Piece]:
        """What is left at the end."""
        ...


def held_back(answer: Answer) -> Sequence[Piece]:
    """What was held back of an answer that cannot go on; nothing where it is the answer that cannot be taken apart."""
    try:
        return list(answer.flush())
    except Exception:
        return ()


class PlainAnswer:
    """All text is content."""

    def push(self, text: str) -> Iterable[Piece]:
        """The text as it is."""
        return (ContentDelta(text),) if text else ()

    def flush(self) -> Iterable[Piece]:
        """Nothing was held back."""
        return ()


class ParsedAnswer:
    """Reasoning is taken out first; what is left may hold tool calls."""

    def __init__(self, reasoning: ReasoningParser | None, tools: ToolParser | None, *, parallel: bool) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._parallel = parallel

    def push(self, text: str) -> Iterable[Piece]:
        """As `Answer.push`."""
        if self._reasoning is None:
            return self._content(text)
        delta = self._reasoning.push(text)
        return [*([Reasoning(delta.reasoning)] if delta.reasoning else []), *self._content(delta.content)]

    def flush(self) -> Iterable[Piece]:
        """As `Answer.flush`."""
        pieces: list[Piece] = []
        if self._reasoning is not None:
            delta = self._reasoning.flush()
            pieces += [Reasoning(delta.reasoning)] if delta.reasoning else []
            pieces += self._content(delta.content)
        if self._tools is not None:
            pieces += self._allowed(self._tools.flush())
        return pieces

    def _content(self, text: str) -> Sequence[Piece]:
        if not text:
            return ()
        return (ContentDelta(text),) if self._tools is None else self._allowed(self._tools.push(text))

    def _allowed(self, pieces: Sequence[Piece]) -> Sequence[Piece]:
        if self._parallel:
            return pieces
        return [piece for piece in pieces if not isinstance(piece, ToolCallStart | ArgumentsDelta) or piece.index == 0]


MakeAnswer = Callable[[], Answer]
"""Makes a parser for one choice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFormat:
    """What to look for in the answers to one request."""

    reasoning: str | None  # the name of a format; None: there is none to look for
    tool_calls: str | None  # likewise
    tools: tuple[ToolDefinition, ...] = ()
    parallel: bool = True  # False: the first call is the only one
    continued: str = ""  # the assistant's message that the answer goes on with

    @property
    def plain(self) -> bool:
        """All text is content."""
        return self.reasoning is None and self.tool_calls is None

    def maker(self, prompt_end: str) -> MakeAnswer:
        """`prompt_end`: the last characters of the rendered prompt, which may open the reasoning."""
        if self.plain:
            return PlainAnswer
        name = self.reasoning
        opened = name is not None and opens_in_prompt(name, prompt_end, self.continued)

        def make() -> Answer:
            reasoning = None if name is None else make_reasoning_parser(name, opened=opened)
            tools = None if self.tool_calls is None else make_tool_parser(self.tool_calls, self.tools)
            return ParsedAnswer(reasoning, tools, parallel=self.parallel)

        return make


@dataclass(slots=True)
class CalledTool:
    """One tool call of an answer."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class Collected:
    """A whole answer."""

    content: str = ""
    reasoning: str = ""
    calls: list[CalledTool] = field(default_factory=list)

    def add(self, pieces: Iterable[Piece]) -> None:
        """Put pieces where they belong."""
        for piece in pieces:
            match piece:
                case ContentDelta():
                    self.content += piece.text
                case Reasoning():
                    self.reasoning += piece.text
                case ToolCallStart():
                    self.calls.append(CalledTool(piece.id, piece.name))
                case ArgumentsDelta():
                    self.calls[piece.index].arguments += piece.text


def collect(answer: Answer, text: str) -> Collected:
    """Take a whole text apart."""
    collected = Collected()
    collected.add(answer.push(text))
    collected.add(answer.flush())
    return collected
