"""The harness, whole: a tiny model, asyncllm beside transformers in processes of their own, table and plot."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from asyncllm.testing.tiny_models import write_tiny_model
from asyncllm.workloads import PROFILES, Workload
from benchmarks import compare
from benchmarks.child import Order, order_from_json
from benchmarks.figures import Sample
from benchmarks.peers import PEERS
from benchmarks.reference import check_runs
from benchmarks.report import comparison_from_json

SMALL = {
    "pair": Workload(name="pair", requests=3, concurrency=2, prompt_tokens=(4, 40), output_tokens=(2, 9)),
    "shared": Workload(
        name="shared", requests=4, concurrency=1, shared_tokens=64, prompt_tokens=(4, 8), output_tokens=(2, 2)
    ),
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random model with room for the workloads above and the harness's own."""
    folder = tmp_path_factory.mktemp("tiny")
    return str(write_tiny_model(folder, config={"max_position_embeddings": 1024}))


@pytest.fixture(scope="module")
def results(tiny: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of one whole run, two passes."""
    folder = tmp_path_factory.mktemp("results")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PROFILES, "small", SMALL)
        arguments = ["--model", tiny, "--profile", "small", "--passes", "2", "--output", str(folder)]
        assert compare.main([*arguments, "--engines", "asyncllm,transformers,no_such_engine"]) == 0
    return folder


def test_every_engine_ran_every_workload(results: Path) -> None:
    comparison = comparison_from_json((results / "small.json").read_text())
    assert [run.engine for run in comparison.runs] == ["asyncllm", "transformers"]
    first, second = ([figures.workload for figures in run.figures] for run in comparison.runs)
    assert first == second == ["pair", "shared"]
    for run in comparison.runs:
        assert run.start_seconds > 0
        assert run.figures[1].prompt_tokens >= 4 * 68
        assert run.figures[1].output_tokens == 8
        assert all(figures.output_rate > 0 and figures.first_token[0] > 0 for figures in run.figures)


def test_cache_is_cold_but_for_what_a_workload_shares(results: Path) -> None:
    (ours, theirs) = comparison_from_json((results / "small.json").read_text()).runs
    assert [figures.cached_tokens for figures in theirs.figures] == [0, 0]
    assert [figures.cached_tokens for figures in ours.figures] == [0, 3 * 64]


def test_check_passed_for_both(results: Path) -> None:
    comparison = comparison_from_json((results / "small.json").read_text())
    assert [(check.engine, check.tokens, check.passed) for check in comparison.checks] == [
        ("asyncllm", 128, True),
        ("transformers", 128, True),
    ]


def test_report_files_are_there(results: Path) -> None:
    assert sorted(path.name for path in results.iterdir()) == ["small.json", "small.md", "small.png"]
    text = (results / "small.md").read_text()
    assert "python -m benchmarks.compare --model" in text
    assert "no_such_engine" in text


def test_check_finds_wrong_tokens(tiny: str, results: Path) -> None:
    (run, _) = comparison_from_json((results / "small.json").read_text()).runs
    wrong = [Sample(prompt=sample.prompt, output=[7] * len(sample.output)) for sample in run.samples]
    (right_check, wrong_check) = check_runs(tiny, [run, replace(run, samples=wrong)])
    assert right_check.equal > 120
    assert wrong_check.equal < 10
    assert wrong_check.worst > right_check.worst


def test_limits_fit_every_workload(tiny: str) -> None:
    workloads = [*PROFILES["gpu"].values()]
    order = Order(engine="vllm", model=tiny, vocab_size=512, workloads=workloads, passes=1, started=0.0, output="none")
    assert order.limits.max_num_seqs == 256
    assert order.limits.max_model_len == 4352  # prefill64, up to the next 256
    assert order_from_json(json.dumps(asdict(order))) == order


def test_every_peer_is_where_the_table_says() -> None:
    for place in PEERS.values():
        module, kind = place.split(":")
        spec = find_spec(module)
        assert spec is not None
        assert spec.origin is not None
        assert f"class {kind}:" in Path(spec.origin).read_text(encoding="utf-8")
