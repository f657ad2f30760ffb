"""What `benchmarks.gpu` measured, as one picture: rates beside vLLM's, step times beside their floor, latencies.

    python -m benchmarks.gpu_plots [FOLDER]

Reads gpu-MODEL.json (all workloads and, of `--profile`, decode steps) of each model of `VLLM` in the folder, which is
`benchmarks/results` unless told, and writes gpu.png there.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import NullLocator

from benchmarks.figures import Figures
from benchmarks.gpu import GOALS
from benchmarks.report import COLOURS, P99, bar_places, draw_boxes, is_prefill, make_logarithmic, rate_of
from benchmarks.step_profile import BANDWIDTH

RESULTS = Path(__file__).parent / "results"
VLLM = {
    "llama-3.1-8b": {
        "single": 206.0,
        "decode128": 16_457.0,
        "offline256": 10_088.0,
        "shared64": 5547.0,
        "prefill64": 39_200.0,
        "short1000": 9257.0,
    },
    "qwen3-0.6b": {
        "single": 607.0,
        "decode128": 34_950.0,  # the middle of 34,400 to 35,500
        "offline256": 23_600.0,
        "shared64": 11_050.0,
        "prefill64": 272_000.0,
        "short1000": 32_500.0,
    },
}
"""Tokens a second (`prefill64`: input) of vLLM 0.23.0 on the same workloads, with random weights in bfloat16.

They are from a run of its own on one H200, another than asyncllm's run: AsyncLLM in the consumers' process,
FlashAttention 3, CUDA graphs and torch.compile on, `max_num_seqs=256`, `max_num_batched_tokens=8192`,
`max_model_len=8192`, no statistics logging; torch 2.11.0+cu130, Triton 3.6.0.
"""
_READERS = ("qkv", "attention", "attention output", "gate and up", "down", "head")  # of weights and of the KV cache


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeStep:
    """A step of so many rows, in milliseconds."""

    rows: int
    length: float  # tokens of a row, on average
    measured: float  # while no profiler looks
    floor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelResults:
    """What is drawn of a model."""

    model: str
    device: str
    figures: Sequence[Figures]  # one a workload
    steps: Sequence[DecodeStep]  # by rising number of rows


def read_results(folder: Path, model: str) -> ModelResults:
    """From the model's file."""
    measured = json.loads((folder / f"gpu-{model}.json").read_text(encoding="utf-8"))
    return ModelResults(
        model=model,
        device=measured["device"],
        figures=median_passes(measured["passes"]),
        steps=decode_steps(measured["profiles"]),
    )


