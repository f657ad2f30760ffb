"""The picture of the GPU's results: what is taken from the files, and that it is drawn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.figures import PERCENTS
from benchmarks.gpu import GOALS
from benchmarks.gpu_plots import VLLM, decode_steps, main, median_passes, read_results


def one_pass(workload: str, seconds: float) -> dict[str, Any]:
    times = [0.001 * (percent + 1) for percent in PERCENTS]
    figures = {
        "workload": workload,
        "seconds": seconds,
        "prompt_tokens": 1000,
        "cached_tokens": 0,
        "output_tokens": 100,
        "first_token": times,
        "gap": times,
    }
    return {"figures": figures, "steps": 10}


def step(rows: int, *, causal: bool = False) -> dict[str, Any]:
    def role(name: str, moved: float | None) -> dict[str, Any]:
        return {"role": name, "bytes": moved, "operations": moved, "microseconds": 1.0}

    return {
        "load": {"tokens": float(rows), "context": 300.0 * rows, "causal": causal},
        "period": None if causal else 1000.0 + rows,
        "roles": [role("qkv", 4.45e9), role("attention", 4.45e7 * rows), role("norms", 1e9), role("sampling", None)],
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for model, rates in VLLM.items():
        profiles = {"b": step(32), "a": step(1), "prefill": step(64, causal=True)}
        measured = {"device": "abacus", "passes": [one_pass(name, 1.0) for name in rates], "profiles": profiles}
        (tmp_path / f"gpu-{model}.json").write_text(json.dumps(measured))
    return tmp_path


def test_the_picture_is_drawn_from_the_files_of_a_folder(folder: Path) -> None:
    main([str(folder)])
    assert (folder / "gpu.png").read_bytes().startswith(b"\x89PNG")


def test_steps_are_those_without_prompts_beside_the_bytes_of_products_and_attention(folder: Path) -> None:
    steps = read_results(folder, "qwen3-0.6b").steps
    assert [(each.rows, each.length, each.measured) for each in steps] == [(1, 300.0, 1.001), (32, 300.0, 1.032)]
    assert [each.floor for each in steps] == pytest.approx([1.01, 1.32])  # neither norms nor sampling
    assert decode_steps({"prefill": step(64, causal=True)}) == []


def test_of_several_passes_the_median_counts() -> None:
    passes = [("single", 3.0), ("prefill64", 1.0), ("single", 1.0), ("single", 2.0)]
    found = median_passes([one_pass(workload, seconds) for workload, seconds in passes])
    assert [(each.workload, each.seconds) for each in found] == [("single", 2.0), ("prefill64", 1.0)]


def test_every_rate_of_vllm_has_its_goal() -> None:
    assert {model: set(rates) for model, rates in VLLM.items()} == {model: set(goals) for model, goals in GOALS.items()}
