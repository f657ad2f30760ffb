"""Log-probabilities against a float64 log-softmax."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from asyncllm.engine.execution.token_scores import NO_SCORES, join_scores, score_tokens
from asyncllm.engine.plan import LogprobsRequest, TokenScores

SIZE = 300


def slice_of(scores: TokenScores, position: int) -> tuple[list[int], np.ndarray, list[int]]:
    start, end = scores.offsets[position : position + 2]
    return scores.token_ids[start:end].tolist(), scores.logprobs[start:end], scores.ranks[start:end].tolist()


@pytest.mark.parametrize("grid", [False, True])
def test_chosen_top_and_named_ids(grid: bool) -> None:
    rng = np.random.default_rng(0)
    logits = rng.integers(-8, 9, (4, SIZE)) / 2.0 if grid else rng.standard_normal((4, SIZE)) * 3
    requests = [LogprobsRequest(0), LogprobsRequest(5), LogprobsRequest(20, (7, 3)), LogprobsRequest(SIZE)]
    chosen = [4, 299, 0, 17]
    scores = score_tokens(torch.tensor(logits, dtype=torch.float32), chosen, requests)
    assert len(scores) == 4
    assert scores.token_ids.dtype == scores.ranks.dtype == scores.offsets.dtype == np.int32
    for i, asked in enumerate(requests):
        expected = logits[i] - np.log(np.exp(logits[i]).sum())
        ids, values, ranks = slice_of(scores, i)
        best = np.argsort(-expected, kind="stable")[: asked.top].tolist()
        assert ids == [chosen[i], *best, *asked.token_ids]
        np.testing.assert_allclose(values, expected[ids], atol=1e-5)
        assert ranks == [1 + int((logits[i] > logits[i][token_id]).sum()) for token_id in ids]


def test_tokens_without_probability_are_no_alternatives() -> None:
    logits = torch.full((1, SIZE), -torch.inf)
    logits[0, [5, 8]] = torch.tensor([1.0, 2.0])
    ids, values, ranks = slice_of(score_tokens(logits, [5], [LogprobsRequest(20, (3,))]), 0)
    assert (ids, ranks) == ([5, 8, 5, 3], [2, 1, 2, 3])
    assert np.isfinite(values[:3]).all()
    assert values[3] == -np.inf
    ids, _, _ = slice_of(score_tokens(logits, [5], [LogprobsRequest(SIZE)]), 0)
    assert ids == [5, 8, 5]


def test_joined_positions_keep_their_order() -> None:
    logits = torch.randn(3, SIZE)
    requests = [LogprobsRequest(2), LogprobsRequest(0), LogprobsRequest(4)]
    whole = score_tokens(logits, [1, 2, 3], requests)
    parts = [score_tokens(logits[i : i + 1], [i + 1], [requests[i]]) for i in range(3)]
    joined = join_scores(parts)
    for name in ("offsets", "token_ids", "logprobs", "ranks"):
        np.testing.assert_array_equal(getattr(joined, name), getattr(whole, name))
    assert len(join_scores([])) == len(NO_SCORES) == 0
