"""The workloads are data from a seed, and a measurement counts what a consumer saw."""

from __future__ import annotations

import asyncio

import pytest

from asyncllm.workloads import (
    COLUMNS,
    PROFILES,
    Arrivals,
    Workload,
    WorkloadRequest,
    make_requests,
    measure,
    percentile,
    summarise,
    table_row,
)

WORKLOADS = [workload for profile in PROFILES.values() for workload in profile.values()]


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.name)
def test_requests_are_a_function_of_the_seed(workload: Workload) -> None:
    requests = make_requests(workload, 1000, seed=1)
    assert requests == make_requests(workload, 1000, seed=1)
    assert len(requests) == workload.requests
    low, high = (workload.shared_tokens + tokens for tokens in workload.prompt_tokens)
    assert all(low <= len(request.token_ids) <= high for request in requests)
    assert all(workload.output_tokens[0] <= request.max_tokens <= workload.output_tokens[1] for request in requests)
    assert all(len(request.token_ids) + request.max_tokens <= workload.longest for request in requests)
    assert all(0 <= token_id < 1000 for request in requests for token_id in request.token_ids)


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.name)
def test_prompts_share_only_what_the_workload_shares(workload: Workload) -> None:
    first, second = (make_requests(workload, 49152, seed) for seed in (0, 1))
    beginnings = {request.token_ids[: workload.shared_tokens] for request in first}
    assert len(beginnings) == 1
    # 16 tokens: the least block that a prefix cache could keep
    own = {request.token_ids[workload.shared_tokens :][:16] for request in first}
    assert len(own) == workload.requests
    assert own.isdisjoint(request.token_ids[workload.shared_tokens :][:16] for request in second)
    assert first[0].token_ids[:16] != second[0].token_ids[:16]


def test_requests_differ_between_workloads_of_one_shape() -> None:
    shape = {"requests": 1, "concurrency": 1, "prompt_tokens": (32, 32), "output_tokens": (1, 1)}
    a, b = (make_requests(Workload(name=name, **shape), 49152, seed=0) for name in "ab")  # type: ignore[arg-type]
    assert a[0].token_ids != b[0].token_ids


def test_request_switches_off_every_filter_and_end() -> None:
    params = WorkloadRequest(token_ids=(1,), max_tokens=5, temperature=1.0, seed=3).sampling_params()
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (1.0, 0, 1.0, 0.0)
    assert (params.seed, params.max_tokens, params.ignore_eos) == (3, 5, True)


@pytest.mark.parametrize(
    ("percent", "expected"), [(0, 1.0), (1, 1.0), (50, 2.0), (75, 3.0), (76, 4.0), (99, 4.0), (100, 4.0)]
)
def test_percentile_is_the_nearest_rank(percent: float, expected: float) -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], percent) == expected
    assert percentile([], percent) == 0.0


WORKLOAD = Workload(name="w", requests=5, concurrency=2, prompt_tokens=(4, 4), output_tokens=(3, 3))


async def test_measure_keeps_the_concurrency_and_every_token() -> None:
    running = highest = 0

    async def consume(request: WorkloadRequest, arrivals: Arrivals) -> None:
        nonlocal running, highest
        running += 1
        highest = max(highest, running)
        arrivals.mark((7,))
        await asyncio.sleep(0.01)
        arrivals.mark(())  # nothing new, no delivery
        arrivals.mark((8, 9))
        arrivals.cached = 1
        running -= 1

    measurement = await measure(WORKLOAD, make_requests(WORKLOAD, 100, seed=0), consume)
    assert highest == 2
    assert measurement.outputs == ((7, 8, 9),) * 5
    assert (measurement.prompt_tokens, measurement.cached_tokens, measurement.hit_rate) == (20, 5, 0.25)
    assert len(measurement.first_token_seconds) == len(measurement.gap_seconds) == 5
    assert all(gap >= 0.009 for gap in measurement.gap_seconds)
    assert measurement.seconds >= 0.029
    assert measurement.output_rate == 15 / measurement.seconds
    assert measurement.input_rate == 20 / measurement.seconds


async def test_measure_refuses_a_short_answer() -> None:
    async def consume(request: WorkloadRequest, arrivals: Arrivals) -> None:
        arrivals.mark((1, 2))

    with pytest.raises(RuntimeError, match="w: a request for 3 tokens brought 2"):
        await measure(WORKLOAD, make_requests(WORKLOAD, 100, seed=0), consume)


def test_table_row_has_a_cell_for_each_column() -> None:
    requests = make_requests(WORKLOAD, 100, seed=0)
    arrivals = [Arrivals(start=1.0, times=[1.5, 1.6, 1.8], tokens=[1, 2, 3]) for _ in requests]
    row = table_row(summarise(WORKLOAD, requests, arrivals, seconds=2.0))
    assert dict(zip(COLUMNS, row, strict=True)) == {
        "workload": "w",
        "output tok/s": "7.5",
        "input tok/s": "10",
        "TTFT p50": "500.0 ms",
        "TTFT p99": "500.0 ms",
        "ITL p50": "100.0 ms",
        "ITL p99": "200.0 ms",
        "cache hits": "0.0%",
    }
