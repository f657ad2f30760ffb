from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from asyncllm.outputs.bad_words import BadSequences

TOKENS = st.integers(0, 2)


@given(st.lists(TOKENS, max_size=12), st.lists(st.lists(TOKENS, min_size=2, max_size=4), min_size=1, max_size=4))
def test_what_would_complete_a_sequence_is_banned(output: list[int], sequences: list[list[int]]) -> None:
    banned = BadSequences(sequences).banned(output)
    for token_id in range(3):
        longer = [*output, token_id]
        completes = any(longer[-len(sequence) :] == sequence for sequence in sequences)
        assert (token_id in banned) == completes
