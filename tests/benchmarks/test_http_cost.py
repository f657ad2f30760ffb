"""The benchmark of what HTTP costs: it runs, and every token goes over the wire on its own."""

from __future__ import annotations

import pytest

from benchmarks.http_cost import event, measure


@pytest.mark.parametrize("shell", ["aiohttp", pytest.param("uvicorn", marks=pytest.mark.full)])
def test_measures_both_handlers(shell: str) -> None:
    costs = measure(shell, streams=4, tokens=16, repeats=1)  # asserts that the events came one by one
    assert set(costs) == {"bare", "asyncllm"}
    assert all(cost > 0 for times in costs.values() for cost in times)


def test_events_are_of_the_same_size() -> None:
    assert 200 < len(event("a")) < 280
