"""Large sizes on one device: a prompt that fills the context, many requests at once, and the memory that comes back.

    python -m benchmarks.limits llama-3.1-8b [--length 100000] [--requests 1000] [--device cuda] [--output FILE]

The model is a folder of `benchmarks/models`, or any other; its weights are random. An engine with as many rows as
requests gets all of them at once; another, of the model's whole context, reads one prompt of so many tokens, and again
out of its cache. Memory is what is taken of the device's (on the CPU: by the process) before an engine is there, while
it is, and after `aclose()`; one more engine has been there before, since a driver keeps some of what a first one took
(kernels, and room for what they spill). Exits with 1 where requests did not run at once, or memory does not come back.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from asyncllm import AsyncEngine, EngineConfig, SamplingParams
from asyncllm.models.registry import read_model_config
from asyncllm.weights.source import resolve_source
from asyncllm.workloads import COLUMNS, Measurement, Workload, make_requests, measure_engine, table_row
from benchmarks.figures import Figures
from benchmarks.model_folders import model_folder

OUTPUT = 32
"""Tokens after the long prompt."""
SLACK = 64_000_000
"""Bytes that may stay taken: what libraries load at first use, the CPU's allocator most of all."""


@dataclass(slots=True)
class Memory:
    """Bytes that the process had taken, of the device."""

    before: int
    serving: int = 0
    after: int = 0

    @property
    def back(self) -> bool:
        """Whether `aclose` gave back what the engine took."""
        return self.after - self.before <= SLACK


@dataclass(slots=True)
class Report:
    """All that was found."""

    command: str
    device: str
    memory: dict[str, Memory] = field(default_factory=dict)
    figures: list[Figures] = field(default_factory=list)
    most_rows: int = 0  # that were in use at once
    equal_tokens: int = 0  # of the long prompt's, when it is computed and when it is cached


def taken(device: str) -> int:
    """Bytes of the device's memory that are in use; on a CPU, by this process."""
    gc.collect()
    if device.startswith("cuda"):
        free, total = torch.cuda.mem_get_info()
        return total - free
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * 4096


async def warm(folder: Path, config: EngineConfig) -> None:
    """What a first engine takes for good is there before anything is measured."""
    async with AsyncEngine(folder, config=config.override(max_num_seqs=4, max_model_len=256)) as engine:
        await engine.generate([1, 2, 3], SamplingParams(max_tokens=4))


async def long_prompt(folder: Path, config: EngineConfig, length: int, report: Report) -> None:
    """One prompt, twice."""
    source = resolve_source(str(folder), config)
    model = read_model_config(source.config)
    length = min(length, model.max_position_embeddings - OUTPUT)
    load = Workload(
        name=f"1 × {length:,}",
        requests=1,
        concurrency=1,
        prompt_tokens=(length, length),
        output_tokens=(OUTPUT, OUTPUT),
        temperature=0.0,
    )
    requests = make_requests(load, model.vocab_size, seed=0)
    config = config.override(max_model_len=model.max_position_embeddings, max_num_seqs=4)
    memory = report.memory["long prompt"] = Memory(taken(config.device))
    async with AsyncEngine(folder, config=config) as engine:
        first = await measure_engine(engine, load, requests)
        keep(report, first)
        again = await measure_engine(engine, load, requests)
        keep(report, again)
        memory.serving = taken(config.device)
    memory.after = taken(config.device)
    report.equal_tokens = sum(a == b for a, b in zip(first.outputs[0], again.outputs[0], strict=True))


async def many_requests(folder: Path, config: EngineConfig, count: int, report: Report) -> None:
    """All at once, each in a row of its own."""
    load = Workload(
        name=f"{count:,} at once",
        requests=count,
        concurrency=count,
        prompt_tokens=(32, 64),
        output_tokens=(64, 128),
    )
    vocab_size = read_model_config(resolve_source(str(folder), config).config).vocab_size
    rows = -(-count // 256) * 256
    config = config.override(max_num_seqs=rows, max_model_len=-(-load.longest // 64) * 64)
    memory = report.memory["many requests"] = Memory(taken(config.device))
    async with AsyncEngine(folder, config=config) as engine:
        running = asyncio.create_task(measure_engine(engine, load, make_requests(load, vocab_size, seed=0)))
        while not running.done():
            report.most_rows = max(report.most_rows, engine.statistics().rows_used)
            await asyncio.sleep(0.02)
        keep(report, await running)
        memory.serving = taken(config.device)
    memory.after = taken(config.device)


def keep(report: Report, measurement: Measurement) -> None:
    report.figures.append(Figures.of(measurement))
    print(" | ".join(table_row(measurement)), flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder of benchmarks/models, or the path of another")
    parser.add_argument(
        "--length", type=int, default=100_000, help="of the prompt; at most what the model's context holds"
    )
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--output", type=Path)
    chosen = parser.parse_args(arguments)
    folder = model_folder(chosen.model)
    config = EngineConfig(device=chosen.device, load_format="dummy")
    name = torch.cuda.get_device_name() if chosen.device.startswith("cuda") else "CPU"
    report = Report(" ".join(["python -m benchmarks.limits", *(arguments or sys.argv[1:])]), name)
    asyncio.run(warm(folder, config))
    print(" | ".join(COLUMNS), flush=True)
    for part, size in ((many_requests, chosen.requests), (long_prompt, chosen.length)):
        asyncio.run(part(folder, config, size, report))
        kind, memory = list(report.memory.items())[-1]
        sizes = ", ".join(f"{when} {size / 1e9:.2f} GB" for when, size in asdict(memory).items())
        print(f"{kind}: memory {sizes}", flush=True)
        if chosen.output:
            chosen.output.write_text(json.dumps(asdict(report), indent=1), encoding="utf-8")
    print(f"rows at once: {report.most_rows}; equal tokens from the cache: {report.equal_tokens} of {OUTPUT}")
    lost = [kind for kind, memory in report.memory.items() if not memory.back]
    if lost:
        print(f"memory did not come back: {', '.join(lost)}")
    return int(bool(lost) or report.most_rows < chosen.requests)


if __name__ == "__main__":
    sys.exit(main())
