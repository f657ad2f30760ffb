"""A comparison as a table and a plot: NAME.json, NAME.md and NAME.png.

python -m benchmarks.report benchmarks/results/cpu.json     writes table and plot anew, and the README's part
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, NullFormatter

from benchmarks.figures import PERCENTS, Check, Comparison, Figures, PeerRun, ProductRate, Sample

MEDIAN, P99 = PERCENTS.index(50), PERCENTS.index(99)
README_MARKS = ("<!-- measured: begin -->\n", "<!-- measured: end -->")
ROOT = Path(__file__).parent.parent
COLOURS = ("#1f77b4", "#ff7f0e", "#2ca02c")


def comparison_from_json(text: str) -> Comparison:
    """A comparison that `write_report` stored."""
    plain = json.loads(text)
    plain["runs"] = [
        PeerRun(
            **{
                **run,
                "figures": [Figures(**figures) for figures in run["figures"]],
                "samples": [Sample(**sample) for sample in run["samples"]],
            }
        )
        for run in plain["runs"]
    ]
    plain["checks"] = [Check(**check) for check in plain["checks"]]
    plain["products"] = [ProductRate(**rate) for rate in plain.get("products", [])]
    return Comparison(**plain)


def write_report(comparison: Comparison, folder: Path, name: str) -> list[Path]:
    """Write the three files and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.{suffix}" for suffix in ("json", "md", "png")]
    paths[0].write_text(json.dumps(asdict(comparison), indent=1) + "\n", encoding="utf-8")
    paths[1].write_text(markdown(comparison, plot=paths[2].name), encoding="utf-8")
    draw(comparison, paths[2])
    return paths


def markdown(comparison: Comparison, plot: str) -> str:
    """The table, with all that is needed to judge and to repeat it."""
    lines = [
        f"# {comparison.model}, `{comparison.profile}` workloads",
        "",
        *_table_lines(comparison),
        "",
        f"![output rate, time to first token, time between tokens]({plot})",
        "",
        "Rates are tokens a second over the whole run. TTFT is the time to the first token, ITL the time between two",
        "deliveries to one consumer, p50 / p99 in ms. The last column: prompt tokens from a prefix cache.",
        "",
        "Engines, each in a process of its own, one after the other:",
        "",
        *(
            f"- {run.engine}: {run.description}. From exec to the first token: {run.start_seconds:.1f} s."
            for run in comparison.runs
        ),
        "",
        "Check: greedy tokens of 4 requests, teacher-forced through transformers in float32.",
        "",
        *(_check_line(check) for check in comparison.checks),
        "",
        *_product_lines(comparison),
        *(f"- {key}: {value}" for key, value in comparison.environment.items()),
        f"- date: {comparison.date}; passes: {comparison.passes} (the one with the median rate is shown)",
        f"- command: `{comparison.command}`",
    ]
    return "\n".join(lines) + "\n"


def _check_line(check: Check) -> str:
    verdict = "passed" if check.passed else "FAILED"
    return (
        f"- {check.engine}: {verdict}. {check.equal} of {check.tokens} tokens are the argmax; the worst lies "
        f"{check.worst:.3f} under it (bound {check.bound})."
    )


def _product_lines(comparison: Comparison) -> list[str]:
    """The products alone, and how near the first engine's prompts come to them."""
    if not comparison.products:
        return []
    times = "; ".join(_product_times(each) for each in comparison.products)
    engine = comparison.runs[0].engine
    return [
        "Matrix products of all layers alone in bfloat16, through `torch.nn.functional.linear` (in brackets: with",
        f"weights in oneDNN's own order), the fastest of some rounds: {times}.",
        *_own_product_lines(comparison.products),
        "",
        *(
            f"- {figures.workload}: {engine} computes prompts at {share:.0%} of the rate of the products alone."
            for figures, share in _prefill_shares(comparison)
        ),
        "",
    ]


