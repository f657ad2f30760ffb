from __future__ import annotations

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from asyncllm.engine.execution.philox import uniform_draws
from asyncllm.kernels import uniform_draw
from asyncllm.kernels.uniform_draw import philox4x32
from tests.kernels import drawn_numbers
from tests.kernels.mutants import mutant


def test_generator_gives_the_published_words() -> None:
    """The known answers of Random123 for counter and key 0."""
    assert philox4x32(0, 0, 0) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)


def check(module: ModuleType, device: torch.device, stream: int = 0) -> torch.Tensor:
    """Every bit of every draw: seeds and positions of all sizes."""
    rng = np.random.default_rng(stream)
    seeds = np.concatenate(
        (np.array([0, 1, 2**32, 2**63, 2**64 - 1], np.uint64), rng.integers(2**64, size=59, dtype=np.uint64))
    )
    positions = np.concatenate((np.array([0, 1, 2**31, 2**32, 2**40]), rng.integers(0, 200_000, 59)))
    choices = rng.integers(0, 1024, 64).astype(np.int32)
    arrays = (torch.from_numpy(each).to(device) for each in (seeds.astype(np.int64), positions, choices))
    numbers: torch.Tensor = module.draw_numbers(*arrays, stream=stream).cpu()
    words = [
        philox4x32(int(seed), int(position), int(choice), stream)[0]
        for seed, position, choice in zip(seeds, positions, choices, strict=True)
    ]
    expected = ((np.array([word >> 8 for word in words]).astype(np.float32) + np.float32(0.5)) * 2.0**-24).tolist()
    assert numbers.tolist() == expected
    if stream == 0:
        assert uniform_draws(seeds, positions, choices.astype(np.int64)).tolist() == expected
    return numbers


@pytest.mark.parametrize("stream", [0, 1])
def test_draws_are_those_of_the_reference_and_the_cpu(stream: int, device: torch.device) -> None:
    numbers = check(drawn_numbers, device, stream)
    assert bool(((numbers > 0) & (numbers <= 1)).all())


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("(position >> 32)", "(position >> 33)"),
        ("tl.philox(seed, low, high, choice", "tl.philox(seed, high, low, choice"),
        ("word >> 8", "word >> 9"),
        ("choice.to(tl.uint32)", "(choice + 1).to(tl.uint32)"),
        ("word, _, _, _ =", "_, word, _, _ ="),
    ],
)
def test_planted_fault_is_caught(right: str, wrong: str, tmp_path: Path, device: torch.device) -> None:
    with mutant(uniform_draw, tmp_path, right, wrong, user=drawn_numbers) as module, pytest.raises(AssertionError):
        check(module, device)
