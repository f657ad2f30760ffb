"""Many streaming clients on real sockets: some leave, some read slowly; nobody else notices and nothing is left."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import socket
import time
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from asyncllm import AsyncEngine
from asyncllm.api import create_aiohttp_app, create_asgi_app
from asyncllm.api.aiohttp_app import SERVICE
from asyncllm.inputs.tokenizer import Tokenizer
from asyncllm.testing.shadow_engine import ShadowModel
from tests.api import servers
from tests.api.asgi_client import until
from tests.api.servers import serving


@pytest.fixture
async def engine(tokenizer: Tokenizer) -> AsyncIterator[AsyncEngine]:
    async with AsyncEngine(
        ShadowModel(tokenizer=tokenizer), max_model_len=4096, num_blocks=2048, max_num_seqs=64
    ) as running:
        yield running


def asked(tokens: int, seed: int = 0) -> bytes:
    body = json.dumps({"prompt": [70, 71, 72 + seed % 100], "max_tokens": tokens, "ignore_eos": True, "stream": True,
                       "seed": seed}).encode()  # fmt: skip
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def client(port: int, tokens: int, leaves_after: float | None, seed: int) -> bool:
    """Whether all came."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(asked(tokens, seed))
        tail = b""
        async with asyncio.timeout(leaves_after):
            while data := await reader.read(65536):
                tail = (tail + data)[-64:]
                if b"[DONE]" in tail:
                    return True
        return False
    except TimeoutError:
        return False
    finally:
        writer.transport.abort()


async def crowd(port: int, engine: AsyncEngine, clients: int, tokens: int) -> None:
    chance = random.Random(3)
    leaving = [chance.random() * 0.5 if chance.random() < 1 / 3 else None for _ in range(clients)]
    whole = await asyncio.gather(*(client(port, tokens, after, seed) for seed, after in enumerate(leaving)))
    assert all(came for came, after in zip(whole, leaving, strict=True) if after is None)
    await until(lambda: engine.statistics().blocks_used == 0 and engine.statistics().rows_used == 0)
    s = engine.statistics()
    print(f"{clients} clients: {sum(whole)} read to the end, {clients - sum(whole)} left; {s.tokens_generated} tokens, "
          f"{s.blocks_used} blocks used, {s.rows_used} rows used")  # fmt: skip


@pytest.mark.parametrize("kind", ["aiohttp", "uvicorn"])
async def test_a_third_of_a_crowd_leaves(engine: AsyncEngine, kind: str) -> None:
    async with serving(kind, engine) as port:
        await crowd(port, engine, 60, 24)


@pytest.mark.full
@pytest.mark.blocks_loop  # a thousand requests that come in one turn of the loop, and the clients are in it too
@pytest.mark.parametrize("kind", ["aiohttp", "uvicorn"])
async def test_a_third_of_a_thousand_leaves(engine: AsyncEngine, kind: str) -> None:
    async with serving(kind, engine) as port:
        await crowd(port, engine, 1000, 48)


@pytest.mark.parametrize("tokens", [400, pytest.param(4000, marks=pytest.mark.full)])
@pytest.mark.parametrize("kind", ["aiohttp", "uvicorn"])
async def test_slow_readers(engine: AsyncEngine, kind: str, tokens: int) -> None:
    """They hold up nobody, and the server keeps little for them: what they have not read merges."""
    async with serving(kind, engine) as port:
        loop = asyncio.get_running_loop()
        slow = []
        for seed in range(8):
            connection = socket.socket()
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.setblocking(False)
            await loop.sock_connect(connection, ("127.0.0.1", port))
            await loop.sock_sendall(connection, asked(tokens, seed))
            slow.append(connection)
        await until(lambda: engine.statistics().requests_running >= 8)
        start = time.monotonic()
        assert await client(port, 24, None, 99)
        assert time.monotonic() - start < 5
        await until(lambda: engine.statistics().requests_running == 0, 120)  # the engine does not wait for them
        received = 0
        for _ in range(20):  # about 1 kB each, now and then
            for connection in slow:
                received += len(await loop.sock_recv(connection, 1024))
            await asyncio.sleep(0.01)
        assert received > 0
        for connection in slow:
            connection.close()
    await until(lambda: engine.statistics().blocks_used == 0)


@pytest.mark.parametrize("drained_before", [False, True])
async def test_shutting_down_beside_one_who_reads_nothing(engine: AsyncEngine, drained_before: bool) -> None:
    """Its time is `drain_timeout`, once, whatever aiohttp's own patience."""
    app = create_aiohttp_app(engine, drain_timeout=2 if drained_before else 0.2)
    runner = web.AppRunner(app, shutdown_timeout=0.1 if drained_before else 60)
    await runner.setup()
    listener = servers.open_listener()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    await web.SockSite(runner, listener).start()
    port, loop = listener.getsockname()[1], asyncio.get_running_loop()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.setblocking(False)
        await loop.sock_connect(connection, ("127.0.0.1", port))
        await loop.sock_sendall(connection, asked(1500))
        await until(lambda: engine.statistics().requests_running > 0)
        await until(lambda: engine.statistics().requests_running == 0, 60)
        if drained_before:
            assert not await app[SERVICE].drain()
        start = time.monotonic()
        await runner.cleanup()
        assert time.monotonic() - start < (1.5 if drained_before else 5)
    await until(lambda: len(asyncio.all_tasks()) == 1)


