"""What passes between the service and the two shells: a request's head, and a reply. Knows no framework."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, Protocol

JSON = "application/json"
EVENT_STREAM = "text/event-stream; charset=utf-8"

ReadBody = Callable[[int], Awaitable[bytes]]
"""Reads the whole body; raises `BodyTooLarge` once it has more bytes than this, and `BodyUnreadable`."""


class BodyTooLarge(Exception):
    """The body is longer than the limit; what came of it is dropped."""


class BodyUnreadable(Exception):
    """The body is not encoded as its headers say."""


class Disconnected(Exception):
    """The client has gone."""


class Events(Protocol):
    """An async iterator of prepared bytes that can be closed: an async generator, say."""

    def __aiter__(self) -> AsyncIterator[bytes]: ...

    def __anext__(self) -> Awaitable[bytes]: ...

    def aclose(self) -> Awaitable[None]:
        """Nobody wants more."""
        ...


@dataclass(frozen=True, slots=True)
class Head:
    """All of a request but its body."""

    method: str
    path: str  # below the app's own prefix, percent-decoded; begins with "/"
    headers: Mapping[str, str]  # names in lower case
    prefix: str = ""  # where the app is mounted


@dataclass(slots=True)
class Reply:
    """An answer: a whole body, or events that come one by one, each of them prepared bytes."""

    status: int = 200
    body: bytes = b""
    content_type: str = JSON
    headers: dict[str, str] = field(default_factory=dict)
    events: Events | None = None  # in place of a body
    held: AsyncExitStack = field(default_factory=AsyncExitStack)  # what is given back when the reply is over

    async def aclose(self) -> None:
        """Give back what the reply holds. The shell calls it once it has sent the reply, or failed to."""
        if self.events is not None:
            self.held.push_async_callback(self.events.aclose)  # one that never began has no finally to rely on
        await self.held.aclose()


def json_reply(value: Any, status: int = 200) -> Reply:
    """A reply of JSON, which is strict: no NaN, no infinity."""
    return Reply(status, dump(value))


def dump(value: Any) -> bytes:
    """Strict JSON as UTF-8."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def event_reply(events: Events) -> Reply:
    """A reply of server-sent events."""
    headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}  # else a proxy gathers them
    return Reply(content_type=EVENT_STREAM, headers=headers, events=events)
