from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from asyncllm.outputs.thinking_budget import ThinkingBudget

START, END = (1, 2), (8, 9)


def forced_at(tokens: Sequence[int], budget: int, *, begun: bool = False) -> dict[int, tuple[int, ...]]:
    """After how many of the tokens what is forced; the tokens follow what is."""
    thinking = ThinkingBudget(START, END, budget, 64, begun=begun)
    forced: dict[int, tuple[int, ...]] = {}
    for count, token_id in enumerate([*tokens, 0]):
        mask = thinking.mask()
        assert (mask is None) == (not thinking.forced())
        if thinking.forced():
            forced[count] = thinking.forced()
            assert mask is not None
            assert np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist() == [token_id]
        assert not thinking.finished
        thinking.accept([token_id])
        thinking = thinking.copy()
    return forced


@pytest.mark.parametrize(
    ("tokens", "budget", "begun", "expected"),
    [
        ([5, 6, 7, 5, 6], 2, False, {}),  # it never begins
        ([1, 2, 5, 6, 8, 9, 5, 5], 2, False, {4: (8, 9), 5: (9,)}),
        ([1, 2, 5, 8, 9, 5, 5], 3, False, {}),  # it is over in time
        ([1, 2, 8, 9, 5], 0, False, {2: (8, 9), 3: (9,)}),
        ([8, 9, 5], 0, True, {0: (8, 9), 1: (9,)}),
        ([5, 5, 8, 9, 1, 2, 5, 5, 5], 2, True, {2: (8, 9), 3: (9,)}),  # it ends once
        ([5, 1, 2, 6, 8, 9], 1, False, {4: (8, 9), 5: (9,)}),
    ],
)
def test_the_end_is_forced(
    tokens: Sequence[int], budget: int, begun: bool, expected: dict[int, tuple[int, ...]]
) -> None:
    assert forced_at(tokens, budget, begun=begun) == expected
