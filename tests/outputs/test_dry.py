from __future__ import annotations

import random
import time
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncllm.outputs.dry import LARGEST_PENALTY, DryHistory, DrySettings

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
    allowed_length=st.integers(1, 5),
    last_n=st.sampled_from((None, 0, 1, 5, 20)),
    breakers=st.sampled_from((frozenset(), frozenset({2}), frozenset({0, 1}))),
)


def check(tokens: Sequence[int], cuts: Sequence[int], dry: DrySettings) -> None:
    """Whatever comes at once, and whatever comes later."""
    history = DryHistory(dry)
    for cut in [*sorted(cut for cut in cuts if cut < len(tokens)), len(tokens)]:
        assert history.penalties(tokens[:cut]) == pytest.approx(plain_dry(tokens[:cut], dry))


CUTS = st.lists(st.integers(0, 40), max_size=4)


@given(TOKENS, CUTS, SETTINGS)
def test_dry_is_what_its_definition_says(tokens: list[int], cuts: list[int], dry: DrySettings) -> None:
    check(tokens, cuts, dry)


@given(TOKENS, SETTINGS)
def test_dry_token_by_token(tokens: list[int], dry: DrySettings) -> None:
    check(tokens, range(len(tokens)), dry)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.integers(1, 20), TOKENS, CUTS, SETTINGS)
def test_dry_of_a_repetitive_history(
    unit: list[int], count: int, rest: list[int], cuts: list[int], dry: DrySettings
) -> None:
    for tokens in (unit * count, [*rest, *unit * count], [*unit * count, *rest]):
        check(tokens, cuts, dry)


def plain_settings(allowed_length: int) -> DrySettings:
    return DrySettings(multiplier=1.0, base=1.0, allowed_length=allowed_length, last_n=None, breakers=frozenset())


def test_dry_of_a_repetitive_history_is_linear() -> None:
    start = time.process_time()
    for tokens in ([7] * 20_000, [*range(10_000)] * 2):
        assert set(DryHistory(plain_settings(1)).penalties(tokens).values()) == {1.0}
    assert time.process_time() - start < 1.0  # 6 s where it is quadratic


def test_dry_of_a_long_history_costs_little_a_token() -> None:
    """Even tokens that stand at thousands of places; a look through all of it takes 100 ms a token."""
    rng = random.Random(0)
    tokens = [min(int(rng.paretovariate(0.3)), 50_000) for _ in range(100_000)]
    history = DryHistory(plain_settings(2))
    history.penalties(tokens)
    start = time.process_time()
    for _ in range(200):
        tokens.append(rng.choice(tokens))
        history.penalties(tokens)
    assert time.process_time() - start < 1.0


def test_dry_does_not_overflow() -> None:
    dry = DrySettings(multiplier=1000.0, base=1000.0, allowed_length=1, last_n=None, breakers=frozenset())
    assert DryHistory(dry).penalties([5] * 500) == {5: LARGEST_PENALTY}
