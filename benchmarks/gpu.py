"""One model with random weights on one GPU: all workloads, a check of its tokens, and where a decode step's time goes.

    python -m benchmarks.gpu llama-3.1-8b [--workload single] [--passes 2] [--profile] [--check] [--output FILE]

The model is a folder of `benchmarks/models`. Start-up counts from the start of this process to the first token. Every
pass has tokens of its own, so that the prefix cache is cold but for what a workload itself shares; graphs and kernels
that the engine makes meanwhile are counted. The file is written anew after each workload, each profile and the check.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import triton

from asyncllm import AsyncEngine, EngineConfig
from asyncllm.layers.attention import LayerCache
from asyncllm.layers.parameter import Placement, Slot
from asyncllm.metrics import StepTimes
from asyncllm.models.checkpoint import fill_weights
from asyncllm.models.configuration import ModelConfig
from asyncllm.models.registry import find_architecture, read_model_config
from asyncllm.weights.source import resolve_source
from asyncllm.workloads import (
    COLUMNS,
    PROFILES,
    Workload,
    WorkloadRequest,
    make_requests,
    measure_engine,
    percentile,
    table_row,
)
from benchmarks.child import CHECK, FIRST, settle_heap
from benchmarks.figures import PERCENTS, Check, Figures, Sample
from benchmarks.gpu_power import Power, PowerLog
from benchmarks.lock_releases import PARTS, count_releases
from benchmarks.model_folders import model_folder, model_names
from benchmarks.startup import process_age
from benchmarks.step_profile import DeviceEvent, StepLoad, StepProfile, profile_steps

ROOT = Path(__file__).parent
SETTINGS = EngineConfig(
    device="cuda", load_format="dummy", max_num_seqs=256, max_batched_tokens=8192, max_model_len=8192
)
_LOCK_ROWS = 128
BOUND = 0.5
"""Logits. Those of random weights spread over some 9, so that a wrong token lies about 4 under the largest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One run of a workload. Times of the engine's thread are in microseconds a step."""

    figures: Figures
    later_first_token: float | None  # seconds, p99, of the requests that did not come at once
    steps: int
    thread: dict[str, float]
    graphs_captured: int
    kernels_compiled: int
    power: Power | None = None


@dataclass(slots=True, kw_only=True)
class Report:
    """All that came of a model."""

    command: str
    device: str
    versions: dict[str, str]
    model: str
    start_seconds: float = 0.0
    memory_bytes: dict[str, int] = field(default_factory=dict)
    passes: list[Pass] = field(default_factory=list)
    profiles: dict[str, StepProfile] = field(default_factory=dict)  # by what the steps are
    lock_releases: dict[str, float] = field(default_factory=dict)  # of a decode step, by part of it
    check: Check | None = None

    def write(self, path: Path) -> None:
        """All that is there so far; a run that ends here loses nothing."""
        part = path.with_name(path.name + ".part")
        part.write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")
        part.replace(path)


@dataclass(frozen=True, slots=True)
class Goal:
    """Of a workload: tokens a second (`prefill64`: input), and times in seconds."""

    rate: float
    first_token: float | None = None  # p99
    later_first_token: float | None = None  # p99
    gap: float | None = None  # p99

    def compared(self, found: Pass) -> str:
        """Each goal, and how much of it is reached."""
        figures = found.figures
        rate = figures.input_rate if figures.workload == "prefill64" else figures.output_rate
        parts = [f"{rate / self.rate:.0%} of {self.rate:,.0f} tok/s"]
        p99 = PERCENTS.index(99)
        for name, seconds, most in (
            ("TTFT p99", figures.first_token[p99], self.first_token),
            ("later TTFT p99", found.later_first_token, self.later_first_token),
            ("ITL p99", figures.gap[p99], self.gap),
        ):
            if most is not None and seconds is not None:
                parts.append(f"{name} {1000 * seconds:.1f} of {1000 * most:.0f} ms")
        return "; ".join(parts)


