"""ToolParser: finds the tool calls of one text, in the format that its model was trained on."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass

from asyncllm.errors import InvalidParamsError
from asyncllm.outputs.text_reader import Reading, TextReader
from asyncllm.outputs.tool_calls.deepseek import read_deepseek
from asyncllm.outputs.tool_calls.definitions import ToolDefinition, Tools, read_tools
from asyncllm.outputs.tool_calls.deltas import CallWriter, ToolDelta, call_id
from asyncllm.outputs.tool_calls.hermes import read_hermes
from asyncllm.outputs.tool_calls.llama3_json import read_llama3_json
from asyncllm.outputs.tool_calls.mistral import mistral_call_id, read_mistral
from asyncllm.outputs.tool_calls.pythonic import read_pythonic
from asyncllm.outputs.tool_calls.qwen3_coder import read_qwen3_coder


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a family of models writes tool calls."""

    name: str
    read: Callable[[TextReader, CallWriter], Reading[None]]
    marks: tuple[str, ...]
    """A chat template that holds all of these is of this format, unless one before it in `TOOL_FORMATS` fits."""
    foreign: tuple[str, ...] = ()
    """But one that holds any of these is not: other formats use some of the same tags."""
    special_tokens: bool = False
    """Whether its tags are special tokens in some models: the text must be made with `skip_special_tokens=False`."""
    make_id: Callable[[], str] = call_id


TOOL_FORMATS = {
    format.name: format
    for format in (
        ToolFormat("deepseek", read_deepseek, ("<｜tool▁call▁begin｜>",), special_tokens=True),
        ToolFormat("mistral", read_mistral, ("[TOOL_CALLS]",), special_tokens=True, make_id=mistral_call_id),
        ToolFormat("qwen3_coder", read_qwen3_coder, ("<function=", "<parameter="), ("<seed:tool_call>",)),
        ToolFormat("hermes", read_hermes, ("<tool_call>",), ("<arg_key>", "<seed:tool_call>"), special_tokens=True),
        ToolFormat("pythonic", read_pythonic, ("[func_name",), special_tokens=True),
        ToolFormat("llama3_json", read_llama3_json, ('"name": function name, "parameters":',), special_tokens=True),
    )
}
"""By name."""


def guess_tool_format(chat_template: str) -> str | None:
    """The name of the format that a chat template teaches; None where it teaches none that is known."""
    for format in TOOL_FORMATS.values():
        if all(mark in chat_template for mark in format.marks):
            return None if any(mark in chat_template for mark in format.foreign) else format.name
    return None


def tool_format(name: str) -> ToolFormat:
    """The format of this name. Raises `InvalidParamsError`."""
    if name not in TOOL_FORMATS:
        raise InvalidParamsError(f"unknown tool-call format {name!r}; known are {', '.join(sorted(TOOL_FORMATS))}")
    return TOOL_FORMATS[name]


def make_tool_parser(name: str, tools: Tools | None) -> ToolParser:
    """A parser for one text. What calls a tool that is not among `tools` is content; None: any may be called.

    Raises `InvalidParamsError` for an unknown format or a bad tool.
    """
    return ToolParser(tool_format(name), None if tools is None else read_tools(tools))


class ToolParser:
    """Splits one text into content and calls, the same however the text is cut into pushes.

    A call begins once its tool's name and its arguments' first brace were read; what comes before that and turns out
    to be no call is content. From then on its arguments are what the model wrote, JSON or not, as with any model.
    """

    __slots__ = ("_calls", "_reader", "_steps")

    def __init__(self, format: ToolFormat, tools: Iterable[ToolDefinition] | None) -> None:
        self._reader = TextReader()
        self._calls = CallWriter(tools, format.make_id)
        self._steps: Generator[None, None, None] = format.read(self._reader, self._calls)
        self._advance()

    def push(self, text: str) -> list[ToolDelta]:
        """What this text adds for good."""
        if not self._reader.pass_on(text):
            self._reader.push(text)
            self._advance()
        return self._calls.take()

    def flush(self) -> list[ToolDelta]:
        """What is left when the text has ended."""
        self._reader.ended = True
        self._advance()
        self._calls.end()
        return self._calls.take()

    def _advance(self) -> None:
        next(self._steps, None)
