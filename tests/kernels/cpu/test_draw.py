from __future__ import annotations

import numpy as np
import pytest
import torch

from asyncllm.engine.execution.philox import uniform_draws
from asyncllm.kernels.cpu.build import Library
from asyncllm.kernels.cpu.draw import draw_reference, draw_tokens, draw_uniform, uniform_reference


@pytest.mark.parametrize("vocabulary", [1, 15, 256, 257, 1000, 49152])
def test_the_share_that_is_asked_for(compiled: Library, vocabulary: int) -> None:
    """Against float64: another token only where the sums before and behind it are as near as float32 can tell."""
    generator = torch.Generator().manual_seed(vocabulary)
    rows = 40
    logits = 4 * torch.randn(rows, vocabulary, generator=generator)
    logits[: rows // 2, ::3] = -torch.inf
    logits[:, -1] = 1.0  # so that one is finite
    temperature = 0.2 + 2 * torch.rand(rows, generator=generator)
    uniform = torch.rand(rows, generator=generator)
    uniform[:2], uniform[2:4] = 1.0, 2.0**-24
    found = draw_tokens(compiled, logits, temperature, uniform)
    shares = torch.softmax(logits.double() / temperature.double()[:, None], -1)
    sums = shares.cumsum(-1).gather(-1, found[:, None])[:, 0]
    own = shares.gather(-1, found[:, None])[:, 0]
    assert (own > 0).all()
    assert (sums >= uniform - 1e-6).all()
    assert (sums - own <= uniform + 1e-6).all()
    assert (found == draw_reference(logits, temperature, uniform)).float().mean() > 0.9


def test_rows_are_apart(compiled: Library) -> None:
    logits, uniform = torch.randn(9, 5000), torch.rand(9)
    together = draw_tokens(compiled, logits, torch.ones(9), uniform)
    for row in range(9):
        assert draw_tokens(compiled, logits[row, None], torch.ones(1), uniform[row, None]) == together[row]
    logits[3], logits[4] = torch.nan, -torch.inf
    again = draw_tokens(compiled, logits, torch.ones(9), uniform)
    assert again[[3, 4]].tolist() == [-1, -1]
    assert torch.equal(again[[0, 1, 2, 5, 6, 7, 8]], together[[0, 1, 2, 5, 6, 7, 8]])


def test_arguments_may_lie_anywhere(compiled: Library) -> None:
    logits, temperature, uniform = torch.randn(300, 8).T, (torch.rand(8, 2) + 0.5)[:, 0], torch.rand(8, 2)[:, 1]
    assert not any(each.is_contiguous() for each in (logits, temperature, uniform))
    expected = draw_tokens(compiled, logits.contiguous(), temperature.contiguous(), uniform.contiguous())
    assert torch.equal(draw_tokens(compiled, logits, temperature, uniform), expected)


def test_large_logits_and_small_temperatures(compiled: Library) -> None:
    logits = torch.tensor([[3e38, -3e38, 2e38], [1.0, 1.001, 0.999]])
    assert draw_tokens(compiled, logits, torch.tensor([1e-3, 1e-5]), torch.tensor([0.9, 0.9])).tolist() == [0, 1]
    for temperature in (1e-37, 1e-39, 1e-44):  # the last two are denormal numbers
        assert draw_tokens(compiled, logits, torch.full((2,), temperature), torch.ones(2)).tolist() == [0, 1]


@pytest.mark.parametrize("place", [0, 255, 256, 999])
@pytest.mark.parametrize("odd", [torch.nan, torch.inf])
def test_what_no_share_can_be_found_of(compiled: Library, odd: float, place: int) -> None:
    logits = torch.randn(2, 1000)
    logits[1, place] = odd
    found = draw_tokens(compiled, logits, torch.ones(2), torch.full((2,), 0.5))
    assert found[0] >= 0
    assert found[1] == -1
    assert draw_reference(logits, torch.ones(2), torch.full((2,), 0.5))[1] == -1


def test_uniform_numbers(compiled: Library) -> None:
    """Equal to the reference, and to what the engine's own generator draws, to the bit."""
    seed = torch.tensor([0, 1, -1, 2**62 + 12345, -(2**63)])
    position, choice = torch.tensor([0, 7, 2**40 + 3, 5, 1]), torch.tensor([0, 1, 2, 3, 2**31])
    for stream in (0, 1):
        found = draw_uniform(compiled, seed, position, choice, stream)
        expected = [
            uniform_reference(s & (2**64 - 1), p, c, stream)
            for s, p, c in zip(seed.tolist(), position.tolist(), choice.tolist(), strict=True)
        ]
        assert found.tolist() == expected
        numbers = seed.numpy().view(np.uint64), position.numpy(), choice.numpy()
        assert found.tolist() == uniform_draws(*numbers, stream).tolist()
    assert ((found > 0) & (found <= 1)).all()