def _own_product_lines(products: Sequence[ProductRate]) -> list[str]:
    times = [f"{1000 * each.own_seconds:,.1f} ms for {each.rows} rows" for each in products if each.own_seconds]
    if not times:
        return []
    return [
        "The model's own weights alone, head included, in the forms that asyncllm multiplies them in, which no step",
        f"falls below: {'; '.join(times)}.",
    ]


def _product_times(products: ProductRate) -> str:
    blocked = "" if products.blocked_seconds is None else f" ({1000 * products.blocked_seconds:,.1f})"
    return f"{1000 * products.seconds:,.1f}{blocked} ms for {products.rows} rows"


def _prefill_shares(comparison: Comparison) -> list[tuple[Figures, float]]:
    """Of the first engine's workloads that are all prompt: their rate, as a share of the products' alone."""
    if not comparison.products:
        return []
    ceiling, figures = comparison.products[-1].rate, comparison.runs[0].figures
    return [(each, each.input_rate / ceiling) for each in figures if is_prefill(each.workload)]


def _table_lines(comparison: Comparison) -> list[str]:
    base = comparison.runs[-1].engine
    header = ["workload", "engine", "output tok/s", f"× {base}", "input tok/s", "TTFT", "ITL", "cached"]
    rows = [header, ["---", "---", *["---:"] * (len(header) - 2)]]
    for group in zip(*(run.figures for run in comparison.runs), strict=True):
        for run, figures in zip(comparison.runs, group, strict=True):
            rows.append(
                [
                    figures.workload,
                    run.engine,
                    f"{figures.output_rate:,.1f}",
                    f"{figures.output_rate / group[-1].output_rate:.2f}",
                    f"{figures.input_rate:,.0f}",
                    _milliseconds(figures.first_token),
                    _milliseconds(figures.gap),
                    f"{figures.cached_tokens / figures.prompt_tokens:.0%}",
                ]
            )
    return [f"| {' | '.join(row)} |" for row in rows]


def readme_section(comparison: Comparison, results: str) -> str:
    """What the README shows of a comparison whose files are `results`.json, .md and .png."""
    ours, theirs = comparison.runs[0], comparison.runs[-1]
    tokens = sum(check.tokens for check in comparison.checks)
    equal = sum(check.equal for check in comparison.checks)
    processor = comparison.environment["processor"]
    shares = "".join(
        f" {ours.engine} computes the prompts of\n`{figures.workload}` at {share:.0%} of the rate of the model's bf16 "
        "matrix products alone, measured in the same run."
        for figures, share in _prefill_shares(comparison)
    )
    return f"""{comparison.model} on {processor}, one run, each engine in a process of its own:

{_readme_table(comparison)}

![output rate, time to first token and time between tokens of {ours.engine} and {theirs.engine}]({results}.png)

The times are medians, {ours.engine} / {theirs.engine}. Of {tokens} greedy tokens of both, {equal} are a float32 model's
argmax.{shares} Settings and circumstances are in `{results}.md`; `make bench` measures again (`{comparison.command}`).
"""


def write_readme_section(readme: Path, section: str) -> None:
    """Replace what stands between the README's two marks."""
    text = readme.read_text(encoding="utf-8")
    head, rest = text.split(README_MARKS[0], 1)
    _, tail = rest.split(README_MARKS[1], 1)
    readme.write_text(f"{head}{README_MARKS[0]}{section}{README_MARKS[1]}{tail}", encoding="utf-8")


def _readme_table(comparison: Comparison) -> str:
    """The first engine beside the last, one line a workload: rates, and the medians of the two times."""
    ours, theirs = comparison.runs[0], comparison.runs[-1]
    header = ["workload", ours.engine, theirs.engine, "ratio", "time to first token", "time between tokens"]
    rows = [header, ["---", *["---:"] * (len(header) - 1)]]
    for a, b in zip(ours.figures, theirs.figures, strict=True):
        unit = "input tok/s" if is_prefill(a.workload) else "tok/s"
        times = [
            f"{1000 * x[MEDIAN]:,.0f} / {1000 * y[MEDIAN]:,.0f} ms"
            for x, y in ((a.first_token, b.first_token), (a.gap, b.gap))
        ]
        rates = [f"{rate_of(figures):,.0f} {unit}" for figures in (a, b)]
        rows.append([f"`{a.workload}`", *rates, f"{rate_of(a) / rate_of(b):.1f} ×", *times])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _milliseconds(percentiles: Sequence[float]) -> str:
    return f"{1000 * percentiles[MEDIAN]:,.1f} / {1000 * percentiles[P99]:,.1f}"


