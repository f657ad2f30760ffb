"""Where the time goes until the first token, on a GPU: imports, kernels, weights, captures.

    python -m benchmarks.startup llama-3.1-8b [--warm] [--output FILE]

Weights are random. Without `--warm` Triton's cache on disk is an empty folder; with it, it is the one that there is, so
that a second run finds what the first one compiled. Kernels are compiled side by side, in processes of their own: their
seconds add up to more than those on the clock. `first` is how long Triton takes to make its own representation of a
kernel, which holds a process's interpreter lock. `here` counts the kernels that no process compiled, but this one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import tempfile
import time
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.model_folders import model_folder, model_names


@dataclass(slots=True)
class KernelTimes:
    """Of all variants of a kernel that start-up needs."""

    elsewhere: int = 0  # compiled by another process
    here: int = 0
    from_cache: int = 0
    first_seconds: float = 0.0
    seconds: float = 0.0


@dataclass(slots=True)
class Breakdown:
    """Seconds on the clock, since the process began."""

    model: str
    cold: bool
    python: float = 0.0
    imported: float = 0.0
    served: float = 0.0  # the engine takes requests
    first_token: float = 0.0
    captures: int = 0
    said: list[str] = field(default_factory=list)  # by the engine about it
    kernels: dict[str, KernelTimes] = field(default_factory=lambda: defaultdict(KernelTimes))

    def listen(self, *, src: Any, times: Any, cache_hit: bool, **_: Any) -> None:
        """As Triton calls its listener, from any thread."""
        kernel = self.kernels[src.fn.fn.__name__]
        if cache_hit:
            kernel.from_cache += 1
        else:
            kernel.here += 1
            kernel.first_seconds += times.ir_initialization / 1e6
            kernel.seconds += times.total / 1e6

    def note(self, name: str, seconds: float, first_seconds: float) -> None:
        """A process has compiled a kernel, which this one is going to find in the cache."""
        kernel = self.kernels[name]
        kernel.elsewhere += 1
        kernel.from_cache -= 1
        kernel.first_seconds += first_seconds
        kernel.seconds += seconds


class Listening(logging.Handler):
    """Takes down what the engine says."""

    def __init__(self, breakdown: Breakdown) -> None:
        super().__init__()
        self.breakdown = breakdown

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if text.startswith("captured a graph"):
            self.breakdown.captures += 1
        elif record.msg.startswith("compiled %s in"):
            self.breakdown.note(*record.args)  # type: ignore[misc]  # as they were logged
        else:
            self.breakdown.said.append(f"{process_age():.2f} s: {text}")


def process_age() -> float:
    """Seconds since this process began."""
    started = int(Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started / 100  # in ticks of 10 ms since boot


async def measure(breakdown: Breakdown) -> None:
    """One start, and one token. What it needs is imported here, so that it counts."""
    import triton  # noqa: PLC0415

    from asyncllm import AsyncEngine, EngineConfig, SamplingParams  # noqa: PLC0415

    triton.knobs.compilation.listener = breakdown.listen
    logger = logging.getLogger("asyncllm")
    logger.setLevel(logging.DEBUG)
    logger.addHandler(Listening(breakdown))
    config = EngineConfig(
        device="cuda", load_format="dummy", max_num_seqs=256, max_batched_tokens=8192, max_model_len=8192
    )
    breakdown.imported = process_age()
    async with AsyncEngine(model_folder(breakdown.model), config=config) as engine:
        breakdown.served = process_age()
        await engine.generate([1, 2, 3], SamplingParams(max_tokens=1, ignore_eos=True))
        breakdown.first_token = process_age()


def main() -> None:
    """Print it, and write it down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=model_names())
    parser.add_argument("--warm", action="store_true", help="keep Triton's cache on disk")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    breakdown = Breakdown(options.model, not options.warm, python=process_age())
    with tempfile.TemporaryDirectory() as folder:
        if breakdown.cold:
            os.environ["TRITON_CACHE_DIR"] = folder
        asyncio.run(measure(breakdown))
    print(
        f"{breakdown.model}, {'cold' if breakdown.cold else 'warm'}: python {breakdown.python:.2f} s, "
        f"imported at {breakdown.imported:.2f} s, serves at {breakdown.served:.2f} s with {breakdown.captures} graphs, "
        f"first token at {breakdown.first_token:.2f} s"
    )
    print(*breakdown.said, sep="\n")
    print("kernel | compiled elsewhere | here | from cache | first s | all s")
    for name, kernel in sorted(breakdown.kernels.items(), key=lambda item: -item[1].seconds):
        counts = f"{kernel.elsewhere} | {kernel.here} | {kernel.from_cache}"
        print(f"{name} | {counts} | {kernel.first_seconds:.2f} | {kernel.seconds:.2f}")
    totals = [sum(getattr(each, name) for each in breakdown.kernels.values()) for name in ("first_seconds", "seconds")]
    print(f"together {totals[0]:.2f} s one after another, {totals[1]:.2f} s in all, on {os.cpu_count()} processors")
    if options.output:
        options.output.write_text(json.dumps(asdict(breakdown), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
