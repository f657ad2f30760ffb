"""A bad host: what is left of a model's rate while the application's own Python spins or sleeps beside the engine.

    python -m benchmarks.host [MODEL] [--isolation thread process] [--device cuda] [--rounds N] [--output FILE]

Three hosts: a calm one; one with another thread that runs Python without end, and holds the interpreter lock as long as
it may; and one whose event loop, which reads all streams, blocks for 0.1 s out of every 0.2 s. The engine lives on a
thread of this process, and in a process of its own. Without a model, a step takes 5 ms and no processor, for 64
streams; with one, its weights are random. Rates are the medians of all rounds, a share is the median of what each round
says of its own calm host.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from asyncllm import AsyncEngine, EngineConfig
from asyncllm.engine.model import ModelLoader
from asyncllm.workloads import COLUMNS, Measurement, Workload, make_requests, measure_engine, table_row
from benchmarks.child import FIRST
from benchmarks.figures import Figures
from benchmarks.idle_model import IdleModel
from benchmarks.model_folders import model_folder

BLOCKED = 0.1
"""Seconds for which a sleeping host's loop is blocked, and then free."""

IDLE_STEP = 0.005
"""Seconds of a step without a model."""

GOAL = 0.9
"""Of the calm host's rate, beside a spinning one, from an engine in a process of its own."""


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
class Case:
    """One place of the engine beside one host, over the rounds."""

    figures: list[Figures] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)  # of the calm host's rate in the same round


@dataclass(slots=True)
class Report:
    """By where the engine lives, and the host."""

    command: str
    model: str
    cores: int
    device: str = ""
    load: tuple[float, float, float] = (0.0, 0.0, 0.0)  # of the machine at the end
    cases: dict[str, Case] = field(default_factory=dict)

    def add(self, isolation: str, host: str, measurement: Measurement) -> None:
        case = self.cases.setdefault(f"{isolation}, {host}", Case())
        case.figures.append(Figures.of(measurement))
        calm_rate = self.cases[f"{isolation}, calm"].figures[-1].output_rate
        case.shares.append(case.figures[-1].output_rate / calm_rate)
        print(f"{isolation}, {host}: {case.shares[-1]:.0%} | {' | '.join(table_row(measurement))}", flush=True)

    def conclude(self) -> None:
        """Say the medians."""
        for name, case in self.cases.items():
            rate = statistics.median(figures.output_rate for figures in case.figures)
            goal = f" (goal: at least {GOAL:.0%})" if name == "process, spinning" else ""
            print(f"{name:18} {rate:10,.0f} tok/s, {statistics.median(case.shares):.1%} of the calm host's{goal}")

    def write(self, path: Path | None) -> None:
        self.load = os.getloadavg()
        if path is not None:
            path.write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")


async def measure(
    model: Path | ModelLoader, config: EngineConfig, load: Workload, report: Report, seed: int
) -> AsyncIterator[None]:
    """One engine beside each host."""
    async with AsyncEngine(model, config=config) as engine:
        description = engine.describe()
        report.device = description.device
        await measure_engine(engine, FIRST, make_requests(FIRST, description.vocab_size, seed=-1))
        for number, (kind, host) in enumerate(HOSTS.items()):
            requests = make_requests(load, description.vocab_size, seed=len(HOSTS) * seed + number)
            async with host():
                measurement = await measure_engine(engine, load, requests)
            report.add(config.isolation, kind, measurement)
            yield


def _settings(model: str | None, device: str) -> tuple[Path | ModelLoader, EngineConfig]:
    if model is None:
        return IdleModel(IDLE_STEP), EngineConfig()
    from benchmarks.gpu import SETTINGS  # noqa: PLC0415  # brings torch

    return model_folder(model), SETTINGS.override(device=device)


async def run(chosen: argparse.Namespace, report: Report) -> None:
    """All rounds."""
    model, config = _settings(chosen.model, chosen.device)
    rows = chosen.rows or (64 if chosen.model is None else 128)
    rounds = chosen.rounds or (3 if chosen.model is None else 1)
    load = Workload(
        name=f"decode{rows}",
        requests=rows,
        concurrency=rows,
        prompt_tokens=(32, 32),
        output_tokens=(chosen.tokens, chosen.tokens),
    )
    length = -(-load.longest // 64) * 64
    print(" | ".join(["host: of the calm one", *COLUMNS]), flush=True)
    for seed in range(rounds):
        for isolation in chosen.isolation:
            settings = config.override(isolation=isolation, max_model_len=length)
            async for _ in measure(model, settings, load, report, seed):
                report.write(chosen.output)
    report.conclude()


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="a folder of benchmarks/models, or the path of another")
    parser.add_argument("--isolation", nargs="+", choices=("thread", "process"), default=("thread", "process"))
    parser.add_argument("--device", default="cuda", help="of a model")
    parser.add_argument("--rows", type=int, help="streams; 64, or 128 with a model")
    parser.add_argument("--tokens", type=int, default=512, help="of each")
    parser.add_argument("--rounds", type=int, help="3, or 1 with a model")
    parser.add_argument("--output", type=Path)
    chosen = parser.parse_args(arguments)
    command = " ".join(["python -m benchmarks.host", *(sys.argv[1:] if arguments is None else arguments)])
    report = Report(command, chosen.model or f"none: {1000 * IDLE_STEP:g} ms a step", os.cpu_count() or 1)
    asyncio.run(run(chosen, report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
