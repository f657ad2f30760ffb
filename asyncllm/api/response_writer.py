"""ResponseWriter: the items of a response, and the events that tell of them while they grow.

A collected response is what the writer holds at the end, so it agrees with the streamed one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from asyncllm.api.answers import Piece, Reasoning
from asyncllm.api.identifiers import identifier
from asyncllm.api.logprobs import chat_logprobs
from asyncllm.api.sse import compact, escape, named
from asyncllm.outputs.tool_calls import ArgumentsDelta, ContentDelta, ToolCallStart
from asyncllm.results import FinishReason, PositionLogprobs, Usage

_STATUS = {FinishReason.STOP: "completed", FinishReason.ABORT: "cancelled"}


class ResponseWriter:
    """Builds one response. Every method returns events."""

    def __init__(self, response: dict[str, Any], *, show_logprobs: bool) -> None:
        self.response = response
        self._show_logprobs = show_logprobs
        self._sequence = 0
        self._output: list[dict[str, Any]] = response["output"]
        self._open: dict[str, Any] | None = None  # the message or the reasoning that grows
        self._calls: dict[int, int] = {}  # of a tool call that grows: its place in the output
        self._texts: list[str] = []  # of what is open
        self._delta_start = ""  # all of a text delta's event but its text

    def begin(self) -> str:
        """The response is there, and empty."""
        return self._event("response.created", response=self.response) + self._event(
            "response.in_progress", response=self.response
        )

    def push(self, pieces: Iterable[Piece], logprobs: Sequence[PositionLogprobs] | None = None) -> str:
        """The answer goes on."""
        events = []
        for piece in pieces:
            match piece:
                case ContentDelta():
                    events.append(self._grow("message", piece.text, logprobs))
                    logprobs = None  # with the first text that they are of
                case Reasoning():
                    events.append(self._grow("reasoning", piece.text, None))
                case ToolCallStart():
                    events.append(self._call(piece))
                case ArgumentsDelta():
                    events.append(self._arguments(piece))
        return "".join(events)

    def end(self, reason: FinishReason, usage: Usage, reasoning_tokens: int = 0) -> str:
        """The answer is whole, or as long as it may get."""
        events = "" if self._output else self._grow("message", "", None)
        status = _STATUS.get(reason, "incomplete")
        events += self._close("completed" if status == "completed" else "incomplete")
        self.response["status"] = status
        if status == "incomplete":
            cause = "max_output_tokens" if reason is FinishReason.LENGTH else str(reason)
            self.response["incomplete_details"] = {"reason": cause}
        self.response["usage"] = {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
            "total_tokens": usage.total_tokens,
        }
        return events + self._event(f"response.{'completed' if status == 'completed' else 'incomplete'}",
                                    response=self.response)  # fmt: skip

    def fail(self, code: str, message: str) -> str:
        """The answer cannot go on."""
        events = self._close("incomplete")
        self.response["status"] = "failed"
        self.response["error"] = {"code": code, "message": message}
        return events + self._event("response.failed", response=self.response)

    def _grow(self, kind: str, text: str, logprobs: Sequence[PositionLogprobs] | None) -> str:
        events = ""
        if self._open is None or self._open["type"] != kind:
            events = self._close("completed") + self._begin(kind)
        assert self._open is not None
        self._texts.append(text)
        if kind == "reasoning":
            return events + f'{self._delta_start}{escape(text)},"sequence_number":{self._next()}}}\n\n'
        entries = self._logprobs(logprobs)
        if self._show_logprobs:
            self._open["content"][0]["logprobs"] += entries
        listed = compact(entries) if entries else "[]"
        return events + f'{self._delta_start}{escape(text)},"logprobs":{listed},"sequence_number":{self._next()}}}\n\n'

    def _begin(self, kind: str) -> str:
        if kind == "message":
            part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item: dict[str, Any] = {"id": _new("msg"), "type": "message", "role": "assistant"}
            delta = "response.output_text.delta"
        else:
            part = {"type": "reasoning_text", "text": ""}
            item = {"id": _new("rs"), "type": "reasoning", "summary": []}
            delta = "response.reasoning_text.delta"
        item |= {"status": "in_progress", "content": []}
        index = len(self._output)
        events = self._event("response.output_item.added", output_index=index, item=item)
        at = {"item_id": item["id"], "output_index": index, "content_index": 0}
        events += self._event("response.content_part.added", **at, part=part)
        item["content"].append(part)
        where = compact(at)[1:-1]
        self._delta_start = f'event: {delta}\ndata: {{"type":"{delta}",{where},"delta":'
        self._output.append(item)
        self._open = item
        return events

    def _call(self, start: ToolCallStart) -> str:
        events = self._close("completed")
        item = {"id": _new("fc"), "type": "function_call", "status": "in_progress", "call_id": start.id,
                "name": start.name, "arguments": ""}  # fmt: skip
        self._calls[start.index] = len(self._output)
        events += self._event("response.output_item.added", output_index=len(self._output), item=item)
        self._output.append(item)
        return events

    def _arguments(self, delta: ArgumentsDelta) -> str:
        index = self._calls[delta.index]
        item = self._output[index]
        item["arguments"] += delta.text
        return self._event(
            "response.function_call_arguments.delta", item_id=item["id"], output_index=index, delta=delta.text
        )

    def _close(self, status: str) -> str:
        """End what is open."""
        events = ""
        for index in self._calls.values():
            call = self._output[index]
            call["status"] = status
            where = {"item_id": call["id"], "output_index": index}
            events += self._event(
                "response.function_call_arguments.done", **where, name=call["name"], arguments=call["arguments"]
            )
            events += self._event("response.output_item.done", output_index=index, item=call)
        self._calls.clear()
        item, self._open = self._open, None
        if item is None:
            return events
        text, self._texts = "".join(self._texts), []
        item["status"] = status
        part = item["content"][0]
        part["text"] = text
        index = self._output.index(item)
        where = {"item_id": item["id"], "output_index": index, "content_index": 0}
        if item["type"] == "message":
            events += self._event("response.output_text.done", **where, text=text, logprobs=part["logprobs"])
        else:
            events += self._event("response.reasoning_text.done", **where, text=text)
        events += self._event("response.content_part.done", **where, part=part)
        return events + self._event("response.output_item.done", output_index=index, item=item)

    def _logprobs(self, logprobs: Sequence[PositionLogprobs] | None) -> list[dict[str, Any]]:
        return chat_logprobs(logprobs)["content"] if logprobs and self._show_logprobs else []

    def _event(self, kind: str, **fields: Any) -> str:
        return named(kind, {"type": kind, "sequence_number": self._next(), **fields})

    def _next(self) -> int:
        number = self._sequence
        self._sequence += 1
        return number


def _new(prefix: str) -> str:
    return identifier(f"{prefix}_")
