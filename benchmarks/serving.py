"""Which isolation serves faster over HTTP: chat streams from a model that takes no processor, clients in a process of
their own: `python -m benchmarks.serving`.

Each kind has a server of its own, the same app on the same event loop as `asyncllm serve` has, over a device whose
steps take 4 ms (a small model's on a large GPU). They are measured in turn. What is said of each: tokens a second,
times that a client sees, and processor time a token of the server and of the engine's process, if it has one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

import uvloop
from aiohttp import web

from asyncllm import AsyncEngine, EngineConfig
from asyncllm.api import create_aiohttp_app
from asyncllm.testing.byte_tokenizer import byte_tokenizer
from asyncllm.testing.tiny_models import CHAT_TEMPLATE
from benchmarks.http_clients import StreamFigures, drive
from benchmarks.idle_model import IdleModel
from benchmarks.server_process import answer, server_process

KINDS = ("thread", "process")


async def serve(kind: str, streams: int, step: float) -> None:
    """In a process of its own, as `server_process` has it."""
    model = IdleModel(step, byte_tokenizer(chat_template=CHAT_TEMPLATE), CHAT_TEMPLATE)
    config = EngineConfig(isolation=kind, max_num_seqs=max(streams, 256), max_model_len=1024)  # type: ignore[arg-type]
    async with AsyncEngine(model, config=config) as engine:
        runner = web.AppRunner(create_aiohttp_app(engine, model_names=["bench"], page=False), access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
        await answer({kind: runner.addresses[0][1]}, processor_time)
        await runner.cleanup()


def processor_time() -> float:
    """Seconds of this process and its children."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    children = [int(pid) for task in Path("/proc/self/task").glob("*/children") for pid in task.read_text().split()]
    ticks = 0
    for pid in children:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        ticks += int(fields[11]) + int(fields[12])
    return own.ru_utime + own.ru_stime + ticks / os.sysconf("SC_CLK_TCK")


@dataclass(slots=True)
class Report:
    """By kind."""

    command: str
    cores: int
    load: tuple[float, float, float] = (0.0, 0.0, 0.0)  # of the machine at the end
    figures: dict[str, list[StreamFigures]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    processor_seconds: dict[str, list[float]] = field(default_factory=lambda: {kind: [] for kind in KINDS})  # a token


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--step", type=float, default=0.004, help="seconds")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--serve", choices=KINDS, help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.serve:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(chosen.serve, chosen.streams, chosen.step))
        return 0
    command = " ".join(["python -m benchmarks.serving", *(sys.argv[1:] if arguments is None else arguments)])
    report = Report(command, os.cpu_count() or 1)
    with ExitStack() as stack:
        sizes = ("--streams", str(chosen.streams), "--step", str(chosen.step))
        servers = {
            kind: stack.enter_context(server_process("benchmarks.serving", "--serve", kind, *sizes)) for kind in KINDS
        }
        first = 0
        for number in range(chosen.rounds + 1):
            for kind, one in servers.items():
                before = one.processor_time()
                found = asyncio.run(drive(one.ports[kind], chosen.streams, chosen.tokens, first))
                first += chosen.streams
                if number:  # the first round warms up
                    report.figures[kind].append(found)
                    report.processor_seconds[kind].append((one.processor_time() - before) / found.tokens)
    report.load = os.getloadavg()
    print(f"{chosen.streams} streams of {chosen.tokens} tokens, {1000 * chosen.step:g} ms a step, {report.cores} cores")
    for kind in KINDS:
        figures, times = report.figures[kind], report.processor_seconds[kind]
        rate = statistics.median(one.rate for one in figures)
        first_token = statistics.median(one.first_token[0] for one in figures)
        gap, worst = (statistics.median(one.gap[place] for one in figures) for place in (0, 1))
        print(
            f"{kind:8} {rate:8,.0f} tok/s, TTFT p50 {1e3 * first_token:.0f} ms, ITL p50 {1e3 * gap:.1f} ms, p99 "
            f"{1e3 * worst:.1f} ms, {1e6 * statistics.median(times):.1f} µs of processor time a token"
        )
    if chosen.output is not None:
        chosen.output.write_text(json.dumps(asdict(report), indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
