"""What HTTP costs beside a bare handler, without a model: `python -m benchmarks.http_cost`.

256 clients on real sockets, in a process of their own, each read a chat answer of 256 tokens as server-sent events. The
serving process has the whole engine over a runner that answers at once, and both shells: aiohttp, and ASGI under
uvicorn. Beside each stands a bare handler of the same server, which waits for a round to begin and writes an event of
the same size. What counts is the serving process's processor time a token, from the first request to the last byte,
both measured in the same process in turn.

A round begins when every stream has written its token of the round before, so no two tokens leave in one write, which
would be cheaper.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import uvicorn
from aiohttp import web

from asyncllm import AsyncEngine
from asyncllm.api import create_aiohttp_app, create_asgi_app
from asyncllm.api.token_events import Send, TokenEvents
from asyncllm.config import EngineConfig
from asyncllm.engine.model import ModelLoader, ServedModel
from asyncllm.inputs.chat_template import ChatTemplate
from asyncllm.testing.byte_tokenizer import byte_tokenizer
from asyncllm.testing.tiny_models import CHAT_TEMPLATE
from benchmarks.engine_cost import Rounds, model
from benchmarks.server_process import answer, server_process

GOAL = 2.0
"""At most so many times the bare handler's processor time."""

SHELLS = ("aiohttp", "uvicorn")
HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}


def pace(rounds: Rounds) -> None:
    """Have each stream tell when it begins, and when it has written what it had."""
    pour, hand_out = TokenEvents.pour, TokenEvents._hand_out

    def tell_and_pour(events: TokenEvents, send: Send) -> Coroutine[Any, Any, None]:
        rounds.arrive()
        return pour(events, send)

    def hand_out_and_tell(events: TokenEvents, text: str) -> None:
        hand_out(events, text)
        rounds.arrive()

    TokenEvents.pour = tell_and_pour  # type: ignore[method-assign, assignment]  # to see when tokens pass
    TokenEvents._hand_out = hand_out_and_tell  # type: ignore[method-assign, assignment]  # likewise


def chat_model(load: ModelLoader) -> ModelLoader:
    """The same with a chat template, and with room for all prompts in one step."""

    async def load_with_template(config: EngineConfig, workers: Executor) -> ServedModel:
        served = await load(config, workers)
        facts = replace(served.facts, max_batched_tokens=64 * served.facts.max_num_seqs)
        return replace(served, facts=facts, chat_template=ChatTemplate(CHAT_TEMPLATE))

    return load_with_template


class BareRounds:
    """The same for handlers without an engine."""

    def __init__(self, streams: int) -> None:
        self._streams = streams
        self._arrived = 0
        self._begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def next(self) -> None:
        begun = self._begun
        self._arrived += 1
        if self._arrived == self._streams:
            self._arrived = 0
            self._begun = asyncio.get_running_loop().create_future()
            begun.set_result(None)
        await begun


def event(text: str) -> bytes:
    """As long as the app's own."""
    return (
        'data: {"id":"chatcmpl-0123456789abcdef0123456789abcdef","object":"chat.completion.chunk","created":1700000000,'
        f'"model":"bench","choices":[{{"index":0,"delta":{{"content":"{text}"}},"logprobs":null,"finish_reason":null}}]}}'
        "\n\n"
    ).encode()


def bare_aiohttp(rounds: BareRounds, tokens: int) -> web.Application:
    chunk = event("a")

    async def handle(request: web.Request) -> web.StreamResponse:
        await request.read()
        response = web.StreamResponse(headers=HEADERS)
        await response.prepare(request)
        for _ in range(tokens):
            await rounds.next()
            await response.write(chunk)
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    app = web.Application()
    app.router.add_post("/v1/chat/completions", handle)
    return app


def bare_asgi(rounds: BareRounds, tokens: int) -> Callable[..., Awaitable[None]]:
    chunk = event("a")
    headers = [(name.encode(), value.encode()) for name, value in HEADERS.items()]

    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for _ in range(tokens):
            await rounds.next()
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    return app


# --- the serving process ---


