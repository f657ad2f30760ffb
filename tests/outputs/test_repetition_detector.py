from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from asyncllm.outputs.repetition_detector import RepetitionDetector


def repeats_itself(tokens: Sequence[int], least: int, most: int, count: int) -> bool:
    """Whether the tokens end with one of the patterns, so many times in a row."""
    return any(
        len(tokens) >= size * count and tokens[-size * count :] == tokens[-size:] * count
        for size in range(least, most + 1)
    )


@given(st.lists(st.integers(0, 1), max_size=80), st.integers(1, 4), st.integers(0, 5), st.integers(2, 4))
def test_a_repetition_is_found_when_it_is_complete(tokens: list[int], least: int, more: int, count: int) -> None:
    detector = RepetitionDetector(least, least + more, count)
    for end in range(1, len(tokens) + 1):
        found = detector.push(tokens[end - 1])
        assert found == repeats_itself(tokens[:end], least, least + more, count)
        if found:
            break


def test_a_long_pattern_is_found_far_into_an_output() -> None:
    detector = RepetitionDetector(90, 100, 3)
    before = [*range(1000), *range(95)]
    assert not any(detector.push(token_id) for token_id in before)
    found = [detector.push(token_id) for token_id in [*range(95)] * 2]
    assert found == [False] * 189 + [True]


def test_many_repetitions_of_a_long_pattern_may_be_asked_for() -> None:
    detector = RepetitionDetector(1, 4096, 2**31 - 1)
    assert not any(detector.push(5) for _ in range(5000))