def median_passes(passes: Sequence[Mapping[str, Any]]) -> list[Figures]:
    """Of each workload the pass with the median rate."""
    by_workload: dict[str, list[Figures]] = defaultdict(list)
    for each in passes:
        figures = Figures(**each["figures"])
        by_workload[figures.workload].append(figures)
    return [sorted(each, key=rate_of)[len(each) // 2] for each in by_workload.values()]


def decode_steps(profiles: Mapping[str, Mapping[str, Any]]) -> list[DecodeStep]:
    """The profiled steps without prompts."""
    steps = [
        DecodeStep(
            rows=round(profile["load"]["tokens"]),
            length=profile["load"]["context"] / profile["load"]["tokens"],
            measured=profile["period"] / 1000,
            floor=floor(profile["roles"]),
        )
        for profile in profiles.values()
        if not profile["load"]["causal"]
    ]
    return sorted(steps, key=lambda step: step.rows)


def floor(roles: Sequence[Mapping[str, Any]]) -> float:
    """Milliseconds that the bytes take which products and attention must move, at the rate measured of the hardware.

    These are each weight and each position of the KV cache once, and the products' rows, some percent at 256 of them.
    Operations hide under that: at 256 rows of Llama-3.1-8B they take 4.9 ms, the bytes 5.7.
    """
    moved: float = sum(role["bytes"] for role in roles if role["role"] in _READERS)
    return 1000 * moved / BANDWIDTH


def draw(results: Sequence[ModelResults], path: Path) -> None:
    """Write the picture: one colour a model, the same in all four panels."""
    figure = Figure(figsize=(10, 7.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplot_mosaic("RRRRSS;FFFGGG")
    draw_rates(panels["R"], results)
    draw_steps(panels["S"], results)
    draw_times(panels["F"], [[each.first_token for each in result.figures] for result in results])
    draw_times(panels["G"], [[each.gap for each in result.figures] for result in results])
    panels["F"].set_title("time to first token (TTFT)")
    panels["G"].set_title("time between tokens (ITL)")
    for panel in "FG":
        names = [figures.workload for figures in results[0].figures]
        panels[panel].set_xticks(range(len(names)), names, rotation=20)
    models = [Patch(color=colour, label=result.model) for result, colour in zip(results, COLOURS, strict=False)]
    figure.legend(handles=models, loc="outside upper center", ncols=len(models), title=results[0].device)
    marks = [
        Patch(facecolor="lightgrey", edgecolor="black", label="p25, p50, p75 (box), p5 and p95 (whiskers)"),
        Line2D([], [], color="black", marker="x", linestyle="none", label="p99"),
    ]
    figure.legend(handles=marks, loc="outside lower center", ncols=len(marks))
    figure.savefig(path, dpi=150)


def draw_rates(axes: Axes, results: Sequence[ModelResults]) -> None:
    """Bars of the rate over vLLM's, a short line at each goal."""
    names = [figures.workload for figures in results[0].figures]
    width = 0.8 / len(results)
    for result, colour, places in zip(results, COLOURS, bar_places(len(names), len(results)), strict=False):
        theirs = [VLLM[result.model][name] for name in names]
        ratios = [rate_of(each) / rate for each, rate in zip(result.figures, theirs, strict=True)]
        axes.bar(places, ratios, width, color=colour)
        for place, ratio in zip(places, ratios, strict=True):
            axes.annotate(f"{ratio:.2f}", (place, 0), (0, 4), textcoords="offset points", ha="center")
        goals = [GOALS[result.model][name].rate / rate for name, rate in zip(names, theirs, strict=True)]
        left, right = ([place + side * width / 2 for place in places] for side in (-0.9, 0.9))
        goal = axes.hlines(goals, left, right, color="black", linewidth=2, label="goal")
    even = axes.axhline(1.0, color="black", linewidth=1, linestyle="--", label="vLLM")
    axes.legend(handles=[goal, even])
    axes.set_xticks(range(len(names)), [f"{name}\n{'input' if is_prefill(name) else 'output'}" for name in names])
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    axes.set_title("tokens a second, over vLLM 0.23's")
    axes.set_ylabel("ratio")


def draw_steps(axes: Axes, results: Sequence[ModelResults]) -> None:
    """Step time by rows, solid, and its floor, dashed."""
    for result, colour in zip(results, COLOURS, strict=False):
        rows = [step.rows for step in result.steps]
        measured = [step.measured for step in result.steps]
        axes.plot(rows, measured, color=colour, marker="o")
        axes.plot(rows, [step.floor for step in result.steps], color=colour, marker=".", linestyle="--")
        for row, time in zip(rows, measured, strict=True):
            axes.annotate(f"{time:.2g}", (row, time), (0, 6), textcoords="offset points", ha="center")
    axes.set_xscale("log", base=2)
    axes.set_xticks(rows, [str(row) for row in rows], fontsize="small")
    axes.xaxis.set_minor_locator(NullLocator())
    make_logarithmic(axes)
    axes.margins(x=0.15, y=0.1)
    axes.set_ylim(top=3 * axes.get_ylim()[1])  # room for the legend
    bound = f"floor: weights and KV\nat {BANDWIDTH / 1e12:.2f} TB/s"
    axes.legend(
        handles=[
            Line2D([], [], color="black", marker="o", label="measured"),
            Line2D([], [], color="black", marker=".", linestyle="--", label=bound),
        ],
        loc="upper left",
        fontsize="small",
    )
    axes.set_title("time of a decode step")
    lengths = [step.length for result in results for step in result.steps]
    axes.set_xlabel(f"rows, of {min(lengths):.0f} to {max(lengths):.0f} tokens")
    axes.set_ylabel("ms")


def draw_times(axes: Axes, percentiles: Sequence[Sequence[Sequence[float]]]) -> None:
    """Boxes by model and workload, a mark at p99; seconds by `PERCENTS`, drawn in ms."""
    places = bar_places(len(percentiles[0]), len(percentiles))
    for times, colour, centres in zip(percentiles, COLOURS, places, strict=False):
        draw_boxes(axes, times, centres, width=0.64 / len(percentiles), colour=colour)
        axes.plot(centres, [1000 * each[P99] for each in times], "x", color="black", markersize=5)
    make_logarithmic(axes)
    axes.set_ylabel("ms")


def main(arguments: Sequence[str]) -> None:
    """Draw the picture anew."""
    folder = Path(arguments[0]) if arguments else RESULTS
    draw([read_results(folder, model) for model in VLLM], folder / "gpu.png")


if __name__ == "__main__":
    main(sys.argv[1:])
