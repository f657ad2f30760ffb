"""The scheduler on workloads, in virtual time: what its plans would take on a GPU that is not here, in seconds.

    python -m benchmarks.virtual [--model llama-3.1-8b] [--workload shared64] [--mixed-chunk 0 256 512]

The scheduler is the real one, with run-ahead and the prefix cache; a formula says how long each of its steps takes, and
the engine's thread, the consumers and the graphs cost what they cost on an H200. Nothing sleeps, and equal commands
give equal figures. Beside them stand those that were measured there: the formula is worth what it comes near them.
"""

from __future__ import annotations

import argparse
import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count

import numpy as np
import torch

from asyncllm.engine.execution.cuda_executor import SAMPLER_TOKENS
from asyncllm.engine.execution.graph_sizes import first_graph_sizes, graph_sizes, padding_before_capture
from asyncllm.engine.execution.sizes import full_step_tokens, mixed_chunk_tokens
from asyncllm.engine.plan import CacheGroup, RowSampling, StepPlan, StepResult
from asyncllm.engine.scheduling.request import RequestSpec
from asyncllm.engine.scheduling.scheduler import Scheduler
from asyncllm.engine.scheduling.scheduler_config import SchedulerConfig
from asyncllm.workloads import (
    COLUMNS,
    PROFILES,
    Arrivals,
    Measurement,
    Workload,
    WorkloadRequest,
    make_requests,
    percentile,
    summarise,
    table_row,
)

BLOCK = 64
CONFIG = SchedulerConfig(  # that of `benchmarks.gpu`, but for the chunks, which are the model's
    max_num_seqs=256,
    max_batched_tokens=8192,
    mixed_chunk_tokens=256,
    full_step_tokens=1024,
    filled_steps=True,
    block_size=BLOCK,
    num_blocks=256 * 8192 // BLOCK,
    groups=(CacheGroup(),),
    max_model_len=8192,
)
FEW = 8
"""Tokens of a step whose products are our kernels for few rows."""
SAMPLING = RowSampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepModel:
    """How long a step takes. Times in seconds: matrix products, where reading the weights and computing hide each other
    in part; attention of decoding rows, by the positions that they read; that of chunks, by pairs of query and key.
    """

    weight_bytes: int
    fixed: float  # what every step has: gaps, sampling, the attention of a single short row
    many: float  # what a step of many tokens has beside: kernels that are fused where there are few
    weights: float  # the products of one token
    token: float  # the products of each of many tokens
    around: float  # a token's norms, rope and activations
    position: float  # of a decoding row
    shared: float  # of a decoding row, where another has read it for all
    pair: float
    hiding: float = 2.0  # how well reading and computing hide each other: 1 not at all, infinity entirely

    def seconds(self, tokens: int, *, positions: float, shared: float, pairs: float) -> float:
        """Of a step that computes so many tokens, those that fill it up included."""
        reading, computing = self.weights, tokens * self.token
        products = math.pow(math.pow(reading, self.hiding) + math.pow(computing, self.hiding), 1 / self.hiding)
        around = self.fixed + (self.many if tokens > FEW else 0.0) + tokens * self.around
        return products + around + positions * self.position + shared * self.shared + pairs * self.pair


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """What the engine's thread and the consumers take, in seconds."""

    plan: float = 150e-6  # from the end of a step until the next one is launched
    deliver: float = 150e-6
    wake: float = 40e-6  # until the engine's thread knows of the end of a step
    submit: float = 120e-6  # until a request is prepared, one after another; meanwhile nothing else gets on
    queue: float = 400e-6  # from then until the scheduler has it
    capture: float = 60e-3  # of a graph


MODELS = {
    # one row 4.4 ms, 128 rows of 286 tokens 6.3 ms, of which attention 1.5; prefill64 39,900 tokens a second
    "llama-3.1-8b": StepModel(
        weight_bytes=16_060_000_000,
        fixed=0.3e-3,
        many=0.1e-3,
        weights=4.0e-3,
        token=19.6e-6,
        hiding=1.85,
        around=1.2e-6,
        position=36e-9,
        shared=4e-9,
        pair=1.1e-9,
    ),
    # one row 0.7 ms, 128 rows of 328 tokens 2.4 ms, of which attention 1.46; prefill64 305,000
    "qwen3-0.6b": StepModel(
        weight_bytes=1_190_000_000,
        fixed=0.25e-3,
        many=0.4e-3,
        weights=0.45e-3,
        token=1.3e-6,
        around=0.4e-6,
        position=32e-9,
        shared=3e-9,
        pair=0.45e-9,
    ),
}
"""On an H200 in bfloat16."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What an H200 took, without a limit on chunks beside decoding rows: tokens a second (`prefill64`: input), times in
    ms."""

    rate: float
    ttft: tuple[float, float]  # p50, p99
    itl: tuple[float, float]


