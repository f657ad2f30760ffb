from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from asyncllm.outputs.loop_watch import LoopWatch


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
