"""create_aiohttp_app: the service as an aiohttp application, to run or to add as a sub-application.

Nothing but the service's own parts is here: read the head and the body, send the reply, notice who goes away.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from typing import Any

from aiohttp import HttpVersion11, web

from asyncllm.api.exchange import BodyTooLarge, BodyUnreadable, Disconnected, Head, Reply
from asyncllm.api.response_store import ResponseStore
from asyncllm.api.service import Service
from asyncllm.api.settings import ApiSettings
from asyncllm.api.sse import http_chunk
from asyncllm.api.token_events import Send, TokenEvents
from asyncllm.engine.async_engine import AsyncEngine

SERVICE = web.AppKey("asyncllm_service", Service)
"""Where an application has its service: `app[SERVICE].drain()`."""

LOOK_EVERY = 0.02
"""Seconds. aiohttp tells a handler that its client has gone only where its runner was made with
`handler_cancellation=True`, which a host need not do."""

UNLOOKED = 1 << 16
"""Bytes that are written before it is looked whether the client reads them, as aiohttp has it."""

LAST_MOMENT = 1.0
"""Seconds in which a request whose time is up may tell its client so."""


def create_aiohttp_app(
    engine: AsyncEngine,
    *,
    settings: ApiSettings | None = None,
    responses: ResponseStore | None = None,
    **overrides: Any,
) -> web.Application:
    """The OpenAI-compatible API of an engine. `overrides` are fields of `ApiSettings`, `api_keys` among them.

    The application starts an engine that was not started, and closes it then.
    """
    service = Service(engine, (settings or ApiSettings()).override(**overrides), responses)
    shell = _Shell(service)

    async def lifetime(app: web.Application) -> AsyncIterator[None]:
        await service.start()
        watcher = asyncio.create_task(shell.watch())
        yield
        watcher.cancel()
        await service.aclose()

    async def drain(app: web.Application) -> None:
        if service.serving.admission.draining or await service.drain():  # or who runs the app has seen to it
            return
        await service.aclose()  # first, so that streams end with an error that says so
        await shell.give_up()

    app = web.Application(client_max_size=0)  # the service has its own limit
    app[SERVICE] = service
    app.cleanup_ctx.append(lifetime)
    app.on_shutdown.append(drain)
    app.router.add_route("*", "/{path:.*}", shell.handle)
    return app


class _Shell:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._running: dict[asyncio.Task[Any], asyncio.Transport | None] = {}  # and the connection; None: it was lost
        self._some = asyncio.Event()

    async def watch(self) -> None:
        """Give up the requests of clients that have gone."""
        while True:
            await self._some.wait()
            await asyncio.sleep(LOOK_EVERY)
            for task, transport in self._running.items():
                if transport is None or transport.is_closing():
                    task.cancel()  # as aiohttp itself does with `handler_cancellation`
            if not self._running:
                self._some.clear()

    async def give_up(self) -> None:
        """End all requests that do not end by themselves now; of a client that reads nothing, say."""
        if self._running:
            await asyncio.wait(tuple(self._running), timeout=LAST_MOMENT)
        for task in self._running:
            task.cancel()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer one request."""
        task = asyncio.current_task()
        assert task is not None
        self._running[task] = request.transport
        self._some.set()
        try:
            return await self._serve(request)
        except (Disconnected, ConnectionError):
            return web.Response(status=499)  # nobody is there to read it
        finally:
            del self._running[task]

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        tail = "/" + request.match_info["path"]
        headers: dict[str, str] = {}
        for name, value in request.headers.items():
            headers.setdefault(name.lower(), value)
        prefix = request.path[: len(request.path) - len(tail)]
        head = Head(request.method, tail, headers, prefix)

        async def read_body(limit: int) -> bytes:
            return await _read_body(request, limit)

        reply = await self._service.respond(head, read_body)
        try:
            return await _send(request, reply)
        finally:
            await reply.aclose()


async def _read_body(request: web.Request, limit: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    try:
        async for part in request.content.iter_any():
            size += len(part)
            if size > limit:
                raise BodyTooLarge
            parts.append(part)
    except web.RequestPayloadError as error:
        raise BodyUnreadable from error
    return b"".join(parts)


async def _send(request: web.Request, reply: Reply) -> web.StreamResponse:
    if reply.events is None:
        headers = {**reply.headers, **({"content-type": reply.content_type} if reply.body else {})}
        whole = web.Response(status=reply.status, body=reply.body, headers=headers)
        await whole.prepare(request)
        await whole.write_eof()
        return whole
    response = web.StreamResponse(status=reply.status, headers={**reply.headers, "content-type": reply.content_type})
    if request.version < HttpVersion11:
        response.force_close()  # nothing but that tells the end then; aiohttp keeps it open where it is asked to
    await response.prepare(request)
    if isinstance(reply.events, TokenEvents):
        await reply.events.pour(_writer(request, response))  # which needs no task, unless the client reads slowly
    else:
        async for event in reply.events:
            await response.write(event)
    await response.write_eof()
    return response


def _writer(request: web.Request, response: web.StreamResponse) -> Send:
    """Writes to a response that is prepared. All but the first bytes, behind the head, go to the connection as they
    are, in chunks: what aiohttp looks at for each of them, which is settled here, takes longer than that."""
    transport, writer = request.transport, request.writer
    headers = response.headers
    if transport is None or headers.get("Transfer-Encoding") != "chunked" or "Content-Encoding" in headers:
        return response.write
    begun = False

    def write(event: bytes) -> Coroutine[Any, Any, None] | None:
        nonlocal begun
        if not begun:
            begun = True
            return response.write(event)
        if transport.is_closing():
            raise ConnectionResetError("the client has gone")
        chunk = http_chunk(event)
        transport.write(chunk)
        writer.output_size += len(chunk)
        writer.buffer_size += len(chunk)
        if writer.buffer_size <= UNLOOKED:
            return None
        writer.buffer_size = 0
        return writer.drain()

    return write
