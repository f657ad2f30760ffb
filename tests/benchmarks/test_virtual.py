from __future__ import annotations

import pytest

from asyncllm.workloads import PROFILES, percentile
from benchmarks.virtual import MEASURED, MODELS, Run, simulate

LLAMA = "llama-3.1-8b"
WITHOUT = 8192
"""A chunk so large that nothing is limited: the scheduler that the H200 was measured with."""


def run(workload: str, mixed_chunk: int | None = None, model: str = LLAMA) -> Run:
    return simulate(MODELS[model], PROFILES["gpu"][workload], mixed_chunk=mixed_chunk)


def rate(found: Run) -> float:
    prefill = found.measurement.workload == "prefill64"
    return found.measurement.input_rate if prefill else found.measurement.output_rate


@pytest.mark.parametrize("workload", PROFILES["gpu"])
def test_comes_near_what_was_measured(workload: str) -> None:
    measured, found = MEASURED[LLAMA][workload], run(workload, WITHOUT)
    assert rate(found) == pytest.approx(measured.rate, rel=0.16)
    assert percentile(found.measurement.gap_seconds, 50) == pytest.approx(measured.itl[0] / 1000, rel=0.16)
    if workload == "shared64":
        assert percentile(found.measurement.gap_seconds, 99) == pytest.approx(measured.itl[1] / 1000, rel=0.1)
        assert percentile(found.measurement.first_token_seconds, 99) == pytest.approx(measured.ttft[1] / 1000, rel=0.1)


def test_prompts_that_come_alone_hold_nobody_up() -> None:
    found, without = run("shared64"), run("shared64", WITHOUT)
    assert percentile(found.measurement.gap_seconds, 99) < 0.015 < percentile(without.measurement.gap_seconds, 99)
    assert percentile(found.measurement.first_token_seconds[found.concurrency :], 99) < 0.1
    assert rate(found) > rate(without)
    most = percentile(without.measurement.first_token_seconds, 99)  # of the opening burst
    assert percentile(found.measurement.first_token_seconds, 99) < 1.01 * most


@pytest.mark.parametrize("workload", ["offline256", "prefill64", "short1000"])
@pytest.mark.parametrize("model", MODELS)
def test_a_burst_loses_nothing(model: str, workload: str) -> None:
    assert rate(run(workload, model=model)) > 0.995 * rate(run(workload, WITHOUT, model))


def test_who_waits_for_a_row_does_not_come_in_waves() -> None:
    found, without = run("short1000"), run("short1000", WITHOUT)
    gaps, wide = (percentile(each.measurement.gap_seconds, 99) for each in (found, without))
    assert gaps < 0.05
    assert wide > 3 * gaps
    assert rate(found) > 1.01 * rate(without)


def test_equal_commands_give_equal_figures() -> None:
    assert run("decode128") == run("decode128")
