"""Benchmark workloads as data, and how one of them is measured on any engine.

`asyncllm bench` and the harness in `benchmarks/` share this, so that a figure from one means the same in the other.
Prompts are uniform random token ids, lengths uniform over an inclusive range, all from a seed.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

from asyncllm.params import SamplingParams

if TYPE_CHECKING:
    from asyncllm.engine.async_engine import AsyncEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A kind of load. Lengths are in tokens, (shortest, longest)."""

    name: str
    requests: int
    concurrency: int  # so many at once; each that ends makes room for the next
    prompt_tokens: tuple[int, int]
    output_tokens: tuple[int, int]
    shared_tokens: int = 0  # a prefix in front of every prompt, the same for all
    temperature: float = 1.0

    @property
    def longest(self) -> int:
        """The most tokens that one request can hold, prompt and output together."""
        return self.shared_tokens + self.prompt_tokens[1] + self.output_tokens[1]


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """One request of a workload. It generates exactly `max_tokens` tokens: end-of-sequence ids are ignored."""

    token_ids: tuple[int, ...]
    max_tokens: int
    temperature: float
    seed: int

    def sampling_params(self) -> SamplingParams:
        """The same request in asyncllm's terms; every filter is off."""
        return SamplingParams(
            temperature=self.temperature,
            top_k=0,
            top_p=1.0,
            min_p=0.0,
            seed=self.seed,
            max_tokens=self.max_tokens,
            ignore_eos=True,
        )


def _profile(*workloads: Workload) -> dict[str, Workload]:
    return {workload.name: workload for workload in workloads}


_SINGLE = Workload(
    name="single", requests=1, concurrency=1, prompt_tokens=(128, 128), output_tokens=(256, 256), temperature=0.0
)

PROFILES: dict[str, dict[str, Workload]] = {
    # one large GPU
    "gpu": _profile(
        _SINGLE,
        Workload(name="decode128", requests=128, concurrency=128, prompt_tokens=(32, 32), output_tokens=(512, 512)),
        Workload(
            name="offline256", requests=256, concurrency=256, prompt_tokens=(100, 1024), output_tokens=(100, 1024)
        ),
        Workload(
            name="shared64",
            requests=192,
            concurrency=64,
            shared_tokens=1500,
            prompt_tokens=(200, 600),
            output_tokens=(100, 900),
        ),
        Workload(name="prefill64", requests=64, concurrency=64, prompt_tokens=(4096, 4096), output_tokens=(16, 16)),
        Workload(name="short1000", requests=1000, concurrency=1000, prompt_tokens=(64, 128), output_tokens=(32, 32)),
    ),
    # the same kinds of load, cut down to a small model on a few cores
    "cpu": _profile(
        _SINGLE,
        Workload(name="batch16", requests=16, concurrency=16, prompt_tokens=(32, 32), output_tokens=(64, 64)),
        Workload(name="mixed32", requests=32, concurrency=32, prompt_tokens=(16, 128), output_tokens=(16, 128)),
        Workload(
            name="shared8",
            requests=24,
            concurrency=8,
            shared_tokens=512,
            prompt_tokens=(32, 64),
            output_tokens=(16, 48),
        ),
        Workload(name="prefill4", requests=4, concurrency=4, prompt_tokens=(1024, 1024), output_tokens=(4, 4)),
    ),
}


