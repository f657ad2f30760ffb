from __future__ import annotations

import numpy as np
import pytest

from asyncllm.engine.execution.philox import philox, uniform_draws


@pytest.mark.parametrize(
    ("counter", "key", "output"),
    [  # from the known-answer file of Random123, the authors' own implementation
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_known_answers(counter: str, key: str, output: str) -> None:
    def words(text: str) -> tuple[np.ndarray, ...]:
        return tuple(np.array([int(word, 16)], np.uint64) for word in text.split())

    assert philox(words(counter), words(key)) == words(output)


def test_draws_are_in_range_and_even() -> None:
    """100,000 draws: each of 100 bins holds 1,000 within six standard deviations."""
    count = 100_000
    seed = np.full(count, 12345, np.uint64)
    draws = uniform_draws(seed, np.arange(count), np.zeros(count, np.int64))
    assert draws.dtype == np.float32
    assert draws.min() > 0
    assert draws.max() <= 1
    bins = np.bincount((draws * 100).astype(int).clip(max=99), minlength=100)
    assert abs(bins - 1000).max() < 6 * 1000**0.5


def test_every_part_of_the_key_counts() -> None:
    seeds = np.array([0, 1, 2**32, 2**64 - 1, 0, 0, 0], np.uint64)
    positions = np.array([0, 0, 0, 0, 1, 2**32, 0])
    choices = np.array([0, 0, 0, 0, 0, 0, 1])
    together = uniform_draws(seeds, positions, choices)
    assert len(set(together.tolist())) == len(seeds)
    alone = [uniform_draws(seeds[i : i + 1], positions[i : i + 1], choices[i : i + 1])[0] for i in range(len(seeds))]
    assert together.tolist() == alone
