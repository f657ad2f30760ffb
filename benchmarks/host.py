"""A bad host: what is left of decode128 while the application's Python spins or sleeps beside the engine.

    python -m benchmarks.host llama-3.1-8b [--isolation thread process] [--device cuda] [--output FILE]

Three hosts: a calm one; one with another thread that runs Python without end, and holds the interpreter lock as long as
it may; and one whose event loop, which reads all streams, blocks for 0.1 s out of every 0.2 s. The engine lives on a
thread of this process, then in a process of its own. Weights are random.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from asyncllm import AsyncEngine, EngineConfig
from asyncllm.models.registry import read_model_config
from asyncllm.weights.source import resolve_source
from asyncllm.workloads import COLUMNS, PROFILES, Workload, make_requests, measure_engine, table_row
from benchmarks.child import FIRST
from benchmarks.figures import Figures
from benchmarks.gpu import ROOT, SETTINGS

BLOCKED = 0.1
"""Seconds for which a sleeping host's loop is blocked, and then free."""


@asynccontextmanager
async def calm() -> AsyncIterator[None]:
    """Nothing beside the consumers."""
    yield


@asynccontextmanager
async def spinning() -> AsyncIterator[None]:
    """Another thread counts without end."""
    with _spinning_thread():
        yield


@contextmanager
def _spinning_thread() -> Iterator[None]:
    over = False

    def spin() -> None:
        while not over:
            pass

    thread = threading.Thread(target=spin, name="spinning host")
    thread.start()
    try:
        yield
    finally:
        over = True
        thread.join()


@asynccontextmanager
async def sleeping() -> AsyncIterator[None]:
    """The loop that reads the streams is blocked half of the time."""

    async def block() -> None:
        while True:
            time.sleep(BLOCKED)  # noqa: ASYNC251  # that is the point
            await asyncio.sleep(BLOCKED)

    blocking = asyncio.create_task(block())
    try:
        yield
    finally:
        blocking.cancel()


Host = Callable[[], AbstractAsyncContextManager[None]]
HOSTS: dict[str, Host] = {"calm": calm, "spinning": spinning, "sleeping": sleeping}


@dataclass(slots=True)
class Report:
    """By where the engine lives, and the host."""

    command: str
    device: str
    model: str
    figures: dict[str, Figures] = field(default_factory=dict)

    def write(self, path: Path | None) -> None:
        if path is not None:
            path.write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")


async def measure(folder: Path, config: EngineConfig, load: Workload, report: Report, path: Path | None) -> None:
    """One engine beside each host; the file is written anew after each."""
    vocab_size = read_model_config(resolve_source(str(folder), config).config).vocab_size
    async with AsyncEngine(folder, config=config) as engine:
        await measure_engine(engine, FIRST, make_requests(FIRST, vocab_size, seed=-1))
        for seed, (kind, host) in enumerate(HOSTS.items()):
            async with host():
                measurement = await measure_engine(engine, load, make_requests(load, vocab_size, seed=seed))
            name = f"{config.isolation}, {kind}"
            report.figures[name] = Figures.of(measurement)
            share = report.figures[name].output_rate / report.figures[f"{config.isolation}, calm"].output_rate
            print(f"{name}: {share:.0%} | {' | '.join(table_row(measurement))}", flush=True)
            report.write(path)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder of benchmarks/models, or the path of another")
    parser.add_argument("--isolation", nargs="+", choices=("thread", "process"), default=("thread", "process"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--output", type=Path)
    chosen = parser.parse_args(arguments)
    folder = ROOT / "models" / chosen.model if (ROOT / "models" / chosen.model).is_dir() else Path(chosen.model)
    name = torch.cuda.get_device_name() if chosen.device.startswith("cuda") else "CPU"
    command = " ".join(["python -m benchmarks.host", *(sys.argv[1:] if arguments is None else arguments)])
    report = Report(command, name, folder.name)
    rows, tokens = chosen.rows, (chosen.tokens, chosen.tokens)
    load = PROFILES["gpu"]["decode128"]
    load = Workload(
        name=f"decode{rows}", requests=rows, concurrency=rows, prompt_tokens=load.prompt_tokens, output_tokens=tokens
    )
    print(" | ".join(["host: of the calm one", *COLUMNS]), flush=True)
    for isolation in chosen.isolation:
        length = -(-load.longest // 64) * 64
        config = SETTINGS.override(device=chosen.device, isolation=isolation, max_model_len=length)
        asyncio.run(measure(folder, config, load, report, chosen.output))
    return 0


if __name__ == "__main__":
    sys.exit(main())
