"""ReasoningParser: splits what a model thinks from what it answers, while the text comes.

Reasoning stands at the beginning of the text, between two tags; the first one may stand in the prompt instead. The
tags, and line breaks next to them, are shown in neither part. A tag that comes later is part of the answer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from asyncllm.errors import InvalidParamsError
from asyncllm.outputs.text_reader import Reading, Tags, TextReader

_LINE_BREAKS = re.compile(r"[\r\n]*")


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a family of models marks its reasoning."""

    name: str
    start: str
    end: str
    in_prompt: bool = False
    """Whether the opening tag stands in the prompt where nothing else is known."""
    special_tokens: bool = False
    """Whether its tags are special tokens: the text must be made with `skip_special_tokens=False`."""


REASONING_FORMATS = {
    format.name: format
    for format in (
        ReasoningFormat("qwen3", "<think>", "</think>"),
        ReasoningFormat("deepseek_r1", "<think>", "</think>", in_prompt=True),
        ReasoningFormat("mistral", "[THINK]", "[/THINK]", special_tokens=True),
        ReasoningFormat("seed_oss", "<seed:think>", "</seed:think>", special_tokens=True),
        ReasoningFormat("granite", "Here is my thought process:", "Here is my response:"),
    )
}
"""By name. GLM 4.5, QwQ, SmolLM3, ERNIE and others write as "qwen3" or as "deepseek_r1" does."""


@dataclass(slots=True)
class ReasoningDelta:
    """What a piece of text adds to each part. Not frozen, as `TokenDelta` is not: one is made per token."""

    reasoning: str = ""
    content: str = ""


def guess_reasoning_format(chat_template: str) -> str | None:
    """The name of the format that a chat template knows of; None where it knows of none."""
    if "[THINK]" in chat_template:
        return "mistral"
    if "<seed:think>" in chat_template or "seed:think" in chat_template:
        return "seed_oss"
    if "</think>" not in chat_template and "<think>" not in chat_template:
        return None
    opened = chat_template.rfind("<think>")  # the generation prompt is the last thing that a template writes
    return "deepseek_r1" if opened > chat_template.rfind("</think>") else "qwen3"


def find_reasoning_format(name: str) -> ReasoningFormat:
    """The format of this name. Raises `InvalidParamsError`."""
    if name not in REASONING_FORMATS:
        raise InvalidParamsError(f"unknown reasoning format {name!r}; known are {', '.join(sorted(REASONING_FORMATS))}")
    return REASONING_FORMATS[name]


def opens_in_prompt(name: str, prompt: str, continued: str = "") -> bool:
    """Whether a rendered prompt ends with the opening tag, so that the text begins inside the reasoning; or whether
    `continued`, the message that the text goes on with, has left one open. The end of the prompt is enough."""
    format = find_reasoning_format(name)
    if continued:
        return continued.rfind(format.start) > continued.rfind(format.end)
    return prompt.rstrip().endswith(format.start)


def closed_in_prompt(name: str, prompt: str) -> bool:
    """Whether a rendered prompt ends with the closing tag: the text begins behind the reasoning, which was skipped."""
    return prompt.rstrip().endswith(find_reasoning_format(name).end)


def answers_of(text: str) -> Iterator[str]:
    """What may be the answer in a whole text of a model whose format is not known, the likeliest first: what follows
    the first closing tag, or the text itself."""
    ends = [(text.find(format.end), format.end) for format in REASONING_FORMATS.values() if format.end in text]
    if ends:
        start, tag = min(ends)
        yield text[start + len(tag) :]
    yield text


def make_reasoning_parser(name: str, *, opened: bool | None = None) -> ReasoningParser:
    """A parser for one text. `opened`: whether the prompt has the opening tag, see `opens_in_prompt`; None: as the
    format's models mostly do."""
    format = find_reasoning_format(name)
    return ReasoningParser(format, format.in_prompt if opened is None else opened)


class ReasoningParser:
    """Splits one text, the same however it is cut into pushes. Only a suffix that may become a tag, with the line
    breaks before it, is withheld."""

    __slots__ = ("_content", "_reader", "_reasoning", "_steps", "in_reasoning")

    def __init__(self, format: ReasoningFormat, opened: bool) -> None:
        self._reader = TextReader()
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self.in_reasoning = opened
        """Whether the answer has not begun; before the first tag, whether the prompt has it."""
        self._steps = self._read(format)
        next(self._steps)

    def push(self, text: str) -> ReasoningDelta:
        """What this text adds for good."""
        reader = self._reader
        if reader.passes(text):
            return ReasoningDelta(text) if self.in_reasoning else ReasoningDelta("", text)
        reader.push(text)
        next(self._steps, None)
        return self._take()

    def flush(self) -> ReasoningDelta:
        """What is left when the text has ended."""
        self._reader.ended = True
        next(self._steps, None)
        return self._take()

    def _take(self) -> ReasoningDelta:
        delta = ReasoningDelta("".join(self._reasoning), "".join(self._content))
        self._reasoning.clear()
        self._content.clear()
        return delta

    def _read(self, format: ReasoningFormat) -> Reading[None]:
        reader = self._reader
        blank = yield from reader.blank()
        started = yield from reader.accept(format.start)  # some models write it though the prompt has it
        if not started and not self.in_reasoning:
            self._content.append(blank)
            yield from reader.rest(self._content.append)
            return
        self.in_reasoning = True
        breaks = ""
        if started:
            yield from reader.run(_LINE_BREAKS)
        else:
            blank = blank.lstrip("\r\n")
            breaks = blank[len(blank.rstrip("\r\n")) :]  # right behind which the closing tag may come
            self._reasoning.append(blank.removesuffix(breaks))
        if (yield from self._read_reasoning(format.end, breaks)):
            self.in_reasoning = False
            yield from reader.run(_LINE_BREAKS)
            yield from reader.rest(self._content.append)

    def _read_reasoning(self, end: str, breaks: str) -> Reading[bool]:
        """Read up to and with the tag that ends the reasoning; False where it does not come. `breaks`: the line breaks
        that were read last."""
        reader, emit = self._reader, self._reasoning.append
        tags = Tags(end, "\n", "\r")
        while not (yield from reader.accept(end)):
            emit(breaks)
            tag = yield from reader.until(tags, emit)
            if not tag or tag == end:
                return bool(tag)
            breaks = tag + (yield from reader.run(_LINE_BREAKS))
        return True
