"""Bans, bias and penalties, against transformers' processors and a float64 reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from asyncllm.engine.execution.logit_adjustment import LogitAdjustment, TokenCounts, mask_logits
from asyncllm.engine.plan import RowJoin, RowSampling

VOCABULARY = 50


def adjusted(logits: torch.Tensor, *, history: list[int] | None = None, prompt_tokens: int = 1, **fields: Any) -> Any:
    sampling = RowSampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, **fields)
    known = None if history is None else np.array(history, np.int32)
    adjustment = LogitAdjustment.of(RowJoin(0, 0, sampling, prompt_tokens, known), VOCABULARY)
    assert adjustment is not None
    result = logits.clone()
    adjustment.apply(result)
    return result


@pytest.fixture
def logits() -> torch.Tensor:
    return 3 * torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(0))


def test_plain_rows_have_none() -> None:
    sampling = RowSampling(temperature=1.0, top_k=5, top_p=0.5, min_p=0.1, seed=0, typical_p=0.5, xtc_probability=1.0)
    assert LogitAdjustment.of(RowJoin(0, 0, sampling), VOCABULARY) is None


def test_repetition_equals_transformers(logits: torch.Tensor) -> None:
    history = [3, 3, 7, 49, 0, 12]
    for penalty in (1.3, 0.6):
        processor = RepetitionPenaltyLogitsProcessor(penalty)
        expected = processor(torch.tensor([history]), logits[None].clone())[0]
        mine = adjusted(logits, history=history, prompt_tokens=4, repetition_penalty=penalty)
        torch.testing.assert_close(mine, expected, rtol=0, atol=0)
        assert (mine != logits).sum() == len(set(history))


def test_bias_equals_transformers(logits: torch.Tensor) -> None:
    processor = SequenceBiasLogitsProcessor([[[3], 2.5], [[40], -100.0]])
    expected = processor(torch.tensor([[1, 2]]), logits[None].clone())[0]
    torch.testing.assert_close(adjusted(logits, logit_bias=((3, 2.5), (40, -100.0))), expected)


def test_bans_equal_transformers(logits: torch.Tensor) -> None:
    expected = NoBadWordsLogitsProcessor([[4], [9]])(torch.tensor([[1, 2]]), logits[None].clone())[0]
    torch.testing.assert_close(adjusted(logits, banned=(4, 9)), expected)


def test_allowed_ids_are_the_only_ones(logits: torch.Tensor) -> None:
    mine = adjusted(logits, allowed=(2, 30, 31), banned=(30,), logit_bias=((5, 100.0), (30, 100.0)))
    assert torch.nonzero(mine > -torch.inf).squeeze(-1).tolist() == [2, 31]
    assert mine[2] == logits[2]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=40),
    st.integers(1, 40),
    st.tuples(st.sampled_from([1.0, 1.3, 0.7]), st.sampled_from([0.0, 0.5, -1.25]), st.sampled_from([0.0, 0.75, -2.0])),
    st.integers(0, 2**31),
)
def test_penalties_against_float64(
    history: list[int], prompt_tokens: int, penalties: tuple[float, float, float], seed: int
) -> None:
    """The history comes with the join as far as `known`, and token by token after that; the order does not matter."""
    repetition, frequency, presence = penalties
    if penalties == (1, 0, 0):
        return
    logits = 3 * torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(seed))
    expected = logits.double().numpy().copy()
    prompt, output = history[:prompt_tokens], history[prompt_tokens:]
    for token_id in {*history}:
        expected[token_id] *= repetition if expected[token_id] <= 0 else 1 / repetition
        expected[token_id] -= frequency * output.count(token_id) + presence * (token_id in output)
    mine = adjusted(
        logits,
        history=history,
        prompt_tokens=len(prompt),
        repetition_penalty=repetition,
        frequency_penalty=frequency,
        presence_penalty=presence,
    )
    np.testing.assert_allclose(mine.numpy(), expected, rtol=1e-5, atol=1e-5)


def test_counts_grow_and_count_no_position_twice() -> None:
    grown = TokenCounts(np.array([5, 500, 5, 7], np.int32), 2)
    rng = np.random.default_rng(0)
    output = [5, 7, *rng.integers(0, 400, 300).tolist()]
    for position, token_id in enumerate(output[2:], 4):
        grown.add(position, token_id)
        grown.add(position, 399)  # as in a chunk that computes what was sampled before
    assert dict(zip(grown.ids.tolist(), grown.counts.tolist(), strict=True)) == {
        **{token_id: float(output.count(token_id)) for token_id in output},
        500: 0.0,
    }
    assert grown.length == 302 + 2


@pytest.mark.parametrize("size", [50, 64, 65])
def test_masks_are_bits(size: int) -> None:
    legal = np.random.default_rng(size).integers(0, 2, (3, size)).astype(bool)
    words = np.zeros((3, -(-size // 32)), np.uint32)
    for row, token_id in zip(*np.nonzero(legal), strict=True):
        words[row, token_id // 32] |= np.uint32(1) << np.uint32(token_id % 32)
    logits = torch.randn(3, size)
    masked = logits.clone()
    mask_logits(masked, words)
    assert torch.equal(masked, torch.where(torch.from_numpy(legal), logits, -torch.inf))


def test_penalties_need_the_history() -> None:
    sampling = RowSampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, presence_penalty=1.0)
    with pytest.raises(ValueError, match="history"):
        LogitAdjustment.of(RowJoin(0, 0, sampling), VOCABULARY)
