"""The page in an app of its own: its files, a real engine's events, and a chat endpoint that says what it is told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from asyncllm import AsyncEngine
from asyncllm.api.engine_events import engine_events
from asyncllm.api.page_files import page_files
from asyncllm.api.service_metrics import ServiceMetrics

PREFIX = "/ai"


@dataclass
class PageApp:
    """What the page's app does, and what it was asked."""

    engine: AsyncEngine
    pieces: Sequence[str] = ("Hel", "lo", " world")
    reasoning: Sequence[str] = ()
    delay: float = 0.0
    error: str | None = None  # told in the stream, after the pieces
    key: str | None = None
    metrics: ServiceMetrics = field(default_factory=lambda: ServiceMetrics("tiny-model"))
    asked: list[dict[str, Any]] = field(default_factory=list)
    left: list[str] = field(default_factory=list)  # clients that went before the end

    def app(self) -> web.Application:
        made = web.Application(middlewares=[self._check_key])
        for path, file in page_files().items():
            made.router.add_get(path, self._page(file))
        made.router.add_get("/v1/models", self._models)
        made.router.add_post("/v1/chat/completions", self._chat)
        made.router.add_get("/engine/events", self._events)
        return made

    def _page(self, file: Any) -> Any:
        async def respond(request: web.Request) -> web.Response:
            return web.Response(body=file.body, headers={"content-type": file.content_type, **file.headers})

        return respond

    @web.middleware
    async def _check_key(self, request: web.Request, handler: Any) -> web.StreamResponse:
        path = request.path.removeprefix(PREFIX)
        given = request.headers.get("authorization")
        if self.key is not None and path not in page_files() and given != f"Bearer {self.key}":
            return web.json_response({"error": {"message": "A key is needed."}}, status=401)
        return await handler(request)  # type: ignore[no-any-return]

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "tiny-model", "object": "model"}]})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(await request.json())
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        observed = self.metrics.request()
        deltas = [{"reasoning_content": text} for text in self.reasoning] + [{"content": text} for text in self.pieces]
        try:
            for delta in [{"role": "assistant", "content": ""}, *deltas]:
                await self._send(response, {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
                observed.tokens(1)
                await asyncio.sleep(self.delay)
            if self.error is not None:
                await self._send(response, {"error": {"message": self.error}})
                return response
            await self._send(response, {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
            cached = {"cached_tokens": 4}
            usage = {"prompt_tokens": 9, "completion_tokens": len(deltas), "prompt_tokens_details": cached}
            await self._send(response, {"choices": [], "usage": usage})
            await response.write(b"data: [DONE]\n\n")
        except (ConnectionError, asyncio.CancelledError):
            self.left.append(self.asked[-1]["messages"][-1]["content"])
            raise
        return response

    async def _send(self, response: web.StreamResponse, chunk: dict[str, Any]) -> None:
        text = json.dumps(chunk, ensure_ascii=False)
        whole = f"data: {text}\n\n".encode()
        await response.write(whole[:11])  # no event comes in one piece
        await response.write(whole[11:])

    async def _events(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        async for event in engine_events(self.engine, self.metrics, interval=0.1):
            await response.write(event)
        return response


@asynccontextmanager
async def serve(app: web.Application) -> AsyncIterator[str]:
    """Serve an app under `PREFIX`, on a free port. Yields its address."""
    outer = web.Application()
    outer.add_subapp(PREFIX, app)
    runner = web.AppRunner(outer, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        assert site._server is not None
        port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
        yield f"http://127.0.0.1:{port}{PREFIX}/"
    finally:
        await runner.cleanup()
