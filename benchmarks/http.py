"""Chat streams over HTTP from a real model: the server in one process, its clients in others.

    python -m benchmarks.http [MODEL] [--streams 1 64 256] [--tokens 256] [--kinds process thread uvicorn engine]
                              [--clients 4] [--output FILE] [-- --load-format dummy]

What follows `--` are flags of `asyncllm serve`. MODEL is SmolLM2 of the installed package by default; a folder of
`benchmarks.skeleton` needs `--load-format dummy`. Kinds: `asyncllm serve` with its engine in a process, as it is by
default, or in a thread; the ASGI app under uvicorn; and the engine alone, for what HTTP costs of its rate. They start
side by side, and each is measured while the others rest: on a GPU that they share, `--kv-cache-memory` must leave room
for all of them, and kernels had better be in Triton's cache.

Times are a client's: to the first event with text, counted from the connection, and between two events of one stream.
Tokens are those of `usage`. The processor time of the server's busiest threads, and of the busiest process of clients,
are shares of the time that the streams took: whatever is near 100 % bounds the rate.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

from asyncllm.cli import find_smollm2
from benchmarks.http_clients import Crowd, StreamFigures, crowd
from benchmarks.http_server import KINDS, MeasuredProcess, measured

BUSY = 0.03
"""The least share of a thread that is told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """So many streams at once from one kind of server."""

    kind: str
    figures: StreamFigures
    thread_loads: dict[str, float]  # processor time in the time that it took

    def row(self) -> str:
        """The cells of `COLUMNS`."""
        found = self.figures
        times = " | ".join(f"{1000 * seconds:.1f} ms" for seconds in (*found.first_token, *found.gap))
        loads = ", ".join(f"{name} {load:.0%}" for name, load in self.thread_loads.items())
        processor = 1e6 * sum(self.thread_loads.values()) * found.seconds / found.tokens
        return (
            f"{self.kind} | {found.streams} | {found.rate:,.0f} | {times} | {processor:.1f} µs | {loads}; clients "
            f"{found.client_load:.0%}"
        )


COLUMNS = "kind | streams | tok/s | TTFT p50 | p99 | ITL p50 | p99 | processor time a token | busy threads"


@dataclass(slots=True)
class Report:
    """All that was measured so far."""

    command: str
    model: str
    start_seconds: dict[str, float] = field(default_factory=dict)  # by kind: until all up to it take requests
    runs: list[Run] = field(default_factory=list)


def measure(server: MeasuredProcess, clients: Crowd, streams: int, tokens: int, first: int) -> Run:
    """The chats from the number `first` on."""
    before = server.thread_seconds()
    drive = server.read if server.kind == "engine" else None
    found = drive(streams, tokens, first) if drive else clients.drive(server.port, streams, tokens, first)
    loads = {
        name: (seconds - before.get(name, 0.0)) / found.seconds for name, seconds in server.thread_seconds().items()
    }
    busy = sorted(((load, name) for name, load in loads.items() if load >= BUSY), reverse=True)
    return Run(kind=server.kind, figures=found, thread_loads={name: load for load, name in busy})


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and write after each number of streams."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    given, flags = (given[: given.index("--")], given[given.index("--") + 1 :]) if "--" in given else (given, [])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=find_smollm2())
    parser.add_argument("--streams", type=int, nargs="+", default=(1, 64, 256))
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--kinds", choices=KINDS, nargs="+", default=("process",))
    parser.add_argument("--clients", type=int, default=4, help="processes")
    parser.add_argument("--output", type=Path)
    chosen = parser.parse_args(given)
    command = " ".join(["python -m benchmarks.http", *given, *(["--", *flags] if flags else [])])
    report = Report(command, chosen.model)
    with crowd(chosen.clients) as clients, ExitStack() as stack:
        start = time.perf_counter()
        servers = [stack.enter_context(measured(kind, chosen.model, flags)) for kind in chosen.kinds]
        for server in servers:
            server.wait_ready()
            report.start_seconds[server.kind] = time.perf_counter() - start
        starts = ", ".join(f"{kind} {seconds:.1f} s" for kind, seconds in report.start_seconds.items())
        print(f"start-up: {starts}\n{COLUMNS}", flush=True)
        first = 0
        for server in servers:
            measure(server, clients, 4, 16, first)  # the first use of everything
            first += 4
            for streams in chosen.streams:
                run = measure(server, clients, streams, chosen.tokens, first)
                first += streams
                print(run.row(), flush=True)
                report.runs.append(run)
                if chosen.output:
                    chosen.output.write_text(json.dumps(asdict(report), indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