GOALS = {
    "llama-3.1-8b": {
        "single": Goal(256),
        "decode128": Goal(20_500),
        "offline256": Goal(12_600),
        "shared64": Goal(6900, first_token=0.65, later_first_token=0.1, gap=0.015),
        "prefill64": Goal(41_000),
        "short1000": Goal(11_000),
    },
    "qwen3-0.6b": {
        "single": Goal(1500),
        "decode128": Goal(70_000),
        "offline256": Goal(42_000),
        "shared64": Goal(22_000),
        "prefill64": Goal(300_000),
        "short1000": Goal(60_000),
    },
}
"""On an H200 in bfloat16; 1.25 to 2.5 times what vLLM 0.23 reaches there."""


class WorkCount(logging.Handler):
    """Counts the graphs that the engine says it captured, and the kernels that Triton says it made ready."""

    graphs = 0
    kernels = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.graphs += record.getMessage().startswith("captured a graph")

    def listen(self, **_: object) -> None:
        """As Triton calls its listener."""
        self.kernels += 1


@dataclass(frozen=True, slots=True)
class Order:
    """What to measure."""

    workloads: Sequence[Workload]
    passes: int
    rows: Sequence[int]  # of decode steps that are profiled; none: no profile


async def measure_model(folder: Path, order: Order, report: Report, path: Path) -> list[Sample]:
    """Fill in the report, and write it whenever there is more; returns greedy requests and their tokens, to check."""
    work = WorkCount()
    triton.knobs.compilation.listener = work.listen
    logger = logging.getLogger("asyncllm")
    logger.setLevel(logging.DEBUG)
    logger.addHandler(work)
    model_config = read_model_config(resolve_source(str(folder), SETTINGS).config)
    vocab_size = model_config.vocab_size
    async with AsyncEngine(folder, config=SETTINGS) as engine:
        await measure_engine(engine, FIRST, make_requests(FIRST, vocab_size, seed=-1))
        report.start_seconds = process_age()
        report.memory_bytes = dict(engine.statistics().memory_bytes)
        settle_heap()
        print(
            f"start-up {report.start_seconds:.1f} s, {work.graphs} graphs, {work.kernels} kernels; {memory(report)}",
            flush=True,
        )
        columns = [
            *COLUMNS,
            "steps",
            "µs a step: schedule, launch, wait, apply, deliver",
            "graphs",
            "kernels",
            "MHz",
            "W",
        ]
        print(" | ".join(columns), flush=True)
        with PowerLog() as power:
            for number, workload in itertools.product(range(order.passes), order.workloads):
                requests = make_requests(workload, vocab_size, number)
                found = await measure_pass(engine, workload, requests, work, power)
                report.passes.append(found)
                if (goal := GOALS.get(report.model, {}).get(workload.name)) is not None:
                    print(f"  {goal.compared(found)}", flush=True)
                report.write(path)
        requests = make_requests(CHECK, vocab_size, seed=0)
        outputs = (await measure_engine(engine, CHECK, requests)).outputs
        if order.rows:
            await look(0.0)  # its first start takes seconds
            for count in order.rows:
                keep_profile(report, path, f"decode, {count} rows", await profile_decode(engine, model_config, count))
            keep_profile(report, path, "prefill, 4,096 tokens", await profile_prefill(engine, model_config, 4096))
            report.lock_releases = await count_releases(engine, _LOCK_ROWS)
            print("interpreter lock given up, times a step:", report.lock_releases, flush=True)
        report.memory_bytes = dict(engine.statistics().memory_bytes)
        print(memory(report), flush=True)
    return [Sample(prompt=list(r.token_ids), output=list(o)) for r, o in zip(requests, outputs, strict=True)]


