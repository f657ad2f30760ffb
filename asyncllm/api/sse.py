"""Server-sent events from prepared bytes.

A chunk of a stream differs from the one before in its text alone. So all that stands before and behind the text is
rendered once a stream, and the text is escaped by the standard library's C encoder.
"""

from __future__ import annotations

import json
from json.encoder import encode_basestring as escape
from typing import Any

__all__ = ["DONE", "Frame", "compact", "data", "escape", "http_chunk", "named"]

DONE = "data: [DONE]\n\n"

Frame = tuple[str, str]
"""What stands before and behind the text of an event."""

_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def compact(value: Any) -> str:
    """Strict JSON in one line."""
    return _ENCODER.encode(value)


def data(value: Any) -> str:
    """An event without a name."""
    return f"data: {compact(value)}\n\n"


def named(name: str, value: Any) -> str:
    """An event with a name."""
    return f"event: {name}\ndata: {compact(value)}\n\n"


def http_chunk(data: bytes) -> bytes:
    """As HTTP's chunked coding frames it; not for b"", which would end the body."""
    return b"%x\r\n%b\r\n" % (len(data), data)