MEASURED = {
    "llama-3.1-8b": {
        "single": Measured(224.7, (8.8, 8.8), (4.4, 4.9)),
        "decode128": Measured(19_413, (69.5, 126.1), (6.4, 8.2)),
        "offline256": Measured(10_808, (1867.7, 3347.0), (11.8, 183.3)),
        "shared64": Measured(6847, (33.9, 728.5), (6.4, 19.8)),
        "prefill64": Measured(39_905, (3293.5, 6443.9), (198.3, 209.6)),
        "short1000": Measured(9052, (1623.3, 3150.0), (8.7, 185.4)),
    },
    "qwen3-0.6b": {
        "single": Measured(1393, (4.4, 4.4), (0.7, 1.1)),
        "decode128": Measured(52_768, (33.9, 38.2), (2.3, 4.3)),
        "offline256": Measured(28_027, (219.2, 361.1), (5.7, 17.6)),
        "shared64": Measured(17_581, (10.4, 95.6), (2.8, 5.1)),
        "prefill64": Measured(305_383, (419.1, 803.4), (25.1, 26.0)),
        "short1000": Measured(39_598, (411.3, 609.3), (2.5, 21.6)),
    },
}
"""`benchmarks/results/gpu-*.txt`, the second pass where there is one."""


class Graphs:
    """Which size a step is filled up to, as `CudaExecutor` chooses it. Those of the start can filter, which the
    workloads have no use for."""

    def __init__(self, config: SchedulerConfig, weight_bytes: int) -> None:
        self._sizes = graph_sizes(config.max_batched_tokens)
        self._captured = {
            (size, chunks, True)
            for chunks in (True, False)
            for size in first_graph_sizes(config.max_batched_tokens if chunks else config.max_num_seqs, chunks=chunks)
        }
        self._captured.add((1, False, False))
        self._padding = padding_before_capture(weight_bytes)
        self._padding_left: dict[tuple[int, bool], int] = {}
        self.captured = 0

    def size(self, plan: StepPlan) -> int:
        """Captures it where it has been wanted often enough."""
        chunks, fitting = bool(plan.chunks), [size for size in self._sizes if size >= plan.num_tokens]
        best = (fitting[0], chunks)
        if (*best, False) in self._captured:
            return fitting[0]
        left = self._padding_left.setdefault(best, self._padding)
        ready = [
            (size, filters)
            for size in fitting
            for filters in (False, True)
            if (size, chunks, filters) in self._captured
        ]
        if left > 0 and ready:
            size, filters = ready[0]
            self._padding_left[best] = left - (size - plan.num_tokens) - SAMPLER_TOKENS * filters
            return size
        self._captured.add((*best, False))
        self.captured += 1
        return fitting[0]


@dataclass(slots=True)
class Device:
    """Runs steps one after another."""

    model: StepModel
    shared: int  # leading positions that all rows share: read once a step
    rows: int
    free: float = 0.0  # when all that was launched is done
    busy: float = 0.0
    positions: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.positions = np.zeros(self.rows, np.int64)  # what each row's next token attends to

    def run(self, plan: StepPlan, size: int, launched: float) -> float:
        """When the step is done."""
        pairs = 0.0
        for chunk in plan.chunks:
            tokens = len(chunk.token_ids)
            pairs += tokens * (chunk.start + tokens / 2)
            self.positions[chunk.row] = chunk.start + tokens
        rows = plan.decode_rows
        self.positions[rows] += 1
        again = self.shared * max(0, len(rows) - 1)
        read = int(self.positions[rows].sum()) - again
        took = self.model.seconds(size, positions=read, shared=again, pairs=pairs)
        self.free = max(self.free, launched) + took
        self.busy += took
        return self.free


@dataclass(slots=True)
class Run:
    """What came of a workload."""

    measurement: Measurement
    concurrency: int
    steps: int
    captured: int  # graphs
    idle: float  # seconds of the device, from the first launch on

    def cells(self) -> tuple[str, ...]:
        """A row of the table."""
        later = self.measurement.first_token_seconds[self.concurrency :]
        after = f"{1000 * percentile(later, 99):.1f} ms" if later else ""
        return (*table_row(self.measurement), after, str(self.steps), str(self.captured), f"{1000 * self.idle:.0f} ms")


