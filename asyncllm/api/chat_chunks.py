"""ChatChunks: one chat stream as server-sent events.

What does not change from chunk to chunk is rendered once; a token of plain text costs its own escaping and two joins.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from asyncllm.api.answers import Answer, MakeAnswer, Piece, Reasoning, held_back
from asyncllm.api.logprobs import chat_logprobs
from asyncllm.api.sse import DONE, Frame, compact, data, escape
from asyncllm.outputs.tool_calls import ArgumentsDelta, ContentDelta, ToolCallStart
from asyncllm.results import FinishReason, TokenDelta, Usage


class _Choice:
    """What is known of one of the n answers."""

    __slots__ = ("answer", "called", "ended", "opened", "prefix", "tokens")

    def __init__(self, answer: Answer, prefix: str) -> None:
        self.answer = answer
        self.prefix = prefix  # all that stands before a delta
        self.opened = False  # its role was sent
        self.called = False  # it has called a tool
        self.ended = False
        self.tokens = 0


class ChatChunks:
    """Renders the deltas of one request, in order."""

    __slots__ = (
        "_choices", "_continuous", "_head", "_include_usage", "_logprobs", "_prompt_token_ids", "_show_reasoning",
        "_simple", "_starts", "_text_end", "_token_ids", "_usage_field",
    )  # fmt: skip

    def __init__(  # noqa: PLR0913  # all by keyword
        self,
        *,
        head: dict[str, Any],
        n: int,
        make_answer: MakeAnswer,
        plain: bool,
        logprobs: bool,
        token_ids: bool,
        include_usage: bool,
        continuous_usage: bool,
        show_reasoning: bool,
        prompt_token_ids: Sequence[int],
    ) -> None:
        self._head = compact(head)[:-1]
        opening = f'data: {self._head},"choices":[{{"index":'
        self._choices = [_Choice(make_answer(), f'{opening}{index},"delta":') for index in range(n)]
        self._usage_field = ',"usage":null' if include_usage and not continuous_usage else ""
        self._text_end = f'}},"logprobs":null,"finish_reason":null}}]{self._usage_field}}}\n\n'
        self._starts: list[str | None] = [None] * n  # of a chunk that is only text; None until the choice is open
        self._simple = plain and not (logprobs or token_ids or continuous_usage)
        self._logprobs = logprobs
        self._token_ids = token_ids
        self._include_usage = include_usage
        self._continuous = continuous_usage
        self._show_reasoning = show_reasoning
        self._prompt_token_ids = prompt_token_ids

    def render(self, delta: TokenDelta, position: int = 0) -> str:
        """All events that follow from a delta; maybe none."""
        start = self._starts[delta.index]
        if start is not None and delta.finish_reason is None:
            return f"{start}{escape(delta.text)}{self._text_end}" if delta.text else ""
        events = self._render(delta)
        return events if delta.usage is None else events + self._usage(delta.usage) + DONE

    def frame(self) -> Frame | None:
        """Of the only choice, see `TokenEvents`."""
        start = self._starts[0]
        return None if start is None else (start, self._text_end)

    def rest(self) -> str:
        """What was held back of answers that cannot go on."""
        events = ""
        for choice in self._choices:
            if choice.opened and not choice.ended:
                events += "".join(self._event(choice, each) for each in self._deltas(choice, held_back(choice.answer)))
        return events

    def _usage(self, usage: Usage) -> str:
        """The last chunk, where it was asked for."""
        if not self._include_usage:
            return ""
        return f'data: {self._head},"choices":[],"usage":{compact(usage_body(usage))}}}\n\n'

    def _render(self, delta: TokenDelta) -> str:
        choice = self._choices[delta.index]
        choice.tokens += len(delta.token_ids)
        fields = self._fields(choice, delta)
        parts = []
        if not choice.opened:
            choice.opened = True
            if self._simple:
                self._starts[delta.index] = f'{choice.prefix}{{"content":'
            parts.append(self._event(choice, {"role": "assistant", "content": ""}))
        pieces = list(choice.answer.push(delta.text))
        if delta.finish_reason is not None:
            pieces += choice.answer.flush()
        deltas = list(self._deltas(choice, pieces))
        if not deltas and fields:
            deltas = [{"content": ""}]  # logprobs and ids of tokens whose text is held back
        for position, each in enumerate(deltas):
            parts.append(self._event(choice, each, fields if position == 0 else {}))
        if delta.finish_reason is not None:
            choice.ended = True
            parts.append(self._event(choice, {}, end=delta))
        return "".join(parts)

    def _fields(self, choice: _Choice, delta: TokenDelta) -> dict[str, Any]:
        """What a chunk has beside its text."""
        fields: dict[str, Any] = {}
        if self._logprobs and delta.logprobs:
            fields["logprobs"] = chat_logprobs(delta.logprobs)
        if self._token_ids and delta.token_ids:
            fields["token_ids"] = list(delta.token_ids)
            if not choice.opened:
                fields["prompt_token_ids"] = list(self._prompt_token_ids)
        return fields

    def _deltas(self, choice: _Choice, pieces: Iterable[Piece]) -> Iterable[dict[str, Any]]:
        for piece in pieces:
            match piece:
                case ContentDelta():
                    yield {"content": piece.text}
                case Reasoning():
                    if self._show_reasoning:
                        yield {"reasoning_content": piece.text}
                case ToolCallStart():
                    choice.called = True
                    function = {"name": piece.name, "arguments": ""}
                    call = {"index": piece.index, "id": piece.id, "type": "function", "function": function}
                    yield {"tool_calls": [call]}
                case ArgumentsDelta():
                    yield {"tool_calls": [{"index": piece.index, "function": {"arguments": piece.text}}]}

    def _event(
        self,
        choice: _Choice,
        delta: dict[str, Any],
        fields: dict[str, Any] | None = None,
        end: TokenDelta | None = None,
    ) -> str:
        more: dict[str, Any] = {"logprobs": None, **(fields or {}), "finish_reason": None}
        if end is not None and end.finish_reason is not None:
            more["finish_reason"] = finish_reason(end.finish_reason, called=choice.called)
            more["stop_reason"] = stop_reason(end.finish_reason, end.stop_reason)
        usage = self._usage_field
        if self._continuous:
            tokens = sum(each.tokens for each in self._choices)
            usage = f',"usage":{compact(usage_body(Usage(len(self._prompt_token_ids), tokens)))}'
        return f"{choice.prefix}{compact(delta)},{compact(more)[1:]}]{usage}}}\n\n"


def finish_reason(reason: FinishReason, *, called: bool) -> str:
    """In the words of OpenAI's API."""
    if reason is FinishReason.DEADLINE:
        return "length"  # the client's own deadline: the answer is what there was time for
    return "tool_calls" if called and reason is FinishReason.STOP else str(reason)


def stop_reason(reason: FinishReason, stopped_by: str | int | None) -> str | int | None:
    """vLLM's field: the stop string or stop id; "deadline" for the client's own deadline."""
    return "deadline" if reason is FinishReason.DEADLINE else stopped_by


def usage_body(usage: Usage) -> dict[str, Any]:
    """`usage` of chats and completions."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def error_event(body: dict[str, Any]) -> str:
    """What ends a stream that fails."""
    return data(body)
