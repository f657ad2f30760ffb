"""create_asgi_app: the service as a plain ASGI 3 callable, for any server and to mount in any framework.

Nothing but the service's own parts is here: read the head and the body, send the reply, notice who goes away.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from typing import Any

from asyncllm.api.exchange import BodyTooLarge, Disconnected, Head, Reply
from asyncllm.api.response_store import ResponseStore
from asyncllm.api.service import Service
from asyncllm.api.settings import ApiSettings
from asyncllm.api.sse import http_chunk
from asyncllm.api.token_events import Send as SendBytes
from asyncllm.api.token_events import TokenEvents
from asyncllm.engine.async_engine import AsyncEngine

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Coroutine[Any, Any, None]]


def create_asgi_app(
    engine: AsyncEngine,
    *,
    settings: ApiSettings | None = None,
    responses: ResponseStore | None = None,
    **overrides: Any,
) -> AsgiApp:
    """The OpenAI-compatible API of an engine. `overrides` are fields of `ApiSettings`, `api_keys` among them.

    Under a server of its own, the app's lifespan starts the engine and closes it. Mounted, it has no lifespan: the
    application around it starts the engine, before the first request.
    """
    return AsgiApp(Service(engine, (settings or ApiSettings()).override(**overrides), responses))


class AsgiApp:
    """An ASGI application."""

    def __init__(self, service: Service) -> None:
        self.service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI has it."""
        if scope["type"] == "http":
            await self._http(scope, receive, send)
        elif scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1000})
        else:
            raise ValueError(f"not an ASGI scope that this app knows: {scope['type']!r}")

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                try:
                    await self.service.start()
                except Exception as error:
                    await send({"type": "lifespan.startup.failed", "message": str(error)})
                    raise
                await send({"type": "lifespan.startup.complete"})
            else:
                await self.service.drain()
                await self.service.aclose()
                await send({"type": "lifespan.shutdown.complete"})
                return

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        head, inbox = _head(scope), _Inbox(receive)
        watch = asyncio.create_task(inbox.cancel_when_gone(asyncio.current_task()))
        try:
            reply = await self.service.respond(head, inbox.body)
            inbox.watch()
            try:
                await _send(reply, head, send)
            finally:
                inbox.rest()  # what is given back must not be cut short
                await reply.aclose()
        except Disconnected:
            pass
        except asyncio.CancelledError:
            if not inbox.forgive():
                raise
        finally:
            inbox.rest()
            watch.cancel()


async def _send(reply: Reply, head: Head, send: Send) -> None:
    headers = [(b"content-type", reply.content_type.encode())] if reply.body or reply.events is not None else []
    if reply.events is None:
        headers.append((b"content-length", str(len(reply.body)).encode()))
    headers += [(name.encode(), value.encode("latin-1", "replace")) for name, value in reply.headers.items()]
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    if reply.events is None:
        body = b"" if head.method == "HEAD" else reply.body
        await send({"type": "http.response.body", "body": body})
        return
    if isinstance(reply.events, TokenEvents) and _needs_no_task(send):
        await reply.events.pour(_writer(send))
    else:
        async for event in reply.events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


def _needs_no_task(send: Send) -> bool:
    """Whether it is uvicorn's own, which writes to the transport and waits for nothing but a client that reads slowly.
    What a framework puts around it may look for its task."""
    return type(getattr(send, "__self__", None)).__module__.startswith("uvicorn.protocols.http.")


def _writer(send: Send) -> SendBytes:
    """Sends through uvicorn's `send`. Under httptools, all goes to the connection as it is, in chunks, while the client
    keeps up: what uvicorn looks at for each message, which is settled here, takes longer than that."""

    def send_event(event: bytes) -> Coroutine[Any, Any, None]:
        return send({"type": "http.response.body", "body": event, "more_body": True})

    cycle: Any = getattr(send, "__self__", None)
    if type(cycle).__module__ != "uvicorn.protocols.http.httptools_impl" or cycle.chunked_encoding is not True:
        return send_event
    transport, flow = cycle.transport, cycle.flow

    def write(event: bytes) -> Coroutine[Any, Any, None] | None:
        if transport.is_closing():  # uvicorn tells only the last of the requests that a connection has sent ahead
            raise Disconnected
        if flow.write_paused or cycle.disconnected:
            return send_event(event)
        transport.write(http_chunk(event))
        return None

    return write


def _head(scope: Scope) -> Head:
    path, root = scope["path"], scope.get("root_path", "")
    if root and path.startswith(root):  # a server or a framework may or may not leave the prefix in
        path = path[len(root) :]
    headers: dict[str, str] = {}
    for name, value in scope["headers"]:
        headers.setdefault(name.decode("latin-1").lower(), value.decode("latin-1"))
    return Head(scope["method"], path or "/", headers, root)


class _Inbox:
    """What the client sends: its body, and then nothing but that it has gone."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._cancelled: asyncio.Task[Any] | None = None
        self._resting = False
        self._read = asyncio.Event()  # all of the body was read: what comes next is the client's going

    async def body(self, limit: int) -> bytes:
        """As `ReadBody`."""
        parts: list[bytes] = []
        size = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise Disconnected
            part = message.get("body", b"")
            size += len(part)
            if size > limit:
                raise BodyTooLarge
            parts.append(part)
            if not message.get("more_body", False):
                self._read.set()
                return b"".join(parts)

    def watch(self) -> None:
        """No more of the body will be asked for."""
        self._read.set()

    def rest(self) -> None:
        """The request is answered: whoever goes now is not missed."""
        self._resting = True

    async def cancel_when_gone(self, task: asyncio.Task[Any] | None) -> None:
        """Cancel the task that answers once the client has gone."""
        await self._read.wait()
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if task is not None and not self._resting:
            self._cancelled = task
            task.cancel()

    def forgive(self) -> bool:
        """Whether it was the client's going that cancelled, and nothing else did; the task may end as usual then."""
        return self._cancelled is not None and self._cancelled.uncancel() == 0