class Engine:
    """A scheduler, a device and consumers. One event after another, in the order of their times."""

    def __init__(
        self, config: SchedulerConfig, model: StepModel, workload: Workload, *, graphs: Graphs, seed: int
    ) -> None:
        self._config = config
        self._workload = workload
        self._host = Host()
        self._graphs = graphs
        self._scheduler = Scheduler(config)
        self._device = Device(model, workload.shared_tokens // BLOCK * BLOCK, config.max_num_seqs)
        self._requests = make_requests(workload, 32_000, seed)
        self._waiting = deque(enumerate(self._requests))
        self._arrivals = [Arrivals() for _ in self._requests]
        self._events: list[tuple[float, int, StepPlan | tuple[int, WorkloadRequest]]] = []
        self._order = count()
        self._in_flight = 0
        self._thread = 0.0  # when the engine's thread is free
        self._submitted = 0.0  # when all submitted requests are prepared
        self._steps = 0

    def run(self) -> Run:
        """All requests, each one's end making room for the next."""
        self._submit(0.0, min(self._workload.concurrency, len(self._requests)))
        end = first = 0.0
        captured = self._graphs.captured
        while self._events:
            time, _, event = heapq.heappop(self._events)
            self._thread = max(self._thread, time)
            if isinstance(event, StepPlan):
                end = self._complete(event)
            else:
                self._add(*event)
                if not self._events or self._events[0][0] > time:
                    self._launch()
                    first = first or self._thread
        measurement = summarise(self._workload, self._requests, self._arrivals, end)
        captured = self._graphs.captured - captured
        idle = self._device.free - first - self._device.busy
        return Run(measurement, self._workload.concurrency, self._steps, captured, idle)

    def _post(self, time: float, event: StepPlan | tuple[int, WorkloadRequest]) -> None:
        heapq.heappush(self._events, (time, next(self._order), event))

    def _submit(self, time: float, requests: int) -> None:
        """Together: the interpreter lock stays with whoever submits."""
        self._submitted = max(self._submitted, time) + requests * self._host.submit
        for _ in range(requests):
            index, request = self._waiting.popleft()
            self._arrivals[index].start = time
            self._post(self._submitted + self._host.queue, (index, request))

    def _add(self, index: int, request: WorkloadRequest) -> None:
        ids = np.array(request.token_ids, np.int32)
        self._scheduler.add(RequestSpec(index, ids, SAMPLING, request.max_tokens, 0, frozenset(), arrival=self._thread))

    def _launch(self) -> None:
        while self._in_flight <= self._config.run_ahead:
            plan = self._scheduler.schedule(self._thread)
            if plan is None:
                return
            captured = self._graphs.captured
            size = self._graphs.size(plan)
            self._thread += self._host.plan
            done = self._device.run(plan, size, self._thread)
            self._thread += self._host.capture * (self._graphs.captured - captured)
            self._post(done + self._host.wake, plan)
            self._in_flight += 1
            self._steps += 1

    def _complete(self, plan: StepPlan) -> float:
        """Returns when its tokens are with the consumers."""
        self._in_flight -= 1
        tokens = self._scheduler.apply(StepResult(plan.step, np.full(plan.num_sampled, 5, np.int32)))
        self._launch()
        self._thread += self._host.deliver
        read = max(self._thread, self._submitted)  # the consumers' loop submits before it reads
        for request, token_id in zip(tokens.requests, tokens.token_ids, strict=True):
            arrivals = self._arrivals[request]
            if not arrivals.times or arrivals.times[-1] < read:  # what is not read yet is merged
                arrivals.times.append(read)
            arrivals.tokens.append(token_id)
        ended = self._scheduler.take_ended()
        for end in ended:
            self._arrivals[end.request].cached = end.cached_tokens
        self._submit(read, min(len(ended), len(self._waiting)))
        self._scheduler.take_released()
        return read


def simulate(model: StepModel, workload: Workload, *, mixed_chunk: int | None = None, passes: int = 1) -> Run:
    """The last of so many passes: graphs that were captured stay."""
    device = torch.device("cuda")
    chunk = mixed_chunk or mixed_chunk_tokens(device, model.weight_bytes)
    config = replace(CONFIG, mixed_chunk_tokens=chunk, full_step_tokens=full_step_tokens(device, model.weight_bytes))
    graphs = Graphs(config, model.weight_bytes)
    runs = [Engine(config, model, workload, graphs=graphs, seed=number).run() for number in range(passes)]
    return runs[-1]


def measured_cells(name: str, measured: Measured) -> Sequence[str]:
    """In the columns of `COLUMNS`."""
    rates = ("", f"{measured.rate:,.0f}") if name == "prefill64" else (f"{measured.rate:,.1f}", "")
    return (f"{name} on an H200", *rates, *(f"{time:.1f} ms" for time in (*measured.ttft, *measured.itl)))


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=MODELS)
    parser.add_argument("--workload", action="append", choices=PROFILES["gpu"])
    parser.add_argument("--mixed-chunk", type=int, nargs="+", help="8192 is as good as none; default: the model's own")
    parser.add_argument("--passes", type=int, default=2, help="the last one is shown")
    chosen = parser.parse_args()
    for model in chosen.model or MODELS:
        print(f"\n{model}\n{' | '.join([*COLUMNS, 'TTFT p99 of later ones', 'steps', 'graphs', 'idle'])}")
        for name in chosen.workload or PROFILES["gpu"]:
            for tokens in chosen.mixed_chunk or (None,):
                run = simulate(MODELS[model], PROFILES["gpu"][name], mixed_chunk=tokens, passes=chosen.passes)
                print(" | ".join([*run.cells(), "" if tokens is None else f"chunks of {tokens}"]))
            print(" | ".join(measured_cells(name, MEASURED[model][name])), flush=True)


if __name__ == "__main__":
    main()
