"""The report: a table that carries its circumstances, a plot, and JSON that reads back."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from benchmarks.figures import PERCENTS, Check, Comparison, Figures, PeerRun, ProductRate, Sample
from benchmarks.report import (
    README_MARKS,
    bar_places,
    comparison_from_json,
    markdown,
    readme_section,
    write_readme_section,
    write_report,
)


def run(engine: str, rate: float) -> PeerRun:
    figures = [
        Figures(
            workload=name,
            seconds=10.0,
            prompt_tokens=1000,
            cached_tokens=250,
            output_tokens=int(10 * rate),
            first_token=[0.001 * percent + 0.01 for percent in PERCENTS],
            gap=[0.0001 * percent + 0.001 for percent in PERCENTS],
        )
        for name in ("single", "batch")
    ]
    return PeerRun(
        engine=engine,
        description=f"{engine} 1.0",
        start_seconds=2.5,
        figures=figures,
        samples=[Sample(prompt=[1, 2], output=[3])],
    )


COMPARISON = Comparison(
    command="python -m benchmarks.compare --profile cpu",
    date="2026-01-31",
    environment={"processor": "abacus, 2 cores"},
    model="tiny",
    profile="cpu",
    passes=3,
    runs=[run("asyncllm", 40.0), run("transformers", 10.0)],
    checks=[
        Check(engine="asyncllm", tokens=128, equal=127, worst=0.25, bound=1.0),
        Check(engine="transformers", tokens=128, equal=100, worst=1.25, bound=1.0),
    ],
)


def test_table_has_rates_ratios_and_times() -> None:
    text = markdown(COMPARISON, plot="cpu.png")
    assert "| workload | engine | output tok/s | × transformers | input tok/s | TTFT | ITL | cached |" in text
    assert "| single | asyncllm | 40.0 | 4.00 | 100 | 60.0 / 109.0 | 6.0 / 10.9 | 25% |" in text
    assert "| batch | transformers | 10.0 | 1.00 | 100 | 60.0 / 109.0 | 6.0 / 10.9 | 25% |" in text


def test_table_carries_command_machine_start_up_and_check() -> None:
    text = markdown(COMPARISON, plot="cpu.png")
    assert "`python -m benchmarks.compare --profile cpu`" in text
    assert "abacus, 2 cores" in text
    assert "asyncllm 1.0. From exec to the first token: 2.5 s." in text
    assert "- asyncllm: passed. 127 of 128 tokens are the argmax; the worst lies 0.250 under it (bound 1.0)." in text
    assert "- transformers: FAILED." in text
    assert "![output rate, time to first token, time between tokens](cpu.png)" in text


def test_files_are_written_and_read_back(tmp_path: Path) -> None:
    paths = write_report(COMPARISON, tmp_path / "results", "cpu")
    assert [path.name for path in paths] == ["cpu.json", "cpu.md", "cpu.png"]
    assert comparison_from_json(paths[0].read_text()) == COMPARISON
    assert json.loads(paths[0].read_text()) == asdict(COMPARISON)
    assert paths[2].read_bytes().startswith(b"\x89PNG")


def test_readme_section_replaces_the_one_before(tmp_path: Path) -> None:
    section = readme_section(COMPARISON, "results/cpu")
    assert "| `single` | 40 tok/s | 10 tok/s | 4.0 × | 60 / 60 ms | 6 / 6 ms |" in section
    assert "(results/cpu.png)" in section
    assert "abacus, 2 cores" in section
    readme = tmp_path / "README.md"
    readme.write_text("# A\n" + "old\n".join(README_MARKS) + "\n## B\n")
    for _ in range(2):
        write_readme_section(readme, section)
    assert readme.read_text() == f"# A\n{section.join(README_MARKS)}\n## B\n"


def test_report_is_drawn_again_from_json(tmp_path: Path) -> None:
    write_report(COMPARISON, tmp_path, "cpu")
    before = (tmp_path / "cpu.md").read_text()
    (tmp_path / "cpu.md").unlink()
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-m", "benchmarks.report", str(tmp_path / "cpu.json")], cwd=root, check=True)
    assert (tmp_path / "cpu.md").read_text() == before


def test_prompts_are_compared_with_the_products_alone() -> None:
    prefill = replace(COMPARISON.runs[0].figures[0], workload="prefill")  # 100 prompt tokens a second
    products = [
        ProductRate(rows=1, seconds=0.004),
        ProductRate(rows=500, seconds=2.5, blocked_seconds=2.0, own_seconds=1.5),
    ]
    runs = [replace(run, figures=[prefill]) for run in COMPARISON.runs]
    comparison = replace(COMPARISON, runs=runs, products=products)
    assert "4.0 ms for 1 rows; 2,500.0 (2,000.0) ms for 500 rows" in markdown(comparison, plot="cpu.png")
    assert "no step\nfalls below: 1,500.0 ms for 500 rows." in markdown(comparison, plot="cpu.png")
    assert "prefill: asyncllm computes prompts at 50% of the rate" in markdown(comparison, plot="cpu.png")
    assert "`prefill` at 50% of the rate" in readme_section(comparison, "results/cpu")
    assert comparison_from_json(json.dumps(asdict(comparison))) == comparison
    assert "products alone" not in markdown(COMPARISON, plot="cpu.png")


def test_bars_of_a_group_lie_side_by_side_about_its_middle() -> None:
    assert [pytest.approx(places) for places in bar_places(2, 2)] == [[-0.2, 0.8], [0.2, 1.2]]
    assert bar_places(1, 1) == [[0.0]]
