"""CompletionChunks: the answers to completions as server-sent events, rendered as `ChatChunks` does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asyncllm.api.chat_chunks import finish_reason, stop_reason, usage_body
from asyncllm.api.logprobs import CompletionLogprobs
from asyncllm.api.sse import Frame, compact, escape
from asyncllm.results import TokenDelta, Usage


class CompletionChunks:
    """Renders the deltas of all choices of one request; each choice in order."""

    def __init__(  # noqa: PLR0913  # all by keyword
        self,
        *,
        head: dict[str, Any],
        echoes: Sequence[str],
        prompt_token_ids: Sequence[Sequence[int]],
        logprobs: bool,
        token_ids: bool,
        include_usage: bool,
    ) -> None:
        self._head = compact(head)[:-1]
        self._starts = [f'data: {self._head},"choices":[{{"index":{index},"text":' for index in range(len(echoes))]
        self._usage_field = ',"usage":null' if include_usage else ""
        self._text_end = f',"logprobs":null,"finish_reason":null}}]{self._usage_field}}}\n\n'
        self._simple = not (logprobs or token_ids)
        self._echoes: list[str | None] = list(echoes)  # None once it was sent
        self._layouts = [CompletionLogprobs() for _ in echoes] if logprobs else None
        self._prompt_token_ids = prompt_token_ids
        self._token_ids = token_ids
        self._include_usage = include_usage

    def render(self, index: int, delta: TokenDelta) -> str:
        """The event that follows from a choice's delta; maybe none."""
        if self._simple and delta.finish_reason is None and self._echoes[index] is None:
            return self._starts[index] + escape(delta.text) + self._text_end if delta.text else ""
        return self._render(index, delta)

    def frame(self) -> Frame | None:
        """Of the only choice, see `TokenEvents`."""
        return (self._starts[0], self._text_end) if self._simple and self._echoes[0] is None else None

    def usage(self, usage: Usage) -> str:
        """The last chunk, where it was asked for."""
        if not self._include_usage:
            return ""
        return f'data: {self._head},"choices":[],"usage":{compact(usage_body(usage))}}}\n\n'

    def _render(self, index: int, delta: TokenDelta) -> str:
        echo = self._echoes[index]
        self._echoes[index] = None
        fields: dict[str, Any] = {"logprobs": None, "finish_reason": None}
        if self._layouts is not None and delta.logprobs:
            fields["logprobs"] = self._layouts[index].answer(delta.logprobs)
        if self._token_ids:
            fields["token_ids"] = list(delta.token_ids)
            if echo is not None:
                fields["prompt_token_ids"] = list(self._prompt_token_ids[index])
        if delta.finish_reason is not None:
            fields["finish_reason"] = finish_reason(delta.finish_reason, called=False)
            fields["stop_reason"] = stop_reason(delta.finish_reason, delta.stop_reason)
        text = escape((echo or "") + delta.text)
        return f"{self._starts[index]}{text},{compact(fields)[1:]}]{self._usage_field}}}\n\n"
