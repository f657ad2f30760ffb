from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncllm.outputs.repetition import LARGEST_PENALTY, DrySettings, LoopWatch, dry_penalties

TOKENS = st.lists(st.integers(0, 3), max_size=40)


def plain_dry(tokens: Sequence[int], settings: DrySettings) -> dict[int, float]:
    """Every earlier occurrence of the last token, followed backwards one by one."""
    if settings.last_n is not None:
        tokens = tokens[max(len(tokens) - settings.last_n, 0) :]
    longest: dict[int, int] = {}
    if not tokens or tokens[-1] in settings.breakers:
        return {}
    for i in range(len(tokens) - 1):
        if tokens[i] != tokens[-1]:
            continue
        length = 1
        while i - length >= 0:
            expected = tokens[-1 - length]
            if expected in settings.breakers or tokens[i - length] != expected:
                break
            length += 1
        longest[tokens[i + 1]] = max(longest.get(tokens[i + 1], 0), length)
    return {
        token_id: settings.multiplier * settings.base ** (length - settings.allowed_length)
        for token_id, length in longest.items()
        if length >= settings.allowed_length and token_id not in settings.breakers
    }


@given(
    TOKENS,
    st.builds(
        DrySettings,
        multiplier=st.sampled_from((0.8, 2.0)),
        base=st.sampled_from((1.0, 1.75)),
        allowed_length=st.integers(1, 4),
        last_n=st.sampled_from((None, 0, 1, 5, 20)),
        breakers=st.sampled_from((frozenset(), frozenset({2}), frozenset({0, 1}))),
    ),
)
def test_dry_is_what_its_definition_says(tokens: list[int], settings: DrySettings) -> None:
    assert dry_penalties(tokens, settings) == pytest.approx(plain_dry(tokens, settings))


def test_dry_does_not_overflow() -> None:
    settings = DrySettings(multiplier=1000.0, base=1000.0, allowed_length=1, last_n=None, breakers=frozenset())
    assert dry_penalties([5] * 500, settings) == {5: LARGEST_PENALTY}


def goes_round(tokens: Sequence[int], least: int, most: int, count: int) -> bool:
    """Whether the tokens end with one of the patterns, so many times in a row."""
    return any(
        len(tokens) >= size * count and tokens[-size * count :] == tokens[-size:] * count
        for size in range(least, most + 1)
    )


@given(st.lists(st.integers(0, 1), max_size=80), st.integers(1, 4), st.integers(0, 5), st.integers(2, 4))
def test_a_loop_is_found_when_it_closes(tokens: list[int], least: int, more: int, count: int) -> None:
    watch = LoopWatch(least, least + more, count)
    for end in range(1, len(tokens) + 1):
        found = watch.push(tokens[end - 1])
        assert found == goes_round(tokens[:end], least, least + more, count)
        if found:
            break


def test_a_long_pattern_is_found_far_into_an_output() -> None:
    watch = LoopWatch(90, 100, 3)
    before = [*range(1000), *range(95)]
    assert not any(watch.push(token_id) for token_id in before)
    found = [watch.push(token_id) for token_id in [*range(95)] * 2]
    assert found == [False] * 189 + [True]


def test_many_repetitions_of_a_long_pattern_may_be_asked_for() -> None:
    watch = LoopWatch(1, 4096, 2**31 - 1)
    assert not any(watch.push(5) for _ in range(5000))
