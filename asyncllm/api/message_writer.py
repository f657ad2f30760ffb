"""MessageWriter: the blocks of a message in Anthropic's shape, and the events that tell of them while they grow."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from asyncllm.api.answers import Piece, Reasoning
from asyncllm.api.sse import escape, named
from asyncllm.outputs.tool_calls import ArgumentsDelta, ContentDelta, ToolCallStart
from asyncllm.results import FinishReason, Usage

_DELTA = "event: content_block_delta\ndata: "


class MessageWriter:
    """Builds one message. Every method returns events; a collected message is what it holds at the end."""

    def __init__(self, message: dict[str, Any]) -> None:
        self.message = message
        self._blocks: list[dict[str, Any]] = message["content"]
        self._open: str | None = None  # the kind of the last block, while it grows
        self._texts: list[str] = []  # of that block
        self._delta_start = ""
        self._called = False

    def begin(self, prompt_tokens: int) -> str:
        """The message is there, and empty."""
        self.message["usage"] = {"input_tokens": prompt_tokens, "output_tokens": 0}
        start = {"type": "message_start", "message": self.message}
        return named("message_start", start) + named("ping", {"type": "ping"})

    def push(self, pieces: Iterable[Piece]) -> str:
        """The answer goes on."""
        events = []
        for piece in pieces:
            match piece:
                case ContentDelta():
                    events.append(self._grow("text", "text_delta", piece.text))
                case Reasoning():
                    events.append(self._grow("thinking", "thinking_delta", piece.text))
                case ToolCallStart():
                    events.append(self._call(piece))
                case ArgumentsDelta():
                    self._texts.append(piece.text)
                    events.append(f"{self._delta_start}{escape(piece.text)}}}}}\n\n")
        return "".join(events)

    def end(self, reason: FinishReason, stopped_by: str | int | None, usage: Usage) -> str:
        """The answer is whole, or as long as it may get."""
        events = "" if self._blocks else self._grow("text", "text_delta", "")
        events += self._close()
        self.message |= self._ending(reason, stopped_by) | {"usage": usage_body(usage)}
        delta = {name: self.message[name] for name in ("stop_reason", "stop_sequence")}
        events += named("message_delta", {"type": "message_delta", "delta": delta, "usage": self.message["usage"]})
        return events + named("message_stop", {"type": "message_stop"})

    def _ending(self, reason: FinishReason, stopped_by: str | int | None) -> dict[str, str | None]:
        if reason is FinishReason.STOP and isinstance(stopped_by, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": stopped_by}
        if reason is FinishReason.STOP or reason is FinishReason.ABORT:
            return {"stop_reason": "tool_use" if self._called else "end_turn", "stop_sequence": None}
        return {"stop_reason": "max_tokens", "stop_sequence": None}

    def _grow(self, kind: str, delta: str, text: str) -> str:
        events = ""
        if self._open != kind:
            block = {"type": kind, kind: ""} | ({"signature": ""} if kind == "thinking" else {})
            events = self._close() + self._begin(kind, block, f'{{"type":"{delta}","{kind}":')
        self._texts.append(text)
        return f"{events}{self._delta_start}{escape(text)}}}}}\n\n"

    def _call(self, start: ToolCallStart) -> str:
        self._called = True
        block = {"type": "tool_use", "id": start.id, "name": start.name, "input": {}}
        return self._close() + self._begin("tool_use", block, '{"type":"input_json_delta","partial_json":')

    def _begin(self, kind: str, block: dict[str, Any], delta: str) -> str:
        index = len(self._blocks)
        self._blocks.append(block)
        self._open = kind
        self._delta_start = f'{_DELTA}{{"type":"content_block_delta","index":{index},"delta":{delta}'
        return named("content_block_start", {"type": "content_block_start", "index": index, "content_block": block})

    def _close(self) -> str:
        """End the block that is open."""
        kind, self._open = self._open, None
        if kind is None:
            return ""
        text, self._texts = "".join(self._texts), []
        block = self._blocks[-1]
        if kind == "tool_use":
            block["input"] = _arguments(text)
        else:
            block[kind] = text
        return named("content_block_stop", {"type": "content_block_stop", "index": len(self._blocks) - 1})


def _arguments(text: str) -> Any:
    """What was called with; {} where the answer was cut off inside."""
    try:
        return json.loads(text) if text else {}
    except (ValueError, RecursionError):
        return {}


def usage_body(usage: Usage) -> dict[str, int]:
    """Anthropic counts the prompt's cached tokens apart from the others."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.completion_tokens,
    }
