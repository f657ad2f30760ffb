"""What the engine itself costs, without a model: `python -m benchmarks.engine_cost`.

On one core, 256 consumers each read 256 tokens, one token a round, from an engine whose runner answers at once; once as
token ids, once as text with a stop string set. Everything else is real: scheduler, detokenizer, stop matcher, streams.
Requests of one token each show what a request takes beside its tokens. Beside all of it, in the same run, 256 pairs of
tasks hand over one item a round through an `asyncio.Queue`.

A round begins when every consumer has read its token of the round before, so no stream falls behind and gets two tokens
in one delta, which would be cheaper. Ratios of processor time decide, within one run: other work on the machine changes
it less than wall time.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from dataclasses import astuple, dataclass

import numpy as np

from asyncllm import AsyncEngine, EngineConfig, SamplingParams
from asyncllm.engine.execution.runner import ModelFacts, StepTicket
from asyncllm.engine.model import ModelLoader, ServedModel
from asyncllm.engine.plan import CacheGroup, StepPlan, StepResult
from asyncllm.inputs.tokenizer import Tokenizer
from asyncllm.testing.byte_tokenizer import byte_tokenizer

IDS_GOAL, TEXT_GOAL = 3.0, 4.0
"""At most so many times the cost of the queues."""
ONE_TOKEN = "engine, a request of one token"
"""What it takes to submit a request, prepare it, admit it and end it."""


@dataclass
class Rounds:
    """Lets the runner answer one step for each round of all consumers."""

    streams: int
    arrived: int = 0
    runner: RoundRunner | None = None

    def reset(self) -> None:
        """Once no request is left: the next consumers come one by one again, and none may run ahead."""
        self.arrived = 0
        assert self.runner is not None
        self.runner.loop.call_soon_threadsafe(self.runner.reset)

    def arrive(self) -> None:
        """A consumer has submitted its request, or has read its token."""
        self.arrived += 1
        if self.arrived == self.streams:
            self.arrived = 0
            assert self.runner is not None
            self.runner.loop.call_soon_threadsafe(self.runner.allow)


class RoundRunner:
    """Answers at once: steps of the whole batch when their round begins, the few before them when all are there."""

    def __init__(self, rounds: Rounds) -> None:
        self.loop = asyncio.get_running_loop()
        self._streams = rounds.streams
        self._begun = False
        self._allowed = 0
        self._steps: deque[tuple[asyncio.Future[StepResult], StepResult]] = deque()
        rounds.runner = self

    def launch(self, plan: StepPlan) -> StepTicket:
        future: asyncio.Future[StepResult] = self.loop.create_future()
        token_ids = np.full(plan.num_sampled, 70 + plan.step % 26, np.int32)
        self._steps.append((future, StepResult(plan.step, token_ids)))
        self._answer()
        return StepTicket(future)

    def reset(self) -> None:
        self._begun, self._allowed = False, 0

    def allow(self) -> None:
        self._begun = True
        self._allowed += 1
        self._answer()

    async def aclose(self) -> None:
        pass

    def _answer(self) -> None:
        while self._steps and self._begun:
            future, result = self._steps[0]
            if len(result.token_ids) == self._streams:
                if not self._allowed:
                    return
                self._allowed -= 1
            self._steps.popleft()
            future.set_result(result)


def model(rounds: Rounds, tokens: int, tokenizer: Tokenizer | None) -> ModelLoader:
    async def load(config: EngineConfig, workers: Executor) -> ServedModel:
        facts = ModelFacts(
            vocab_size=512,
            max_model_len=tokens + 64,
            block_size=16,
            num_blocks=rounds.streams * (tokens // 16 + 4),
            groups=(CacheGroup(),),
            max_num_seqs=rounds.streams,
            max_batched_tokens=8 * rounds.streams,
            memory_bytes={},
            dtype="none",
            device="none",
        )
        return ServedModel(RoundRunner(rounds), facts, tokenizer)

    return load


@dataclass(frozen=True)
class Cost:
    """Of one run: seconds a token."""

    processor: float
    wall: float


class Stopwatch:
    def __init__(self) -> None:
        self._processor, self._wall = time.process_time(), time.perf_counter()

    def cost(self, tokens: int) -> Cost:
        processor, wall = time.process_time() - self._processor, time.perf_counter() - self._wall
        return Cost(processor / tokens, wall / tokens)


async def measure_engine(streams: int, tokens: int, tokenizer: Tokenizer | None) -> Cost:
    """From the first submission to the last token."""
    rounds = Rounds(streams)
    params = SamplingParams(
        temperature=0, max_tokens=tokens, ignore_eos=True, stop=() if tokenizer is None else "\x00never\x00"
    )
    deltas = 0

    async def consume(n: int) -> None:
        nonlocal deltas
        count = 0
        stream = engine.stream([5, 6, 7, n % 500], params)
        await stream.start()
        rounds.arrive()
        async for delta in stream:
            count += len(delta.token_ids)
            deltas += 1
            rounds.arrive()
        assert count == tokens

    async with AsyncEngine(model(rounds, tokens, tokenizer)) as engine:
        stopwatch = Stopwatch()
        await asyncio.gather(*(consume(n) for n in range(streams)))
        cost = stopwatch.cost(streams * tokens)
    # Tokens may share a delta only while the batch fills up.
    assert deltas > 0.95 * streams * tokens, f"{deltas} deltas for {streams * tokens} tokens"
    return cost


async def measure_queues(streams: int, tokens: int) -> Cost:
    """The same for pairs of tasks: each round every producer puts an item, and its consumer takes it."""

    async def produce(queue: asyncio.Queue[int]) -> None:
        for item in range(tokens):
            queue.put_nowait(item)
            await asyncio.sleep(0)

    async def consume(queue: asyncio.Queue[int]) -> None:
        for _ in range(tokens):
            await queue.get()

    queues: list[asyncio.Queue[int]] = [asyncio.Queue() for _ in range(streams)]
    stopwatch = Stopwatch()
    await asyncio.gather(*map(produce, queues), *map(consume, queues))
    return stopwatch.cost(streams * tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    chosen = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    tokenizer = byte_tokenizer()
    streams, tokens = chosen.streams, chosen.tokens
    cases: dict[str, Callable[[], Awaitable[Cost]]] = {
        "asyncio.Queue": lambda: measure_queues(streams, tokens),
        "engine, token ids": lambda: measure_engine(streams, tokens, None),
        "engine, text and a stop string": lambda: measure_engine(streams, tokens, tokenizer),
        ONE_TOKEN: lambda: measure_engine(streams, 1, None),
    }
    costs: dict[str, list[Cost]] = {name: [] for name in cases}
    for _ in range(chosen.repeats):
        for name, measure in cases.items():
            costs[name].append(asyncio.run(_await(measure())))
    goals = dict(zip(cases, (None, IDS_GOAL, TEXT_GOAL, None), strict=True))
    print(f"{streams} streams of {tokens} tokens on one core; µs a token, medians of {chosen.repeats} runs")
    print(f"{'':32}{'processor':>10}{'wall':>8}{'tokens/s':>12}")
    for name, runs in costs.items():
        processor, wall = (statistics.median(times) for times in zip(*map(astuple, runs), strict=True))
        line = f"{name:32}{processor * 1e6:10.2f}{wall * 1e6:8.2f}{1 / wall:12,.0f}"
        if (goal := goals[name]) is not None:
            ratio = statistics.median(
                a.processor / b.processor for a, b in zip(runs, costs["asyncio.Queue"], strict=True)
            )
            line += f"   {ratio:.2f} x the queues (goal: at most {goal:.0f})"
        print(line)


async def _await(measurement: Awaitable[Cost]) -> Cost:
    return await measurement


if __name__ == "__main__":
    main()
