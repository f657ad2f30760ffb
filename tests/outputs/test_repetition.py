from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncllm.outputs.repetition import LARGEST_PENALTY, DrySettings, LoopWatch, dry_penalties

TOKENS = st.lists(st.integers(0, 3), max_size=40)


def plain_dry(tokens: Sequence[int], dry: DrySettings) -> dict[int, float]:
    """Every earlier occurrence of the last token, followed backwards one by one."""
    if dry.last_n is not None:
        tokens = tokens[max(len(tokens) - dry.last_n, 0) :]
    longest: dict[int, int] = {}
    if not tokens or tokens[-1] in dry.breakers:
        return {}
    for i in range(len(tokens) - 1):
        if tokens[i] != tokens[-1]:
            continue
        length = 1
        while i - length >= 0:
            expected = tokens[-1 - length]
            if expected in dry.breakers or tokens[i - length] != expected:
                break
            length += 1
        longest[tokens[i + 1]] = max(longest.get(tokens[i + 1], 0), length)
    return {
        token_id: dry.multiplier * dry.base ** (length - dry.allowed_length)
        for token_id, length in longest.items()
        if length >= dry.allowed_length and token_id not in dry.breakers
    }


SETTINGS = st.builds(
    DrySettings,
    multiplier=st.sampled_from((0.8, 2.0)),
    base=st.sampled_from((1.0, 1.75)),
    allowed_length=st.integers(1, 4),
    last_n=st.sampled_from((None, 0, 1, 5, 20)),
    breakers=st.sampled_from((frozenset(), frozenset({2}), frozenset({0, 1}))),
)


@given(TOKENS, SETTINGS)
def test_dry_is_what_its_definition_says(tokens: list[int], dry: DrySettings) -> None:
    assert dry_penalties(tokens, dry) == pytest.approx(plain_dry(tokens, dry))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.integers(1, 20), TOKENS, SETTINGS)
def test_dry_of_a_repetitive_history(unit: list[int], count: int, rest: list[int], dry: DrySettings) -> None:
    for tokens in (unit * count, [*rest, *unit * count], [*unit * count, *rest]):
        assert dry_penalties(tokens, dry) == pytest.approx(plain_dry(tokens, dry))


def test_dry_of_a_repetitive_history_is_linear() -> None:
    dry = DrySettings(multiplier=1.0, base=1.0, allowed_length=1, last_n=None, breakers=frozenset())
    start = time.process_time()
    for tokens in ([7] * 20_000, [*range(10_000)] * 2):
        assert set(dry_penalties(tokens, dry).values()) == {1.0}
    assert time.process_time() - start < 1.0  # 6 s where it is quadratic


def test_dry_does_not_overflow() -> None:
    dry = DrySettings(multiplier=1000.0, base=1000.0, allowed_length=1, last_n=None, breakers=frozenset())
    assert dry_penalties([5] * 500, dry) == {5: LARGEST_PENALTY}


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