async def serve(shell: str, streams: int, tokens: int) -> None:
    """As `server_process` has it; whenever it is asked, no request is left."""
    tokenizer, rounds = byte_tokenizer(chat_template=CHAT_TEMPLATE), Rounds(streams)
    engine = AsyncEngine(chat_model(model(rounds, tokens, tokenizer)))
    pace(rounds)
    bare = BareRounds(streams)
    async with engine:
        apps: Mapping[str, Any]
        if shell == "aiohttp":
            apps = {
                "bare": bare_aiohttp(bare, tokens),
                "asyncllm": create_aiohttp_app(engine, model_names=["bench"], page=False),
            }
        else:
            apps = {
                "bare": bare_asgi(bare, tokens),
                "asyncllm": create_asgi_app(engine, model_names=["bench"], page=False),
            }

        def processor_time() -> float:
            rounds.reset()
            return time.process_time()

        async with listening(shell, apps) as ports:
            await answer(ports, processor_time)


@asynccontextmanager
async def listening(shell: str, apps: Mapping[str, Any]) -> AsyncIterator[dict[str, int]]:
    ports: dict[str, int] = {}
    if shell == "aiohttp":
        runners = []
        for name, app in apps.items():
            runner = web.AppRunner(app, access_log=None)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
            ports[name] = runner.addresses[0][1]
            runners.append(runner)
        yield ports
        for runner in runners:
            await runner.cleanup()
        return
    servers = [
        uvicorn.Server(
            uvicorn.Config(app, port=0, http="httptools", log_level="error", access_log=False, lifespan="off")
        )
        for app in apps.values()
    ]
    tasks = []
    for name, server in zip(apps, servers, strict=True):
        server.config.load()
        server.lifespan = server.config.lifespan_class(server.config)
        await server.startup()
        tasks.append(asyncio.create_task(server.main_loop()))
        ports[name] = server.servers[0].sockets[0].getsockname()[1]
    yield ports
    for server, task in zip(servers, tasks, strict=True):
        server.should_exit = True
        await task


# --- the clients' process ---


class Client(asyncio.Protocol):
    """Sends one request and reads until the last event."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._tail = b""
        self.chunks = 0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        transport.write(self._request)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        if not self._tail and not data.startswith(b"HTTP/1.1 200"):
            self.done.set_exception(ConnectionError(data.decode()))
            return self._transport.close()
        self.chunks += data.count(b'"content":"')
        self._tail = (self._tail + data)[-32:]
        if b"data: [DONE]" in self._tail and not self.done.done():
            self.done.set_result(None)
            self._transport.close()
        return None

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(error or ConnectionError("the server closed the connection"))


async def read_all(port: int, streams: int, tokens: int) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": tokens, "stream": True,
                       "ignore_eos": True, "temperature": 0}).encode()  # fmt: skip
    request = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n" % len(body)
    ) + body
    loop = asyncio.get_running_loop()
    clients = []
    for _ in range(streams):
        _, client = await loop.create_connection(lambda: Client(request), "127.0.0.1", port)
        clients.append(client)
    await asyncio.gather(*(client.done for client in clients))
    chunks = sum(client.chunks for client in clients)
    assert chunks >= 0.9 * streams * tokens, f"{chunks} events for {streams * tokens} tokens"


def measure(shell: str, streams: int, tokens: int, repeats: int) -> dict[str, list[float]]:
    """Seconds of the serving process a token, for each handler."""
    sizes = ("--streams", str(streams), "--tokens", str(tokens))
    costs: dict[str, list[float]] = {"bare": [], "asyncllm": []}
    with server_process("benchmarks.http_cost", "--serve", shell, *sizes) as server:
        for repeat in range(repeats + 1):
            for name, times in costs.items():
                start = server.processor_time()
                asyncio.run(read_all(server.ports[name], streams, tokens))
                if repeat:  # the first one warms up
                    times.append((server.processor_time() - start) / (streams * tokens))
    return costs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--serve", choices=SHELLS, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.serve:
        return asyncio.run(serve(chosen.serve, chosen.streams, chosen.tokens))
    print(f"{chosen.streams} streams of {chosen.tokens} tokens; µs of the serving process a token, medians of "
          f"{chosen.repeats} runs on {os.cpu_count()} cores")  # fmt: skip
    for shell in SHELLS:
        costs = measure(shell, chosen.streams, chosen.tokens, chosen.repeats)
        bare, whole = (statistics.median(times) * 1e6 for times in (costs["bare"], costs["asyncllm"]))
        ratio = statistics.median(a / b for a, b in zip(costs["asyncllm"], costs["bare"], strict=True))
        print(f"{shell:10} bare handler {bare:6.2f}   asyncllm {whole:6.2f}   {ratio:.2f} x (goal: at most {GOAL:.0f})")
    return None


if __name__ == "__main__":
    main()
