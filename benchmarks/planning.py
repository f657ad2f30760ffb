"""What planning a step costs, beside incrementing an attribute on 256 objects in the same run.

`python -m benchmarks.planning`. Goals: `schedule()` costs at most 40 times that for 256 steady rows, and 135 times for
a mixed step.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median
from time import perf_counter

import numpy as np

from asyncllm.engine.plan import CacheGroup, RowSampling, StepPlan, StepResult
from asyncllm.engine.scheduling.request import RequestSpec
from asyncllm.engine.scheduling.scheduler import Scheduler
from asyncllm.engine.scheduling.scheduler_config import SchedulerConfig

ROWS = 256
GREEDY = RowSampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)
STEADY_GOAL, MIXED_GOAL = 40, 135


@dataclass(frozen=True)
class Cost:
    """Medians over the measured steps, in microseconds."""

    schedule: float
    apply: float


class Counter:
    def __init__(self) -> None:
        self.value = 0


def increment_cost(repeats: int) -> float:
    """Microseconds to increment an attribute on 256 objects, one after another."""
    counters = [Counter() for _ in range(ROWS)]

    def increment() -> None:
        for counter in counters:
            counter.value += 1

    return median(timed(increment) for _ in range(repeats))


def timed(function: Callable[[], object]) -> float:
    start = perf_counter()
    function()
    return (perf_counter() - start) * 1e6


def spec(request: int, prompt: int, max_tokens: int) -> RequestSpec:
    tokens = np.random.default_rng(request).integers(0, 32_000, prompt, dtype=np.int32)
    return RequestSpec(request, tokens, GREEDY, max_tokens, 0, frozenset((2,)), arrival=0.0)


class Driver:
    """Runs a scheduler one step ahead, with tokens that end nothing."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.scheduler = Scheduler(config)
        self.requests = 0
        self.plans: list[StepPlan] = []

    def add(self, prompt: int, max_tokens: int) -> None:
        self.scheduler.add(spec(self.requests, prompt, max_tokens))
        self.requests += 1

    def step(self) -> tuple[StepPlan, float, float]:
        """Plan a step, apply the one before: the plan, and both times."""
        start = perf_counter()
        plan = self.scheduler.schedule(0.0)
        scheduled = (perf_counter() - start) * 1e6
        assert plan is not None
        self.plans.append(plan)
        if len(self.plans) < 2:
            return plan, scheduled, 0.0
        oldest = self.plans.pop(0)
        tokens = np.full(oldest.num_sampled, 5, np.int32)
        applied = timed(lambda: self.scheduler.apply(StepResult(oldest.step, tokens)))
        self.scheduler.take_ended()
        self.scheduler.take_released()
        return plan, scheduled, applied


def config(block_size: int, num_blocks: int, max_batched_tokens: int) -> SchedulerConfig:
    return SchedulerConfig(
        max_num_seqs=ROWS,
        max_batched_tokens=max_batched_tokens,
        mixed_chunk_tokens=2 * ROWS,
        full_step_tokens=3 * ROWS,
        block_size=block_size,
        num_blocks=num_blocks,
        groups=(CacheGroup(),),
        max_model_len=1_000_000,
        run_ahead=1,
    )


def steady_cost(steps: int) -> Cost:
    """Each of 256 rows computes its next token, and nothing else happens."""
    driver = Driver(config(block_size=4096, num_blocks=2 * ROWS, max_batched_tokens=65_536))
    for _ in range(ROWS):
        driver.add(prompt=32, max_tokens=4000)
    for _ in range(10):
        driver.step()
    costs = []
    for _ in range(min(steps, 3500)):
        plan, scheduled, applied = driver.step()
        assert len(plan.decode_rows) == ROWS
        assert not plan.decode_changed
        costs.append((scheduled, applied))
    return Cost(median(s for s, _ in costs), median(a for _, a in costs))


def mixed_cost(steps: int) -> Cost:
    """Of 256 rows about 8 begin a block and 2 end; as many join, with a chunk of 256 prompt tokens each."""
    driver = Driver(config(block_size=32, num_blocks=8192, max_batched_tokens=3 * ROWS))
    for i in range(2 * ROWS + 2 * steps):
        driver.add(prompt=ROWS - i % 32, max_tokens=128 - (i // 2 if i < ROWS else 0))
    for _ in range(ROWS):
        driver.step()
    costs, joins, entries, chunks = [], 0, 0, 0
    for _ in range(steps):
        plan, scheduled, applied = driver.step()
        joins += len(plan.joins)
        chunks += len(plan.chunks)
        entries += len(plan.tables.rows)
        costs.append((scheduled, applied))
    print(f"a mixed step has {chunks / steps:.1f} chunks, {joins / steps:.1f} joins, {entries / steps:.1f} new blocks")
    return Cost(median(s for s, _ in costs), median(a for _, a in costs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--json", help="write the figures to this file")
    arguments = parser.parse_args()
    increment = increment_cost(arguments.steps)
    steady, mixed = steady_cost(arguments.steps), mixed_cost(arguments.steps)
    increment = min(increment, increment_cost(arguments.steps))
    print(f"increment an attribute on {ROWS} objects: {increment:.1f} µs")
    for name, cost, goal in (("steady", steady, STEADY_GOAL), ("mixed", mixed, MIXED_GOAL)):
        print(
            f"{name:6}: schedule {cost.schedule:6.1f} µs = {cost.schedule / increment:5.1f} x (goal {goal}), "
            f"apply {cost.apply:6.1f} µs = {cost.apply / increment:5.1f} x"
        )
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump({"increment": increment, "steady": asdict(steady), "mixed": asdict(mixed)}, file, indent=1)


if __name__ == "__main__":
    main()
