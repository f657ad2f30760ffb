"""Chat streams over HTTP from a real model: `asyncllm serve` in one process, all clients in another.

    python -m benchmarks.http [MODEL] [--streams 1 64 256] [--tokens 256] [--output FILE] [-- --load-format dummy]

What follows `--` are flags of `asyncllm serve`. MODEL is SmolLM2 of the installed package by default; a folder of
`benchmarks.skeleton` needs `--load-format dummy`. Times are a client's: to the first event with text, counted from the
connection, and between two events of one stream. Tokens are those of `usage`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path

from asyncllm.cli import find_smollm2
from asyncllm.workloads import percentile

READY = re.compile(r"on http://([\d.]+):(\d+)")
DONE = b"data: [DONE]"
TEXT = b'"content":"'
USAGE = re.compile(rb'"completion_tokens":(\d+)')


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamFigures:
    """So many streams at once. Times in seconds."""

    streams: int
    tokens: int
    seconds: float  # from the first connection to the last event
    first_token: tuple[float, float]  # p50, p99
    gap: tuple[float, float]

    @property
    def rate(self) -> float:
        """Tokens a second of all streams."""
        return self.tokens / self.seconds


@dataclass(slots=True)
class Report:
    """All that was measured so far."""

    command: str
    model: str
    start_seconds: float  # from exec until the server listens
    figures: list[StreamFigures] = field(default_factory=list)


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
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport
        transport.write(self._request)

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


def chat_request(number: int, tokens: int) -> bytes:
    """A chat of its own, so that no more than the template's beginning is cached."""
    body = json.dumps(
        {
            "messages": [{"role": "user", "content": f"{number} is a number. Write a long story about it."}],
            "max_tokens": tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
            "temperature": 1.0,
            "seed": number,
        }
    ).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def drive(port: int, streams: int, tokens: int, first: int) -> StreamFigures:
    """All at once; raises `ConnectionError` where one is not answered."""
    loop = asyncio.get_running_loop()
    start = time.perf_counter()
    connections = [
        loop.create_connection(partial(Client, chat_request(number, tokens)), "127.0.0.1", port)
        for number in range(first, first + streams)
    ]
    clients = [client for _, client in await asyncio.gather(*connections)]
    await asyncio.gather(*(client.done for client in clients))
    seconds = time.perf_counter() - start
    firsts = [client.times[0] - client.started for client in clients]
    gaps = [after - before for client in clients for before, after in pairwise(client.times)]
    return StreamFigures(
        streams=streams,
        tokens=sum(client.tokens for client in clients),
        seconds=seconds,
        first_token=(percentile(firsts, 50), percentile(firsts, 99)),
        gap=(percentile(gaps, 50), percentile(gaps, 99)),
    )


@contextmanager
def serving(model: str, flags: Sequence[str]) -> Iterator[int]:
    """`asyncllm serve` and its port; raises RuntimeError where it does not come up."""
    command = [sys.executable, "-m", "asyncllm", "serve", model, "--port", "0", "--log-level", "warning", *flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        try:
            said = []
            for line in server.stderr:
                said.append(line)
                if (found := READY.search(line)) is not None:
                    yield int(found[2])
                    return
            raise RuntimeError(f"the server ended: {''.join(said)}")
        finally:
            server.terminate()
            server.stderr.read()


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and write after each number of streams."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    given, flags = (given[: given.index("--")], given[given.index("--") + 1 :]) if "--" in given else (given, [])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=find_smollm2())
    parser.add_argument("--streams", type=int, nargs="+", default=(1, 64, 256))
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--output", type=Path)
    chosen = parser.parse_args(given)
    start = time.perf_counter()
    with serving(chosen.model, flags) as port:
        command = " ".join(["python -m benchmarks.http", *given, *(["--", *flags] if flags else [])])
        report = Report(command, chosen.model, time.perf_counter() - start)
        print(f"start-up {report.start_seconds:.1f} s\nstreams | tok/s | TTFT p50 | p99 | ITL p50 | p99", flush=True)
        asyncio.run(drive(port, 4, 16, 0))  # the first use of everything
        first = 4
        for streams in chosen.streams:
            found = asyncio.run(drive(port, streams, chosen.tokens, first))
            first += streams
            times = " | ".join(f"{1000 * seconds:.1f} ms" for seconds in (*found.first_token, *found.gap))
            print(f"{streams} | {found.rate:,.0f} | {times}", flush=True)
            report.figures.append(found)
            if chosen.output:
                chosen.output.write_text(json.dumps(asdict(report), indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