async def measure_pass(
    engine: AsyncEngine, workload: Workload, requests: Sequence[WorkloadRequest], work: WorkCount, log: PowerLog
) -> Pass:
    """One workload, printed as soon as it is measured."""
    before, graphs, kernels = engine.statistics().step_times, work.graphs, work.kernels
    start = time.perf_counter()
    measurement = await measure_engine(engine, workload, requests)
    power = log.mean(start, time.perf_counter())
    times = engine.statistics().step_times
    thread = {name: each_step(name, before, times) for name in PARTS}
    later = measurement.first_token_seconds[workload.concurrency :]
    found = Pass(
        figures=Figures.of(measurement),
        later_first_token=percentile(later, 99) if later else None,
        steps=times.steps - before.steps,
        thread=thread,
        graphs_captured=work.graphs - graphs,
        kernels_compiled=work.kernels - kernels,
        power=power,
    )
    cells = [*table_row(measurement), str(found.steps), " ".join(f"{each:.0f}" for each in thread.values())]
    cells += [str(found.graphs_captured), str(found.kernels_compiled)]
    cells += ["-", "-"] if power is None else [f"{power.clock:,.0f}", f"{power.watts:,.0f}"]
    print(" | ".join(cells), flush=True)
    return found


def keep_profile(report: Report, path: Path, name: str, profile: StepProfile) -> None:
    """Print it and write it."""
    report.profiles[name] = profile
    print_profile(name, profile)
    report.write(path)


def memory(report: Report) -> str:
    """Of the engine, by kind."""
    return "memory: " + ", ".join(f"{name} {size / 1e9:.2f} GB" for name, size in report.memory_bytes.items())


def each_step(name: str, before: StepTimes, after: StepTimes) -> float:
    """Microseconds of the engine's thread in one part of a step."""
    seconds: float = getattr(after, f"{name}_seconds") - getattr(before, f"{name}_seconds")
    return 1e6 * seconds / max(1, after.steps - before.steps)


async def profile_decode(engine: AsyncEngine, config: ModelConfig, rows: int) -> StepProfile:
    """Steps of so many rows of some 300 tokens."""
    output = 240 if rows > 64 else 600  # all through what follows, and not much longer
    load = Workload(
        name="profile", requests=rows, concurrency=rows, prompt_tokens=(240, 240), output_tokens=(output, output)
    )
    running = asyncio.create_task(measure_engine(engine, load, make_requests(load, config.vocab_size, seed=-2)))
    before = engine.statistics().tokens_generated
    while engine.statistics().requests_running < rows or generated(engine, before) < 20 * rows:
        await asyncio.sleep(0.005)
        if running.done():
            raise RuntimeError(f"{rows} rows were through before their steps were looked at")
    start, steps = await next_step(engine), engine.statistics().step_times.steps
    await asyncio.sleep(0.15)
    period = 1e6 * (await next_step(engine) - start) / (engine.statistics().step_times.steps - steps)
    length = 240 + generated(engine, before) / rows
    events = await look(0.1)
    await running
    return profile_steps(events, config, StepLoad(tokens=rows, context=rows * length, causal=False), period)


async def next_step(engine: AsyncEngine) -> float:
    """When the next step is over, within a millisecond. Raises `RuntimeError` where none is run."""
    steps = engine.statistics().step_times.steps
    while engine.statistics().step_times.steps == steps:
        if engine.statistics().requests_running == 0:
            raise RuntimeError("no request runs whose next step could be looked at")
        await asyncio.sleep(0.001)
    return time.perf_counter()


def generated(engine: AsyncEngine, before: int) -> int:
    """Tokens since `before`."""
    return engine.statistics().tokens_generated - before


async def profile_prefill(engine: AsyncEngine, config: ModelConfig, length: int) -> StepProfile:
    """Steps of one whole prompt each."""
    load = Workload(name="profile", requests=16, concurrency=1, prompt_tokens=(length, length), output_tokens=(1, 1))
    running = asyncio.create_task(measure_engine(engine, load, make_requests(load, config.vocab_size, seed=-3)))
    before = engine.statistics().tokens_generated
    while generated(engine, before) < 2:  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    events = await look(0.4)
    await running
    return profile_steps(events, config, StepLoad(tokens=length, context=length, causal=True))