def draw(comparison: Comparison, path: Path) -> None:
    """Bars of the output rate, or of the input rate where the prompt is the work.

    Boxes (p25 to p75, whiskers p5 to p95) of the two times. All axes are logarithmic.
    """
    names = [figures.workload for figures in comparison.runs[0].figures]
    figure = Figure(figsize=(15, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    rates, first, gap = figure.subplots(1, 3)
    width = 0.8 / len(comparison.runs)
    all_places = bar_places(len(names), len(comparison.runs))
    for run, colour, places in zip(comparison.runs, COLOURS, all_places, strict=False):
        bars = rates.bar(places, [rate_of(figures) for figures in run.figures], width, color=colour)
        rates.bar_label(bars, fmt="{:,.0f}", fontsize=8)
        for axes, percentiles in (
            (first, [figures.first_token for figures in run.figures]),
            (gap, [figures.gap for figures in run.figures]),
        ):
            draw_boxes(axes, percentiles, places, width=width * 0.8, colour=colour)
    for axes, title in (
        (rates, "tokens a second"),
        (first, "time to first token, ms"),
        (gap, "time between tokens, ms"),
    ):
        make_logarithmic(axes)
        axes.set_title(title)
        axes.set_xticks(range(len(names)), names)
    rates.set_xticks(range(len(names)), [f"{name}\n{'input' if is_prefill(name) else 'output'}" for name in names])
    handles = [Patch(color=colour, label=run.engine) for run, colour in zip(comparison.runs, COLOURS, strict=False)]
    rates.legend(handles=handles)
    figure.savefig(path, dpi=110)


def bar_places(groups: int, members: int) -> list[list[float]]:
    """By member of a group, the middles of its bars: groups are 1 apart and fill 0.8 of that."""
    return [[group + 0.8 * ((member + 0.5) / members - 0.5) for group in range(groups)] for member in range(members)]


def draw_boxes(
    axes: Axes, percentiles: Sequence[Sequence[float]], places: Sequence[float], *, width: float, colour: str
) -> None:
    """Times in seconds by `PERCENTS`, drawn in ms: boxes from p25 to p75, a line at the median, whiskers p5 to p95."""
    axes.bxp(
        [_box(values) for values in percentiles],
        positions=places,
        widths=width,
        showfliers=False,
        patch_artist=True,
        boxprops={"facecolor": colour},
        medianprops={"color": "black"},
    )


def make_logarithmic(axes: Axes) -> None:
    """The vertical axis, with plain numbers at 1, 2 and 5 of each decade."""
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(axis="y", alpha=0.3)


def is_prefill(workload: str) -> bool:
    """The prompt is the work, so the input rate counts."""
    return workload.startswith("prefill")


def rate_of(figures: Figures) -> float:
    """Tokens a second: of the output, or of the input where the prompt is the work."""
    return figures.input_rate if is_prefill(figures.workload) else figures.output_rate


def _box(percentiles: Sequence[float]) -> dict[str, float]:
    places = {"whislo": 5, "q1": 25, "med": 50, "q3": 75, "whishi": 95}
    return {key: 1000 * percentiles[PERCENTS.index(percent)] for key, percent in places.items()}


def main(arguments: Sequence[str]) -> None:
    """Write table, plot and the README's part anew from a stored JSON file."""
    path = Path(arguments[0]).resolve()
    comparison = comparison_from_json(path.read_text(encoding="utf-8"))
    write_report(comparison, path.parent, path.stem)
    if path.is_relative_to(ROOT):
        results = path.relative_to(ROOT).with_suffix("").as_posix()
        write_readme_section(ROOT / "README.md", readme_section(comparison, results))


if __name__ == "__main__":
    main(sys.argv[1:])