def make_requests(workload: Workload, vocab_size: int, seed: int) -> list[WorkloadRequest]:
    """The requests of a workload. Another seed gives other tokens, the shared prefix included."""
    generator = random.Random(f"{workload.name} {seed}")
    shared = generator.choices(range(vocab_size), k=workload.shared_tokens)
    requests = []
    for index in range(workload.requests):
        own = generator.choices(range(vocab_size), k=generator.randint(*workload.prompt_tokens))
        requests.append(
            WorkloadRequest(
                token_ids=(*shared, *own),
                max_tokens=generator.randint(*workload.output_tokens),
                temperature=workload.temperature,
                seed=index,
            )
        )
    return requests


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What one run of a workload took. Times are in seconds."""

    workload: str
    seconds: float  # from the first submission to the last token
    prompt_tokens: int
    cached_tokens: int  # prompt tokens that came from a prefix cache
    outputs: tuple[tuple[int, ...], ...]  # the tokens of each request
    first_token_seconds: tuple[float, ...]  # one a request, from its submission
    gap_seconds: tuple[float, ...]  # between two deliveries to one consumer

    @property
    def output_tokens(self) -> int:
        """How many tokens all requests brought."""
        return sum(map(len, self.outputs))

    @property
    def output_rate(self) -> float:
        """Output tokens a second."""
        return self.output_tokens / self.seconds

    @property
    def input_rate(self) -> float:
        """Prompt tokens a second, cached ones included."""
        return self.prompt_tokens / self.seconds

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that came from a prefix cache."""
        return self.cached_tokens / self.prompt_tokens


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` of all do not exceed; 0 where there are none."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


@dataclass(slots=True)
class Arrivals:
    """What came back for one request, and when."""

    start: float = 0.0
    times: list[float] = field(default_factory=list)  # of each delivery
    tokens: list[int] = field(default_factory=list)
    cached: int = 0  # prompt tokens that came from a prefix cache

    def mark(self, token_ids: Sequence[int]) -> None:
        """Tokens have just been delivered."""
        if token_ids:
            self.times.append(time.perf_counter())
            self.tokens.extend(token_ids)


def summarise(
    workload: Workload, requests: Sequence[WorkloadRequest], arrivals: Sequence[Arrivals], seconds: float
) -> Measurement:
    """The measurement that these arrivals amount to, in the order of the requests.

    Raises RuntimeError where a request brought another number of tokens than it asked for.
    """
    for request, own in zip(requests, arrivals, strict=True):
        if len(own.tokens) != request.max_tokens:
            raise RuntimeError(f"{workload.name}: a request for {request.max_tokens} tokens brought {len(own.tokens)}")
    return Measurement(
        workload=workload.name,
        seconds=seconds,
        prompt_tokens=sum(len(request.token_ids) for request in requests),
        cached_tokens=sum(own.cached for own in arrivals),
        outputs=tuple(tuple(own.tokens) for own in arrivals),
        first_token_seconds=tuple(own.times[0] - own.start for own in arrivals),
        gap_seconds=tuple(b - a for own in arrivals for a, b in pairwise(own.times)),
    )


Consume = Callable[[WorkloadRequest, Arrivals], Awaitable[None]]
"""Runs one request to its end and marks every delivery."""


async def measure(workload: Workload, requests: Sequence[WorkloadRequest], consume: Consume) -> Measurement:
    """Run the requests, `workload.concurrency` at once, each read by a task of its own."""
    room = asyncio.Semaphore(workload.concurrency)
    arrivals = [Arrivals() for _ in requests]

    async def read(request: WorkloadRequest, own: Arrivals) -> None:
        async with room:
            own.start = time.perf_counter()
            await consume(request, own)

    start = time.perf_counter()
    async with asyncio.TaskGroup() as readers:
        for request, own in zip(requests, arrivals, strict=True):
            readers.create_task(read(request, own))
    return summarise(workload, requests, arrivals, time.perf_counter() - start)


async def measure_engine(engine: AsyncEngine, workload: Workload, requests: Sequence[WorkloadRequest]) -> Measurement:
    """`measure` on a started `AsyncEngine`, every token streamed to its consumer."""

    async def consume(request: WorkloadRequest, arrivals: Arrivals) -> None:
        async with engine.stream(request.token_ids, request.sampling_params()) as stream:
            async for delta in stream:
                arrivals.mark(delta.token_ids)
                if delta.usage is not None:
                    arrivals.cached = delta.usage.cached_tokens

    return await measure(workload, requests, consume)


COLUMNS = ("workload", "output tok/s", "input tok/s", "TTFT p50", "TTFT p99", "ITL p50", "ITL p99", "cache hits")


def table_row(measurement: Measurement) -> tuple[str, ...]:
    """The cells of `COLUMNS` for one measurement: rates in tokens a second, times in ms."""
    times = [
        f"{1000 * percentile(values, percent):.1f} ms"
        for values in (measurement.first_token_seconds, measurement.gap_seconds)
        for percent in (50, 99)
    ]
    rates = (f"{measurement.output_rate:,.1f}", f"{measurement.input_rate:,.0f}")
    return (measurement.workload, *rates, *times, f"{measurement.hit_rate:.1%}")
