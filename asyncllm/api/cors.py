"""Cors: which pages of other origins may call the API. Off, unless origins are named."""

from __future__ import annotations

from collections.abc import Sequence

from asyncllm.api.exchange import Head, Reply

_PREFLIGHT = {
    "access-control-allow-methods": "GET, POST, DELETE",
    "access-control-allow-headers": "authorization, content-type, x-api-key, anthropic-version, x-request-id",
    "access-control-max-age": "600",
}


class Cors:
    """The rules of one app."""

    def __init__(self, origins: Sequence[str]) -> None:
        self._any = "*" in origins
        self._origins = frozenset(origins)

    def preflight(self, head: Head) -> Reply | None:
        """The answer to a browser that asks first; None for anything else, and where CORS is off."""
        if head.method != "OPTIONS" or "access-control-request-method" not in head.headers or not self._allows(head):
            return None
        return Reply(204, headers=dict(_PREFLIGHT))

    def allow(self, head: Head, reply: Reply) -> None:
        """Say so to the browser."""
        if self._allows(head):
            reply.headers["access-control-allow-origin"] = "*" if self._any else head.headers["origin"]
            reply.headers["access-control-expose-headers"] = "x-request-id, retry-after"
        if self._origins and not self._any:
            reply.headers["vary"] = "origin"

    def _allows(self, head: Head) -> bool:
        origin = head.headers.get("origin")
        return origin is not None and (self._any or origin in self._origins)
