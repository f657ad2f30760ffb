from __future__ import annotations

import math
from typing import Any

import pytest

from asyncllm import RepetitionDetection, SamplingParams
from asyncllm.errors import InvalidParamsError

HUGE = 10**400
"""More than a float holds."""


@pytest.mark.parametrize(
    "field",
    [
        *(
            {name: value}
            for name in (
                "temperature",
                "top_p",
                "min_p",
                "typical_p",
                "top_n_sigma",
                "xtc_probability",
                "xtc_threshold",
            )
            for value in (-1, math.nan, math.inf, True, HUGE)
        ),
        {"temperature": 1e39},  # more than float32 holds: logits over it are not numbers
        {"top_p": 0},
        {"top_k": 2**31},  # more than devices hold: it would fail the step, and with it the other requests there
        {"top_k": HUGE},
        {"min_tokens": 2**31},
        {"min_tokens": HUGE},
        {"seed": 2**64},
        {"n": 0},
        {"n": None},
        {"n": 2000},
        {"typical_p": 0},
        {"xtc_probability": 1.5},
        {"xtc_threshold": None},
        {"top_n_sigma": None},
        *(
            {name: value}
            for name in ("presence_penalty", "frequency_penalty")
            for value in (-2.5, 3, None, math.nan, "1")
        ),
        *({"repetition_penalty": value} for value in (0, -1, 1e-30, math.inf, HUGE)),
        *({"dry_multiplier": value} for value in (-1, None, math.inf)),
        {"dry_base": 0.5},
        {"dry_allowed_length": 0},
        {"dry_penalty_last_n": -1},
        {"dry_sequence_breakers": ["a", ""]},
        {"dry_sequence_breakers": b"a"},
        *(
            {"logit_bias": value}
            for value in ({-1: 1}, {1: math.nan}, {1: 101}, {1.5: 1}, {True: 1}, {"1": 1}, {1: None})
        ),
        *({"logit_bias": value} for value in ([1, 2], "12", None, [(1, 2), (1, 3)], 7)),
        *({"allowed_token_ids": value} for value in ([], [-1], [2**31], "12", [None], [1.0], 3)),
        {"allowed_token_ids": [1, 2], "stop_token_ids": [2, 1], "min_tokens": 1},
        *({"bad_words": value} for value in ([""], [1], None, b"x", "\ud800")),
        {"stop": ["fine", "half a pair \ud800"]},
        *({name: value} for name in ("logprobs", "prompt_logprobs") for value in (-1, 21, "some", True, 1.0)),
        *({"logprob_token_ids": value} for value in ([-1], list(range(257)), "1")),
        *({"truncate_prompt_tokens": value} for value in (0, -1, True)),
        {"thinking_token_budget": -1},
        *({"repetition_detection": value} for value in (True, {"max_pattern_size": 3})),
        *({"logits_processors": value} for value in (None, [1], lambda ids, logits: logits)),
        {"on_token": 1},
        *({name: None} for name in ("detokenize", "spaces_between_special_tokens")),
    ],
    ids=lambda field: f"{field!r:.30}",
)
def test_impossible_values_raise(field: dict[str, Any]) -> None:
    with pytest.raises(InvalidParamsError, match=next(iter(field))):
        SamplingParams(**field)


def test_extremes_are_taken() -> None:
    SamplingParams(temperature=1e-300, top_p=1e-300, min_p=1, top_k=2**31 - 1, min_tokens=2**31 - 1)
    SamplingParams(temperature=1e30, top_p=1, min_p=1e-300, max_tokens=HUGE, seed=-(2**63))


def test_contradictions_name_a_field() -> None:
    with pytest.raises(InvalidParamsError, match="detokenize"):
        SamplingParams(stop="x", detokenize=False)
    with pytest.raises(InvalidParamsError, match="min_tokens"):
        SamplingParams(min_tokens=3, max_tokens=2)
    with pytest.raises(TypeError, match="presense_penalty"):
        SamplingParams(presense_penalty=1.0)  # type: ignore[call-arg]


def test_lists_become_tuples() -> None:
    ids, biases = [3, 1], {7: 1, 2: -0.5}
    params = SamplingParams(allowed_token_ids=ids, logit_bias=biases, bad_words="one", logprob_token_ids=ids)
    ids.append(5)
    biases[9] = 9
    assert params.allowed_token_ids == params.logprob_token_ids == (3, 1)
    assert params.logit_bias == params.biases == ((2, -0.5), (7, 1.0))
    assert params.bad_words == ("one",)
    assert hash(params) == hash(SamplingParams(**{name: getattr(params, name) for name in params.__slots__}))


def test_no_logprobs_are_not_the_chosen_ones_alone() -> None:
    assert SamplingParams().logprobs is None
    assert SamplingParams(logprobs=0).logprobs == 0
    assert SamplingParams(logprobs=0) != SamplingParams()


@pytest.mark.parametrize("sizes", [(0, 1, 3), (3, 4, 3), (3, 1, 1), (3, 0, 2), (None, 1, 2)], ids=str)
def test_repetition_detection(sizes: tuple[int, int, int]) -> None:
    RepetitionDetection(max_pattern_size=3)
    with pytest.raises(InvalidParamsError, match=r"repetition_detection\.m"):
        RepetitionDetection(max_pattern_size=sizes[0], min_pattern_size=sizes[1], min_count=sizes[2])


def test_lists_of_ids_are_bounded_and_a_whole_vocabulary_is_checked() -> None:
    """The checks run on the caller's event loop."""
    ids = list(range(262_144))
    assert SamplingParams(allowed_token_ids=ids).allowed_token_ids == tuple(ids)
    assert len(SamplingParams(logit_bias=dict.fromkeys(range(10_000), 1.0)).biases) == 10_000
    for wrong in (True, -1, 2**31, None, 1.0):
        with pytest.raises(InvalidParamsError, match="allowed_token_ids"):
            SamplingParams(allowed_token_ids=[*ids, wrong])  # type: ignore[list-item]
    with pytest.raises(InvalidParamsError, match="at most 300000"):
        SamplingParams(allowed_token_ids=range(300_001))
    with pytest.raises(InvalidParamsError, match="at most 10000"):
        SamplingParams(stop_token_ids=range(10_001))
    with pytest.raises(InvalidParamsError, match="at most 10000"):
        SamplingParams(logit_bias=dict.fromkeys(range(10_001), 1.0))
    with pytest.raises(InvalidParamsError, match="nothing is left"):
        SamplingParams(allowed_token_ids=[3, 4, 3], stop_token_ids=[5, 4, 3], min_tokens=1)