@pytest.mark.parametrize("kind", ["aiohttp", "uvicorn"])
async def test_one_who_sent_requests_ahead_and_leaves(engine: AsyncEngine, kind: str) -> None:
    """What runs is given up, and what waits behind it never begins."""
    async with serving(kind, engine) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(asked(4000, 1) + asked(4000, 2))
        await reader.readexactly(1000)
        writer.transport.abort()
        await until(lambda: engine.statistics().requests_aborted > 0)
        assert engine.statistics().tokens_generated < 4000
        await until(lambda: engine.statistics().blocks_used == 0)


@pytest.mark.parametrize("kind", ["aiohttp", "uvicorn"])
async def test_one_who_leaves_what_was_sent_unread(
    engine: AsyncEngine, kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The server waits in the midst of a write then, and its log has nothing to tell of that."""
    narrow = servers.open_listener()
    narrow.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    monkeypatch.setattr(servers, "open_listener", lambda: narrow)
    async with serving(kind, engine) as port:
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.setblocking(False)
            await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", port))
            await asyncio.get_running_loop().sock_sendall(connection, asked(1500))
            await until(lambda: engine.statistics().requests_running > 0)
            await until(lambda: engine.statistics().requests_running == 0, 60)
        await until(lambda: engine.statistics().blocks_used == 0)
        await asyncio.sleep(0.1)
    assert [record.getMessage() for record in caplog.records if record.levelname in ("ERROR", "CRITICAL")] == []


class Crawler:
    """A client that reads 1 kB a second, as slowly as its kernel lets it."""

    def __init__(self) -> None:
        self.received = 0

    async def read(self, port: int, tokens: int, seed: int) -> None:
        loop = asyncio.get_running_loop()
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.setblocking(False)
            await loop.sock_connect(connection, ("127.0.0.1", port))
            await loop.sock_sendall(connection, asked(tokens, seed))
            while True:
                self.received += len(await loop.sock_recv(connection, 256))
                await asyncio.sleep(0.25)


def buffered() -> int:
    """Bytes that wait in this process for a socket to take them."""
    transports = [each for each in gc.get_objects() if isinstance(each, asyncio.WriteTransport)]
    return sum(each.get_write_buffer_size() for each in transports)


async def best_of(times: int, port: int, tokens: int) -> float:
    """Seconds that one client waits for an answer."""
    best = float("inf")
    for seed in range(times):
        start = time.monotonic()
        assert await client(port, tokens, None, 1000 + seed)
        best = min(best, time.monotonic() - start)
    return best


@pytest.mark.full
@pytest.mark.alone
@pytest.mark.parametrize("kind", ["aiohttp", "uvicorn"])
async def test_readers_of_a_kilobyte_a_second(engine: AsyncEngine, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside 32 of them others read as fast as without them, and the server holds a small part of what those have not
    read."""
    open_listener = servers.open_listener

    def small_buffers() -> socket.socket:  # else the kernel takes it all, and the server has nothing to hold
        found = open_listener()
        found.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16384)
        return found

    monkeypatch.setattr(servers, "open_listener", small_buffers)
    readers, tokens = 32, 2000
    async with serving(kind, engine) as port:
        await asyncio.gather(*(client(port, 64, None, seed) for seed in range(readers)))  # memory that is used again
        alone = await best_of(25, port, 128)
        crawlers = [Crawler() for _ in range(readers)]
        tasks = [asyncio.create_task(each.read(port, tokens, seed)) for seed, each in enumerate(crawlers)]
        await until(lambda: engine.statistics().requests_running == readers, 30)
        await until(lambda: engine.statistics().requests_running == 0, 120)  # the engine does not wait for them
        beside = await best_of(25, port, 128)
        held = buffered()
        await asyncio.sleep(3)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        read, sent = sum(each.received for each in crawlers), readers * tokens * 190  # at least, were all events sent
        print(f"{kind}: an answer of 128 tokens takes {alone:.3f} s, {beside:.3f} s beside {readers} slow readers,")
        print(f"who read {read:,} bytes of {sent:,}; {held:,} bytes were in the server's buffers")
        assert all(each.received > 1024 for each in crawlers)
        assert beside < 1.5 * alone + 0.01
        assert 0 < held < readers * 160 * 1024
    await until(lambda: engine.statistics().blocks_used == 0)


async def test_what_a_slow_reader_leaves_unread_merges(engine: AsyncEngine) -> None:
    """A write that blocks is one delta's worth of memory, whatever the engine makes meanwhile."""
    writes: list[int] = []
    blocked = asyncio.Event()

    async def app_with_a_slow_client() -> None:
        body = json.dumps({"prompt": [70], "max_tokens": 2000, "ignore_eos": True, "stream": True}).encode()
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict[str, object]:
            if messages:
                return messages.pop()
            await asyncio.Event().wait()
            return {}

        async def send(message: dict[str, object]) -> None:
            if message["type"] == "http.response.body":
                part = message.get("body")
                assert isinstance(part, bytes)
                writes.append(len(part))
                if len(writes) == 2:
                    blocked.set()
                    await until(lambda: engine.statistics().requests_running == 0, 30)

        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "root_path": ""}
        await create_asgi_app(engine)(scope, receive, send)  # type: ignore[arg-type]

    await app_with_a_slow_client()
    assert blocked.is_set()
    assert len(writes) < 10  # and not 2,000
