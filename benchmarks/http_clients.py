"""The clients of chat streams over HTTP, in as many processes as it takes for the server to be what is measured."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import re
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, cast

import uvloop

from asyncllm.workloads import percentile

DONE = b"data: [DONE]"
TEXT = b'"content":"'
USAGE = re.compile(rb'"completion_tokens":(\d+)')
HEAD_START = 0.1
"""Seconds that the processes have to get ready for the moment at which all of them begin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamFigures:
    """So many streams at once. Times in seconds."""

    streams: int
    tokens: int
    seconds: float  # from the first connection to the last event
    first_token: tuple[float, float]  # p50, p99
    gap: tuple[float, float]
    client_load: float = 0.0  # of the busiest process of clients: its processor time in `seconds`

    @property
    def rate(self) -> float:
        """Tokens a second of all streams."""
        return self.tokens / self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Readings:
    """What the clients of one process saw. Moments are those of `perf_counter`, which all processes share."""

    start: float
    end: float
    tokens: int
    firsts: list[float]
    gaps: list[float]
    processor_seconds: float


def summarise(readings: Sequence[Readings]) -> StreamFigures:
    """All processes together."""
    seconds = max(one.end for one in readings) - min(one.start for one in readings)
    firsts = [first for one in readings for first in one.firsts]
    gaps = [gap for one in readings for gap in one.gaps]
    return StreamFigures(
        streams=len(firsts),
        tokens=sum(one.tokens for one in readings),
        seconds=seconds,
        first_token=(percentile(firsts, 50), percentile(firsts, 99)),
        gap=(percentile(gaps, 50), percentile(gaps, 99)),
        client_load=max(one.processor_seconds for one in readings) / seconds,
    )


class Client(asyncio.Protocol):
    """Sends one request and notes when its events come."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._tail = b""
        self._begun = False
        self.started = time.perf_counter()
        self.times: list[float] = []  # of deliveries with text
        self.tokens = 0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)  # uvloop's has no such base
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if not self._begun and not data.startswith(b"HTTP/1.1 200"):
            return self._fail(ConnectionError(data.decode(errors="replace")))
        self._begun = True
        if TEXT in data:
            self.times.append(time.perf_counter())
        self._tail = (self._tail + data)[-1000:]
        if DONE in self._tail and not self.done.done():
            usage = USAGE.search(self._tail)
            if usage is None or not self.times:
                return self._fail(ConnectionError(f"a stream ended without usage or text: {self._tail!r}"))
            self.tokens = int(usage[1])
            self.done.set_result(None)
            self._transport.close()
        return None

    def connection_lost(self, error: Exception | None) -> None:
        self._fail(error or ConnectionError("the server closed the connection"))

    def _fail(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)
        self._transport.close()


def chat_body(number: int, tokens: int) -> dict[str, Any]:
    """A chat of its own, so that no more than the template's beginning is cached."""
    return {
        "messages": [{"role": "user", "content": f"{number} is a number. Write a long story about it."}],
        "max_tokens": tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "temperature": 1.0,
        "seed": number,
    }


def chat_request(number: int, tokens: int) -> bytes:
    """The same, to send to a server."""
    body = json.dumps(chat_body(number, tokens)).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def read(port: int, numbers: Sequence[int], tokens: int, at: float) -> Readings:
    """Ask for the chats of these numbers, at the moment `at`. Raises `ConnectionError` where one is not answered."""
    loop = asyncio.get_running_loop()
    requests = [chat_request(number, tokens) for number in numbers]
    await asyncio.sleep(max(0.0, at - time.perf_counter()))
    start, processor = time.perf_counter(), time.process_time()
    connections = [loop.create_connection(partial(Client, request), "127.0.0.1", port) for request in requests]
    clients = [client for _, client in await asyncio.gather(*connections)]
    await asyncio.gather(*(client.done for client in clients))
    return Readings(
        start=start,
        end=time.perf_counter(),
        tokens=sum(client.tokens for client in clients),
        firsts=[client.times[0] - client.started for client in clients],
        gaps=[after - before for client in clients for before, after in pairwise(client.times)],
        processor_seconds=time.process_time() - processor,
    )


async def drive(port: int, streams: int, tokens: int, first: int) -> StreamFigures:
    """All chats from the number `first` on at once, by clients of this process; raises as `read`."""
    return summarise([await read(port, range(first, first + streams), tokens, 0.0)])


class Crowd:
    """Clients in several processes."""

    def __init__(self, pool: ProcessPoolExecutor, processes: int) -> None:
        self._pool = pool
        self._processes = processes

    def drive(self, port: int, streams: int, tokens: int, first: int) -> StreamFigures:
        """As the function."""
        at = time.perf_counter() + HEAD_START
        shares = [range(first + part, first + streams, self._processes) for part in range(self._processes)]
        readings = [self._pool.submit(_read_here, port, share, tokens, at) for share in shares if share]
        return summarise([one.result() for one in readings])


@contextmanager
def crowd(processes: int) -> Iterator[Crowd]:
    """So many processes of clients, ready."""
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(time.sleep, [0.2] * processes))  # each of them starts one
        yield Crowd(pool, processes)


def _read_here(port: int, numbers: Sequence[int], tokens: int, at: float) -> Readings:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(read(port, numbers, tokens, at))
