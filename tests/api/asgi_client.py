"""Drives an ASGI app on the test's own loop, without a socket: one request, and what came of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Answer:
    """What the app sent."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    parts: list[bytes] = field(default_factory=list)

    @property
    def body(self) -> bytes:
        return b"".join(self.parts)

    @property
    def json(self) -> Any:
        """Strict."""

        def refuse(constant: str) -> None:
            raise AssertionError(f"{constant} is no JSON")

        return json.loads(self.body, parse_constant=refuse)

    @property
    def events(self) -> list[Any]:
        """The data of each event, [DONE] left as text."""
        found = []
        for block in self.body.decode().split("\n\n"):
            for line in block.split("\n"):
                if line.startswith("data: "):
                    data = line.removeprefix("data: ")
                    found.append(data if data == "[DONE]" else json.loads(data))
        return found


async def request(  # noqa: PLR0917
    app: Any,
    method: str,
    path: str,
    body: Any = None,
    headers: Mapping[str, str] | None = None,
    gone: asyncio.Event | None = None,
    root_path: str = "",
) -> Answer:
    """`gone`: set it, and the client goes away."""
    raw = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    given = {"host": "test", "content-type": "application/json", **(headers or {})}
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": root_path,
        "headers": [(name.lower().encode(), value.encode()) for name, value in given.items()],
        "client": ("127.0.0.1", 1),
        "server": ("test", 80),
    }
    answer = Answer()
    messages = [{"type": "http.request", "body": raw, "more_body": False}]
    left = gone or asyncio.Event()

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop(0)
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            answer.status = message["status"]
            answer.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            answer.parts.append(message.get("body", b""))

    await app(scope, receive, send)
    return answer


async def post(app: Any, path: str, body: Any, **headers: str) -> Answer:
    """A POST of JSON."""
    return await request(app, "POST", path, body, headers)


async def get(app: Any, path: str, **headers: str) -> Answer:
    """A GET."""
    return await request(app, "GET", path, headers=headers)


async def until(reached: Callable[[], bool], seconds: float = 5.0) -> None:
    """Wait for what no event tells of."""
    async with asyncio.timeout(seconds):
        while not reached():  # noqa: ASYNC110
            await asyncio.sleep(0.002)
