"""Log-probabilities of the rows that ask for them, from the logits of the CPU."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncllm.engine.plan import LogprobsRequest, TokenScores

NO_SCORES = TokenScores(np.zeros(1, np.int32), np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32))


def score_tokens(
    logits: Tensor, token_ids: Sequence[int] | NDArray[np.int64], requests: Sequence[LogprobsRequest]
) -> TokenScores:
    """What each request asks for at its position, whose `logits` [n, vocabulary] may be -inf, and whose token is given.

    Alternatives without any probability are left out of the most likely ones.
    """
    scores = logits.float().log_softmax(-1)
    parts = [_score_row(row, int(i), asked) for row, i, asked in zip(scores, token_ids, requests, strict=True)]
    return join_scores(parts)


def join_scores(parts: Sequence[TokenScores]) -> TokenScores:
    """The positions of all parts, in their order."""
    if len(parts) == 1:
        return parts[0]
    if not parts:
        return NO_SCORES
    sizes = np.concatenate([np.diff(part.offsets) for part in parts])
    return TokenScores(
        np.concatenate(([0], np.cumsum(sizes))).astype(np.int32),
        np.concatenate([part.token_ids for part in parts]),
        np.concatenate([part.logprobs for part in parts]),
        np.concatenate([part.ranks for part in parts]),
    )


def _score_row(scores: Tensor, chosen: int, asked: LogprobsRequest) -> TokenScores:
    """Of one position, whose log-probabilities [vocabulary] are given."""
    named = torch.tensor([chosen, *asked.token_ids])
    ranks = 1 + (scores > scores[named][:, None]).sum(-1)
    best = _most_likely(scores, asked.top)
    values = scores[best]
    # the first with this value, counted from 1: values fall
    best_ranks = 1 + torch.searchsorted(-values, -values, side="left")
    ids = torch.cat((named[:1], best, named[1:]))
    return TokenScores(
        np.array([0, len(ids)], np.int32),
        ids.numpy().astype(np.int32),
        torch.cat((scores[named[:1]], values, scores[named[1:]])).numpy(),
        torch.cat((ranks[:1], best_ranks, ranks[1:])).numpy().astype(np.int32),
    )


def _most_likely(scores: Tensor, count: int) -> Tensor:
    """The ids of the `count` most likely tokens, the first first; equally likely ones by id."""
    count = min(count, len(scores))
    if not count:
        return torch.zeros(0, dtype=torch.int64)
    if count < len(scores):
        last = scores.topk(count).values[-1]
        ids = torch.nonzero(scores >= last).squeeze(-1)
        order = torch.sort(scores[ids], descending=True, stable=True).indices
        best = ids[order][:count]
    else:
        best = torch.sort(scores, descending=True, stable=True).indices
    return best[scores[best] > -torch.inf]
