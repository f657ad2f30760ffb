"""How often the engine's thread gives the interpreter lock up in a steady decode step, by part.

Beside a thread that runs Python without end, who gave the lock up has it back after one switch interval. So what a part
of a step takes longer than beside a calm host is as many intervals as it gave the lock up, whatever it was that did so.
Waiting for the device gives it up too; there the thread that hears of the device's end needs it as well.

    python -m benchmarks.lock_releases [--rows 64]

does it without a model; `python -m benchmarks.gpu MODEL --profile` on a GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from dataclasses import fields

from asyncllm import AsyncEngine, SamplingParams
from asyncllm.metrics import StepTimes
from benchmarks.host import spinning
from benchmarks.idle_model import IdleModel

PARTS = ("schedule", "launch", "wait", "apply", "deliver")
INTERVAL = 0.02
"""Seconds: so many that no part of a step comes near it by itself."""
CALM_STEPS, SPUN_STEPS = 100, 30


async def count_releases(engine: AsyncEngine, rows: int) -> dict[str, float]:
    """Times a step, by part. Nobody reads the rows' streams meanwhile: the host has nothing to do but to spin."""
    params = SamplingParams(max_tokens=4 * (CALM_STEPS + SPUN_STEPS), ignore_eos=True)
    streams = [engine.stream([5 + i % 7, 6, 7], params) for i in range(rows)]
    interval = sys.getswitchinterval()
    try:
        await asyncio.gather(*(stream.start() for stream in streams))
        while engine.statistics().requests_running < rows:  # noqa: ASYNC110 # only statistics tell
            await asyncio.sleep(0.005)
        calm = await mean_step(engine, CALM_STEPS)
        sys.setswitchinterval(INTERVAL)
        async with spinning():
            spun = await mean_step(engine, SPUN_STEPS)
    finally:
        sys.setswitchinterval(interval)
        for stream in streams:
            await stream.aclose()
    calm["wait"] = 0.0  # the device works on while the lock is waited for
    return {part: max(0.0, spun[part] - calm[part]) / INTERVAL for part in PARTS}


async def mean_step(engine: AsyncEngine, steps: int) -> dict[str, float]:
    """Seconds of each part, over so many steps or more."""
    before = engine.statistics().step_times
    while (after := engine.statistics().step_times).steps < before.steps + steps:  # noqa: ASYNC110 # likewise
        await asyncio.sleep(0.02)
    names = [each.name for each in fields(StepTimes) if each.name.endswith("_seconds")]
    return {
        name.removesuffix("_seconds"): (getattr(after, name) - getattr(before, name)) / (after.steps - before.steps)
        for name in names
    }


async def measure(rows: int) -> dict[str, float]:
    """Over a device that takes 5 ms a step and no processor."""
    async with AsyncEngine(IdleModel(0.005)) as engine:
        return await count_releases(engine, rows)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64)
    found = asyncio.run(measure(parser.parse_args().rows))
    print(", ".join(f"{part} {count:.1f}" for part, count in found.items()), "times a step")


if __name__ == "__main__":
    main()
