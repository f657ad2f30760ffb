"""From logits to tokens: a function of each row alone.

Order: suppressed ids, temperature, top_k, top_p, min_p, draw. Each of the three filters keeps the most likely tokens
of those the one before kept, and every token that is as likely as the last one kept; so together they are one lower
bound on the logit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncllm.engine.execution.philox import uniform_draws

_NUCLEUS_CANDIDATES = 1024
"""top_p first looks at this many tokens, and sorts the whole vocabulary only where they do not suffice."""


@dataclass(frozen=True, slots=True)
class SampledRows:
    """The sampling settings of the rows of a step that sample: arrays of one element per row."""

    temperature: NDArray[np.float32]  # 0 is greedy
    top_k: NDArray[np.int64]  # 0 keeps all
    top_p: NDArray[np.float32]  # 1 keeps all
    min_p: NDArray[np.float32]  # 0 keeps all
    seed: NDArray[np.uint64]
    choice: NDArray[np.int64]
    position: NDArray[np.int64]  # of the token to be sampled
    suppressed: Sequence[tuple[int, NDArray[np.int64]]] = ()  # (row, ids that it may not give now)


def sample(logits: Tensor, rows: SampledRows) -> NDArray[np.int64]:
    """One token id per row of `logits` [rows, vocabulary] float32, in which suppressed ids are overwritten."""
    for row, ids in rows.suppressed:
        logits[row, torch.from_numpy(ids)] = -torch.inf
    drawn = np.flatnonzero(rows.temperature > 0)
    if not len(drawn):
        return logits.argmax(-1).numpy()
    if len(drawn) == len(rows.temperature):
        return _draw(logits, rows, drawn)
    token_ids = logits.argmax(-1).numpy()
    token_ids[drawn] = _draw(logits[torch.from_numpy(drawn)], rows, drawn)
    return token_ids


def _draw(logits: Tensor, rows: SampledRows, drawn: NDArray[np.int64]) -> NDArray[np.int64]:
    """`logits` [drawn, vocabulary] of these rows."""
    # The largest becomes 0 before the division, so that no temperature makes it overflow.
    scaled = (logits - logits.amax(-1, keepdim=True)).div_(torch.from_numpy(rows.temperature[drawn])[:, None])
    top_k, top_p, min_p = rows.top_k[drawn], rows.top_p[drawn], rows.min_p[drawn]
    filtered = np.flatnonzero((top_k > 0) | (top_p < 1) | (min_p > 0))
    if len(filtered):
        some = torch.from_numpy(filtered)
        kept = scaled[some]
        bounds = _lower_bounds(kept, top_k[filtered], top_p[filtered], min_p[filtered])
        scaled[some] = kept.masked_fill_(kept < bounds[:, None], -torch.inf)
    cumulative = scaled.exp_().cumsum(-1)
    uniform = torch.from_numpy(uniform_draws(rows.seed[drawn], rows.position[drawn], rows.choice[drawn]))
    # The first id at which the sum reaches its share; a sum grows only at ids that were kept.
    target = uniform[:, None] * cumulative[:, -1:]
    found = torch.searchsorted(cumulative, target).squeeze(-1)
    return found.clamp_(max=logits.shape[-1] - 1).numpy()  # past the end where a row is not a number


def _lower_bounds(
    scaled: Tensor, top_k: NDArray[np.int64], top_p: NDArray[np.float32], min_p: NDArray[np.float32]
) -> Tensor:
    """The smallest logit that each row [vocabulary], whose largest is 0, keeps."""
    by_likelihood = torch.from_numpy(min_p).log()  # log(min_p) is where a token is min_p times as likely as the first
    by_count, by_mass = torch.full_like(by_likelihood, -torch.inf), torch.full_like(by_likelihood, -torch.inf)
    if (top_k > 0).any():
        limited = np.flatnonzero(top_k > 0)
        rows = torch.from_numpy(limited)
        counts = torch.from_numpy(top_k[limited]).clamp(max=scaled.shape[-1])
        best = scaled[rows].topk(int(counts.max())).values
        by_count[rows] = best.gather(-1, counts[:, None] - 1).squeeze(-1)
    if (top_p < 1).any():
        limited = np.flatnonzero(top_p < 1)
        rows = torch.from_numpy(limited)
        by_mass[rows] = _nucleus_bounds(scaled[rows], by_count[rows], torch.from_numpy(top_p[limited]).double())
    return torch.maximum(torch.maximum(by_likelihood, by_count), by_mass)


def _nucleus_bounds(scaled: Tensor, floor: Tensor, share: Tensor) -> Tensor:
    """The logit of the last of the most likely tokens that together have `share` of the mass at or above `floor`."""
    weights = scaled.exp().masked_fill_(scaled < floor[:, None], 0.0)
    wanted = share * weights.sum(-1, dtype=torch.float64)
    best, ids = weights.topk(min(_NUCLEUS_CANDIDATES, weights.shape[-1]))
    reached = best.cumsum(-1, dtype=torch.float64)
    if bool((reached[:, -1] < wanted).any()):
        best, ids = weights.sort(-1, descending=True)
        reached = best.cumsum(-1, dtype=torch.float64)
    last = (reached < wanted[:, None]).sum(-1, keepdim=True).clamp_(max=reached.shape[-1] - 1)
    return scaled.gather(-1, ids.gather(-1, last)).squeeze(-1)
