"""One model with random weights on one GPU: all workloads, a check of its tokens, and where a decode step's time goes.

    python -m benchmarks.gpu llama-3.1-8b [--workload single] [--passes 2] [--profile] [--check] [--output FILE]

The model is a folder of `benchmarks/models`. Start-up counts from the start of this process to the first token. Every
pass has tokens of its own, so that the prefix cache is cold but for what a workload itself shares; graphs that the
engine captures meanwhile are counted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from asyncllm import AsyncEngine, EngineConfig
from asyncllm.layers.attention import LayerCache
from asyncllm.layers.parameter import Placement, Slot
from asyncllm.metrics import StepTimes
from asyncllm.models.checkpoint import fill_weights
from asyncllm.models.configuration import ModelConfig
from asyncllm.models.registry import find_architecture, read_model_config
from asyncllm.weights.source import resolve_source
from asyncllm.workloads import COLUMNS, PROFILES, Workload, make_requests, measure_engine, table_row
from benchmarks.child import CHECK, FIRST
from benchmarks.figures import Check, Figures, Sample
from benchmarks.startup import process_age
from benchmarks.step_profile import DeviceEvent, StepLoad, StepProfile, profile_steps

ROOT = Path(__file__).parent
SETTINGS = EngineConfig(
    device="cuda", load_format="dummy", max_num_seqs=256, max_batched_tokens=8192, max_model_len=8192
)
BOUND = 0.5
"""Logits. Those of random weights spread over some 9, so that a wrong token lies about 4 under the largest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One run of a workload. Times of the engine's thread are in microseconds a step."""

    figures: Figures
    steps: int
    thread: dict[str, float]
    graphs_captured: int


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
    check: Check | None = None


class CaptureCount(logging.Handler):
    """Counts the graphs that the engine says it captured."""

    count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.count += record.getMessage().startswith("captured a graph")


async def measure_model(
    folder: Path, workloads: Sequence[Workload], passes: int, rows: Sequence[int], report: Report
) -> list[Sample]:
    """Fill in the report; returns greedy requests and their tokens, for the check."""
    captures = CaptureCount()
    logger = logging.getLogger("asyncllm")
    logger.setLevel(logging.DEBUG)
    logger.addHandler(captures)
    model_config = read_model_config(resolve_source(str(folder), SETTINGS).config)
    vocab_size = model_config.vocab_size
    async with AsyncEngine(folder, config=SETTINGS) as engine:
        await measure_engine(engine, FIRST, make_requests(FIRST, vocab_size, seed=-1))
        report.start_seconds = process_age()
        print(f"start-up {report.start_seconds:.1f} s, {captures.count} graphs", flush=True)
        print(" | ".join([*COLUMNS, "steps", "µs a step: schedule, launch, wait, apply, deliver", "graphs"]))
        for number in range(passes):
            for workload in workloads:
                before, captured = engine.statistics().step_times, captures.count
                measurement = await measure_engine(engine, workload, make_requests(workload, vocab_size, seed=number))
                times = engine.statistics().step_times
                steps = times.steps - before.steps
                thread = {
                    name: each_step(name, before, times) for name in ("schedule", "launch", "wait", "apply", "deliver")
                }
                report.passes.append(
                    Pass(
                        figures=Figures.of(measurement),
                        steps=steps,
                        thread=thread,
                        graphs_captured=captures.count - captured,
                    )
                )
                cells = [*table_row(measurement), str(steps), " ".join(f"{each:.0f}" for each in thread.values())]
                print(" | ".join([*cells, str(captures.count - captured)]), flush=True)
        if rows:
            await look(0.0)  # its first start takes seconds
        for count in rows:
            report.profiles[f"decode, {count} rows"] = await profile_decode(engine, model_config, count)
        if rows:
            report.profiles["prefill, 4,096 tokens"] = await profile_prefill(engine, model_config, 4096)
        for name, profile in report.profiles.items():
            print_profile(name, profile)
        requests = make_requests(CHECK, vocab_size, seed=0)
        outputs = (await measure_engine(engine, CHECK, requests)).outputs
        report.memory_bytes = dict(engine.statistics().memory_bytes)
    return [Sample(prompt=list(r.token_ids), output=list(o)) for r, o in zip(requests, outputs, strict=True)]


def each_step(name: str, before: StepTimes, after: StepTimes) -> float:
    """Microseconds of the engine's thread in one part of a step."""
    seconds: float = getattr(after, f"{name}_seconds") - getattr(before, f"{name}_seconds")
    return 1e6 * seconds / max(1, after.steps - before.steps)


async def profile_decode(engine: AsyncEngine, config: ModelConfig, rows: int) -> StepProfile:
    """Steps of so many rows of some 300 tokens."""
    output = 160 if rows > 8 else 600
    load = Workload(
        name="profile", requests=rows, concurrency=rows, prompt_tokens=(240, 240), output_tokens=(output, output)
    )
    running = asyncio.create_task(measure_engine(engine, load, make_requests(load, config.vocab_size, seed=-2)))
    before = engine.statistics().tokens_generated
    while engine.statistics().requests_running < rows or generated(engine, before) < 20 * rows:  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    start, steps = await next_step(engine), engine.statistics().step_times.steps
    await asyncio.sleep(0.15)
    period = 1e6 * (await next_step(engine) - start) / (engine.statistics().step_times.steps - steps)
    length = 240 + generated(engine, before) / rows
    events = await look(0.1)
    await running
    return profile_steps(events, config, StepLoad(tokens=rows, context=rows * length, causal=False), period)


async def next_step(engine: AsyncEngine) -> float:
    """When the next step is over, within a millisecond."""
    steps = engine.statistics().step_times.steps
    while engine.statistics().step_times.steps == steps:  # noqa: ASYNC110
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
        print(f"  {role.microseconds:9.1f} µs {role.launches:6.1f} x {role.role:20} {limit:20} {role.kernels[0][:60]}")


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
    parser.add_argument("model", choices=sorted(path.name for path in (ROOT / "models").iterdir()))
    parser.add_argument("--workload", action="append", choices=PROFILES["gpu"])
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--profile", action="store_true", help="see where decode steps and a prefill spend their time")
    parser.add_argument("--rows", type=int, nargs="+", default=(1, 32, 128, 256), help="of the profiled decode steps")
    parser.add_argument("--check", action="store_true", help="teacher-force four requests through a float32 model")
    parser.add_argument("--output", type=Path, help="default: benchmarks/results/gpu-MODEL.json")
    chosen = parser.parse_args()
    folder = ROOT / "models" / chosen.model
    report = Report(
        command=" ".join(["python -m benchmarks.gpu", *sys.argv[1:]]),
        device=torch.cuda.get_device_name(),
        versions={"torch": torch.__version__, "cuda": torch.version.cuda or "", "python": sys.version.split()[0]},
        model=chosen.model,
    )
    workloads = [PROFILES["gpu"][name] for name in chosen.workload or PROFILES["gpu"]]
    rows = chosen.rows if chosen.profile else ()
    samples = asyncio.run(measure_model(folder, workloads, chosen.passes, rows, report))
    print("memory:", ", ".join(f"{name} {size / 1e9:.2f} GB" for name, size in report.memory_bytes.items()))
    if chosen.check:
        report.check = check_tokens(folder, samples)
        print(f"check: {report.check}", flush=True)
    path = chosen.output or ROOT / "results" / f"gpu-{chosen.model}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(asdict(report), indent=1), encoding="utf-8")
    return 0 if report.check is None or report.check.passed else 1


if __name__ == "__main__":
    sys.exit(main())
