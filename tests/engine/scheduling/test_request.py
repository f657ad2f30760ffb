from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from asyncllm.engine.scheduling.request import RequestSpec
from tests.engine.scheduling.specs import make_request, make_spec


@given(prompt=st.lists(st.integers(0, 99), min_size=1, max_size=9), output=st.lists(st.integers(0, 99)), data=st.data())
def test_tokens_are_a_slice_of_prompt_and_output(prompt: list[int], output: list[int], data: st.DataObject) -> None:
    request = make_request(prompt)
    request.output.extend(output)
    assert request.known == len(prompt) + len(output)
    start = data.draw(st.integers(0, request.known))
    end = data.draw(st.integers(start, request.known))
    tokens = request.tokens(start, end)
    assert tokens.dtype == np.int32
    assert tokens.tolist() == [*prompt, *output][start:end]
    assert not np.shares_memory(tokens, request.spec.token_ids)


@pytest.mark.parametrize(
    "tokens", [np.zeros(0, np.int32), np.zeros(3, np.int64), np.zeros((1, 3), np.int32)], ids=["empty", "int64", "2-d"]
)
def test_misshapen_prompt_is_refused(tokens: NDArray[Any]) -> None:
    with pytest.raises(ValueError, match="token_ids must be"):
        replace(make_spec(), token_ids=tokens)


def test_nothing_to_generate_is_refused() -> None:
    with pytest.raises(ValueError, match="max_tokens must be"):
        make_spec(max_tokens=0)


def order(spec: RequestSpec) -> tuple[int, float, float, int]:
    return spec.order(ageing_seconds=10.0)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"priority": 0}, {"priority": 1}),
        ({"priority": 0, "deadline": 5.0}, {"priority": 0}),
        ({"deadline": 5.0, "arrival": 1.0}, {"deadline": 6.0, "arrival": 0.0}),
        ({"arrival": 1.0}, {"arrival": 2.0}),
        ({"request": 1}, {"request": 2}),
        ({"priority": 1, "arrival": 0.0}, {"priority": 0, "arrival": 20.0}),  # waited two levels longer
        ({"priority": 0, "arrival": 19.0}, {"priority": 1, "arrival": 10.0}),  # has not
        ({"arrival": 0.0}, {"arrival": 10.0, "deadline": 11.0}),
    ],
)
def test_order(before: dict[str, float], after: dict[str, float]) -> None:
    assert order(make_spec(**{"request": 7, **before})) < order(make_spec(**{"request": 8, **after}))


@given(
    priorities=st.tuples(st.integers(-3, 3), st.integers(-3, 3)),
    arrivals=st.tuples(st.floats(0, 1e6), st.floats(0, 1e6)),
)
def test_nobody_is_passed_for_ever(priorities: tuple[int, int], arrivals: tuple[float, float]) -> None:
    """A request is before all that arrive later than its priority is worth, whatever theirs."""
    early, late = (
        make_spec(request=i, priority=priority, arrival=arrival)
        for i, (arrival, priority) in enumerate(zip(sorted(arrivals), priorities, strict=True))
    )
    levels = early.priority - late.priority
    if math.floor(late.arrival / 10.0) - math.floor(early.arrival / 10.0) > levels:
        assert order(early) < order(late)