async def look(seconds: float) -> list[DeviceEvent]:
    """What the device does meanwhile."""
    from torch.profiler import ProfilerActivity, profile  # noqa: PLC0415  # start-up does without

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        await asyncio.sleep(seconds)
    return [
        DeviceEvent(event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events() or ()
        if event.device_type.name == "CUDA" and event.device_time > 0  # not a call of the host
    ]


def print_profile(name: str, profile: StepProfile) -> None:
    period = "" if profile.period is None else f"a step takes {profile.period:.0f} µs; "
    print(
        f"{name}: {period}profiled, {profile.steps} steps: kernels {profile.busy:.0f} µs, gaps {profile.gaps:.0f} µs, "
        f"between steps {profile.between:.0f} µs"
    )
    if profile.gaps > 100:
        print("  gaps:", ", ".join(f"{gap:.0f} µs ({place})" for place, gap in profile.longest_gaps.items()))
    for role in profile.roles:
        limit = "" if role.limit is None else f"{role.limit / role.microseconds:5.0%} of the limit"
        print(
            f"  {role.microseconds:9.1f} µs {role.launches:6.1f} x {role.role:20} {limit:20} {role.kernels[0][:60]}",
            flush=True,
        )


def check_tokens(folder: Path, samples: Sequence[Sample]) -> Check:
    """Teacher-force the tokens through transformers' model, in float32, with the same random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415  # start-up does without

    source = resolve_source(str(folder), SETTINGS)
    config = read_model_config(source.config)
    caches = [LayerCache(0, 0)] * config.num_layers
    model = find_architecture(source.config).model(config, caches, 1, Placement(torch.bfloat16, torch.device("cuda")))
    fill_weights(model)
    with torch.device("cuda"), torch.inference_mode():
        reference = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]  # transformers leaves it untyped
            AutoConfig.from_pretrained(folder), dtype=torch.float32
        )
        parameters = dict(reference.named_parameters())
        for name, slot in model.slots():
            assert isinstance(slot, Slot)
            parameters[name].copy_(slot.target)
        gaps: list[float] = []
        for sample in samples:
            logits = reference(torch.tensor([[*sample.prompt, *sample.output]])).logits[0, len(sample.prompt) - 1 : -1]
            chosen = logits.gather(1, torch.tensor(sample.output)[:, None])[:, 0]
            gaps += (logits.max(dim=1).values - chosen).tolist()
    return Check(engine="asyncllm", tokens=len(gaps), equal=gaps.count(0.0), worst=max(gaps), bound=BOUND)


def main() -> int:
    """Measure, check, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("model", choices=model_names())
    parser.add_argument("--workload", action="append", choices=PROFILES["gpu"])
    parser.add_argument("--passes", type=int, default=1)
    parser.add_argument("--profile", action="store_true", help="see where decode steps and a prefill spend their time")
    parser.add_argument(
        "--rows", type=int, nargs="+", default=(1, 8, 32, 64, 128, 256), help="of the profiled decode steps"
    )
    parser.add_argument("--check", action="store_true", help="teacher-force four requests through a float32 model")
    parser.add_argument("--output", type=Path, help="default: benchmarks/results/gpu-MODEL.json")
    chosen = parser.parse_args()
    folder = model_folder(chosen.model)
    report = Report(
        command=" ".join(["python -m benchmarks.gpu", *sys.argv[1:]]),
        device=torch.cuda.get_device_name(),
        versions={"torch": torch.__version__, "cuda": torch.version.cuda or "", "python": sys.version.split()[0]},
        model=chosen.model,
    )
    workloads = [PROFILES["gpu"][name] for name in chosen.workload or PROFILES["gpu"]]
    order = Order(workloads, chosen.passes, chosen.rows if chosen.profile else ())
    path = chosen.output or ROOT / "results" / f"gpu-{chosen.model}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    samples = asyncio.run(measure_model(folder, order, report, path))
    if chosen.check:
        report.check = check_tokens(folder, samples)
        print(f"check: {report.check}", flush=True)
    report.write(path)
    return 0 if report.check is None or report.check.passed else 1


if __name__ == "__main__":
    sys.exit(main())
