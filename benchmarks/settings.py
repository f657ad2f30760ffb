"""What a setting of the engine costs or gains on one GPU, beside the default in the same run.

    python -m benchmarks.settings llama-3.1-8b [--only "fp8 cache"] [--workload long128]

Writes `benchmarks/results/settings-MODEL.json`. Weights are random.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from asyncllm import AsyncEngine
from asyncllm.models.registry import read_model_config
from asyncllm.weights.source import resolve_source
from asyncllm.workloads import COLUMNS, PROFILES, Workload, make_requests, measure_engine, table_row
from benchmarks.child import FIRST, settle_heap
from benchmarks.figures import Figures
from benchmarks.gpu import ROOT, SETTINGS
from benchmarks.model_folders import model_folder, model_names

CHANGES: dict[str, dict[str, Any]] = {
    "default": {},
    "fp8 cache": {"kv_cache_dtype": "fp8"},
    "deterministic": {"deterministic": True},
    "large chunks": {"mixed_chunk_tokens": 8192},  # prompts hold decoding rows up as long as a step can
}
WORKLOADS = {
    # as many rows of some 4,000 tokens as half of an H200's memory holds
    "long128": Workload(
        name="long128", requests=128, concurrency=128, prompt_tokens=(3800, 3800), output_tokens=(96, 96)
    ),
    "single": PROFILES["gpu"]["single"],
    "decode128": PROFILES["gpu"]["decode128"],
    "shared64": PROFILES["gpu"]["shared64"],
}


async def measure(folder: Path, changes: dict[str, Any], workloads: list[Workload]) -> AsyncGenerator[Figures]:
    """A pass of each workload."""
    vocab_size = read_model_config(resolve_source(str(folder), SETTINGS).config).vocab_size
    async with AsyncEngine(folder, config=SETTINGS.override(**changes)) as engine:
        await measure_engine(engine, FIRST, make_requests(FIRST, vocab_size, seed=-1))
        settle_heap()
        for seed, workload in enumerate(workloads):
            measurement = await measure_engine(engine, workload, make_requests(workload, vocab_size, seed=seed))
            print(" | ".join(table_row(measurement)), flush=True)
            yield Figures.of(measurement)


async def measure_all(folder: Path, names: Sequence[str], workloads: list[Workload], path: Path) -> None:
    """Write the file anew after each workload: a run that is cut short loses nothing."""
    found: dict[str, list[dict[str, Any]]] = {}
    report = {
        "command": " ".join(["python -m benchmarks.settings", *sys.argv[1:]]),
        "device": torch.cuda.get_device_name(),
        "settings": found,
    }
    for name in names:
        print(f"\n{name}\n{' | '.join(COLUMNS)}", flush=True)
        found[name] = []
        async with aclosing(measure(folder, CHANGES[name], workloads)) as measured:
            async for figures in measured:
                found[name].append(asdict(figures))
                write(path, report)


def write(path: Path, report: dict[str, Any]) -> None:
    path.write_text(json.dumps(report, indent=1), encoding="utf-8")


def main() -> int:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=model_names())
    parser.add_argument("--only", action="append", choices=CHANGES, help="beside the default")
    parser.add_argument("--workload", action="append", choices=WORKLOADS)
    parser.add_argument("--output", type=Path)
    chosen = parser.parse_args()
    workloads = [WORKLOADS[name] for name in chosen.workload or WORKLOADS]
    names = [name for name in CHANGES if name == "default" or not chosen.only or name in chosen.only]
    path = chosen.output or ROOT / "results" / f"settings-{chosen.model}.json"
    asyncio.run(measure_all(model_folder(chosen.model), names, workloads, path))
    return 0


if __name__ == "__main__":
    sys.exit(main())
