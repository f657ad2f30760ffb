from __future__ import annotations

import math
from typing import Any

import pytest

from asyncllm import SamplingParams
from asyncllm.errors import InvalidParamsError

HUGE = 10**400
"""More than a float holds."""


@pytest.mark.parametrize(
    "field",
    [
        *(
            {name: value}
            for name in ("temperature", "top_p", "min_p")
            for value in (-1, math.nan, math.inf, True, HUGE)
        ),
        {"temperature": 1e39},  # more than float32 holds: logits over it are not numbers
        {"top_p": 0},
        {"top_k": 2**31},  # more than devices hold: it would fail the step, and with it the other requests there
        {"top_k": HUGE},
        {"min_tokens": 2**31},
        {"min_tokens": HUGE},
        {"seed": 2**64},
    ],
    ids=lambda field: f"{field!r:.30}",
)
def test_impossible_values_raise(field: dict[str, Any]) -> None:
    with pytest.raises(InvalidParamsError, match=next(iter(field))):
        SamplingParams(**field)


def test_extremes_are_taken() -> None:
    SamplingParams(temperature=1e-300, top_p=1e-300, min_p=1, top_k=2**31 - 1, min_tokens=2**31 - 1)
    SamplingParams(temperature=1e30, top_p=1, min_p=1e-300, max_tokens=HUGE, seed=-(2**63))
