"""From logits to tokens: a function of each row alone.

Order: bans, bias and penalties (`logit_adjustment`), temperature, top_n_sigma, top_k, typical_p, top_p, min_p, xtc,
draw. A filter looks at what the ones before have kept, and keeps with a token every other that is as likely. Most of
them keep the most likely tokens; so together these are one lower bound on the logit, found for all rows at once. The
others (top_n_sigma, typical_p, xtc) are rarely used, and go row by row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncllm.engine.execution.logit_adjustment import LogitAdjustment, mask_logits
from asyncllm.engine.execution.philox import uniform_draws
from asyncllm.engine.plan import NO_TOKEN, Float32Array, RowBias, RowLogits, RowSampling
from asyncllm.kernels.cpu.build import Library
from asyncllm.kernels.cpu.draw import draw_tokens, draw_uniform

_SORTED = 4096
"""top_p sorts vocabularies up to this size."""
_BIN_SHIFT = 15
"""The bits of a float32 that do not tell where top_p and typical_p count it: the sign apart, 16 others do."""
_LARGEST = torch.finfo(torch.float32).max
_TILE = 256
"""Tokens whose weights the draw adds up at once."""
XTC_STREAM = 1
"""Which of a position's numbers decides over xtc; the draw's own is 0."""


@dataclass(frozen=True, slots=True)
class SamplerForm:
    """How a runner samples."""

    processed_logprobs: bool = False  # log-probabilities are those of what is drawn from, not of the model's own logits
    library: Library | None = None  # kernels that draw; None: torch's operators


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
    adjustments: Sequence[tuple[int, LogitAdjustment]] = ()  # (row, what it does to its logits)
    rare: Sequence[tuple[int, RowSampling]] = field(default=())  # (row, its settings) of rows with a rare filter
    masks: NDArray[np.uint32] | None = None  # [rows, words] what a late row may give, see `plan.Mask`
    biases: Sequence[tuple[int, RowBias | RowLogits]] = ()  # (late row, what the host adds or puts in their place)


def has_rare_filter(sampling: RowSampling) -> bool:
    """Whether a row must be among `SampledRows.rare`."""
    return sampling.top_n_sigma > 0 or sampling.typical_p < 1 or sampling.xtc_probability > 0


def sample(logits: Tensor, rows: SampledRows, library: Library | None = None) -> NDArray[np.int64]:
    """One token id per row of `logits` [rows, vocabulary] float32, which are adjusted in place; or `NO_TOKEN`.

    Not-a-number counts as -infinity, and +infinity as the largest number. With a `library`, tokens are drawn by its
    kernel.
    """
    adjust(logits, rows)
    token_ids = _sample_some(logits, rows, np.arange(len(logits)), library)
    if (odd := np.flatnonzero(token_ids == NO_TOKEN)).size:
        numbers = logits[torch.from_numpy(odd)].nan_to_num_(-torch.inf, _LARGEST, -torch.inf)
        has_any = (numbers.amax(-1) > -torch.inf).numpy()
        token_ids[odd[has_any]] = _sample_some(numbers[torch.from_numpy(has_any)], rows, odd[has_any], library)
    return token_ids


def _sample_some(
    logits: Tensor, rows: SampledRows, some: NDArray[np.int64], library: Library | None
) -> NDArray[np.int64]:
    """Of adjusted `logits` [some, vocabulary] of these rows. `NO_TOKEN` where one of a row's is not a number, or none
    above -infinity, and for a drawn row where one is +infinity."""
    drawn = np.flatnonzero(rows.temperature[some] > 0)
    if len(drawn) == len(some):
        return _draw_rows(logits, rows, some, library)
    values = logits.numpy()
    token_ids: NDArray[np.int64] = values.argmax(-1)  # torch's own takes ten times as long
    token_ids[~(values[np.arange(len(some)), token_ids] > -np.inf)] = NO_TOKEN  # not-a-number passes for the largest
    if len(drawn):
        token_ids[drawn] = _draw_rows(logits[torch.from_numpy(drawn)], rows, some[drawn], library)
    return token_ids


def _draw_rows(
    logits: Tensor, rows: SampledRows, drawn: NDArray[np.int64], library: Library | None
) -> NDArray[np.int64]:
    """Of `logits` [drawn, vocabulary] of these rows; `NO_TOKEN` as in `_sample_some`."""
    if library is None:
        return _draw(_filtered(logits, rows, drawn), rows, drawn)
    temperature = torch.from_numpy(rows.temperature[drawn])
    if rows.rare or ((rows.top_k[drawn] > 0) | (rows.top_p[drawn] < 1) | (rows.min_p[drawn] > 0)).any():
        logits, temperature = _filtered(logits, rows, drawn), torch.ones_like(temperature)
    seed, position, choice = rows.seed.view(np.int64)[drawn], rows.position[drawn], rows.choice[drawn]
    uniform = draw_uniform(library, torch.from_numpy(seed), torch.from_numpy(position), torch.from_numpy(choice))
    token_ids: NDArray[np.int64] = draw_tokens(library, logits, temperature, uniform).numpy()
    return token_ids


def adjust(logits: Tensor, rows: SampledRows) -> None:
    """Bans, bias and penalties, and what the host has to say, in place."""
    if rows.masks is not None:
        mask_logits(logits, rows.masks)
    for row, ids in rows.suppressed:
        logits[row, torch.from_numpy(ids)] = -torch.inf
    for row, adjustment in rows.adjustments:
        adjustment.apply(logits[row])
    for row, bias in rows.biases:
        values = torch.from_numpy(bias.values)
        if isinstance(bias, RowLogits):
            logits[row] = values
        else:
            logits[row].index_add_(0, torch.from_numpy(bias.token_ids), values)


def processed(logits: Tensor, rows: SampledRows, some: NDArray[np.int64]) -> Tensor:
    """Of adjusted `logits` [rows, vocabulary], these rows' as they are drawn from; a greedy row's stay as they are."""
    result = logits[torch.from_numpy(some)]
    drawn = np.flatnonzero(rows.temperature[some] > 0)
    if len(drawn):
        result[torch.from_numpy(drawn)] = _filtered(result[torch.from_numpy(drawn)], rows, some[drawn])
    return result


def _filtered(logits: Tensor, rows: SampledRows, drawn: NDArray[np.int64]) -> Tensor:
    """A copy of `logits` [drawn, vocabulary] of these rows: over the temperature, -inf where a filter drops a token."""
    # The largest becomes 0 before the division, so that no temperature makes it overflow.
    scaled = logits - logits.amax(-1, keepdim=True)
    temperature = rows.temperature[drawn]
    if (temperature != 1).any():
        scaled.div_(torch.from_numpy(temperature)[:, None])
    top_k, top_p, min_p = rows.top_k[drawn], rows.top_p[drawn], rows.min_p[drawn]
    by_bound = (top_k > 0) | (top_p < 1) | (min_p > 0)
    for row, sampling in rows.rare:
        place = int(np.searchsorted(drawn, row))
        if place < len(drawn) and drawn[place] == row:
            by_bound[place] = False
            _filter_row(scaled[place], sampling, int(rows.position[row]))
    filtered = np.flatnonzero(by_bound)
    if len(filtered):
        some = torch.from_numpy(filtered)
        kept = scaled[some]
        bounds = _lower_bounds(kept, top_k[filtered], top_p[filtered], min_p[filtered])
        scaled[some] = kept.masked_fill_(kept < bounds[:, None], -torch.inf)
    return scaled


def _draw(scaled: Tensor, rows: SampledRows, drawn: NDArray[np.int64]) -> NDArray[np.int64]:
    """Of `scaled` [drawn, vocabulary], which is overwritten.

    The first id at which the running sum of the weights reaches its share: found among the sums of tiles, then in one
    tile. A sum grows only at ids that were kept.
    """
    weights, vocabulary = scaled.exp_(), scaled.shape[-1]
    whole = vocabulary // _TILE * _TILE
    tiles = weights[:, :whole].view(len(weights), whole // _TILE, _TILE).sum(-1)
    ends = torch.cat((tiles, weights[:, whole:].sum(-1, keepdim=True)), dim=-1).cumsum(-1)
    uniform = torch.from_numpy(uniform_draws(rows.seed[drawn], rows.position[drawn], rows.choice[drawn]))
    target = uniform[:, None] * ends[:, -1:]
    tile = torch.searchsorted(ends, target).clamp_(max=ends.shape[-1] - 1)  # past the end where a sum is no number
    before = torch.where(tile > 0, ends.gather(-1, (tile - 1).clamp_(min=0)), 0.0)
    ids = tile * _TILE + torch.arange(_TILE)
    sums = weights.gather(-1, ids.clamp(max=vocabulary - 1)).masked_fill_(ids >= vocabulary, 0.0).cumsum(-1)
    # the tile's weights may add up to less one by one
    found = torch.searchsorted(sums, torch.minimum(target - before, sums[:, -1:]))
    token_ids = (tile * _TILE + found).squeeze(-1).clamp_(max=vocabulary - 1)
    return torch.where(ends[:, -1] > 0, token_ids, NO_TOKEN).numpy()


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
        by_mass[rows] = _top_p_bounds(scaled[rows], by_count[rows], torch.from_numpy(top_p[limited]).double())
    return torch.maximum(torch.maximum(by_likelihood, by_count), by_mass)


def _top_p_bounds(scaled: Tensor, floor: Tensor, share: Tensor) -> Tensor:
    """The logit of the last of the most likely tokens that together have `share` of the mass at or above `floor`."""
    weights = scaled.exp().masked_fill_(scaled < floor[:, None], 0.0)
    wanted = share * weights.sum(-1, dtype=torch.float64)
    if scaled.shape[-1] <= _SORTED:
        best, ids = weights.sort(-1, descending=True)
        reached = best.cumsum(-1, dtype=torch.float64)
        last = (reached < wanted[:, None]).sum(-1, keepdim=True).clamp_(max=reached.shape[-1] - 1)
        return scaled.gather(-1, ids.gather(-1, last)).squeeze(-1)
    rows = zip(scaled.numpy(), weights.numpy(), wanted.tolist(), strict=True)
    return torch.tensor([_mass_bound(*row) for row in rows], dtype=torch.float32)


def _mass_bound(order: Float32Array, weights: Float32Array, wanted: float) -> float:
    """The number of `order` [vocabulary], none over 0, down to which, from the largest, the weights add up to `wanted`.

    No sort: the tokens are counted into bins by the upper bits of their numbers, and only those of one bin are sorted.
    """
    # of a number below 0, the bits without the sign grow as the number falls
    bins = (order.view(np.int32) & 0x7FFFFFFF) >> _BIN_SHIFT
    reached = np.bincount(bins, weights).cumsum()  # float64
    bin = min(int(reached.searchsorted(wanted)), int(bins.max()))
    tokens = np.flatnonzero(bins == bin)
    if not len(tokens):  # they are not numbers
        return -np.inf
    tokens = tokens[np.argsort(-order[tokens], kind="stable")]
    held = weights[tokens].cumsum(dtype=np.float64) + (reached[bin - 1] if bin else 0.0)
    return float(order[tokens[min(int(held.searchsorted(wanted)), len(tokens) - 1)]])


def _filter_row(scaled: Tensor, sampling: RowSampling, position: int) -> None:
    """All filters on one row [vocabulary], in their order and in place."""
    if sampling.top_n_sigma > 0:
        finite = scaled[scaled > -torch.inf].double()
        deviation = float(finite.std(correction=0)) if len(finite) else 0.0
        scaled[scaled < scaled.max() - sampling.top_n_sigma * deviation] = -torch.inf
    if 0 < sampling.top_k < len(scaled):
        scaled[scaled < scaled.topk(sampling.top_k).values[-1]] = -torch.inf
    if sampling.typical_p < 1:
        _keep_mass(scaled, _typicality(scaled), sampling.typical_p)
    if sampling.top_p < 1:
        _keep_mass(scaled, scaled, sampling.top_p)
    if sampling.min_p > 0:
        scaled[scaled < scaled.max() + float(torch.tensor(sampling.min_p).log())] = -torch.inf
    if sampling.xtc_probability > 0 and drops_first_choices(sampling, position):
        shares = scaled.double().softmax(-1)
        chosen = scaled[shares >= sampling.xtc_threshold]
        if len(chosen):
            scaled[scaled > chosen.min()] = -torch.inf


def _typicality(scaled: Tensor) -> Tensor:
    """Minus how far each token's surprise is from the expected one; -infinity where it has no probability.

    Meister et al., "Locally typical sampling", TACL 2023.
    """
    weights = scaled.exp()
    sums = (weights * scaled).masked_fill_(weights == 0, 0.0).sum(dtype=torch.float64)
    # a surprise is -scaled, but for what is the same for all
    return (scaled - float(sums / weights.sum(dtype=torch.float64))).abs_().neg_()


def _keep_mass(scaled: Tensor, order: Tensor, part: float) -> None:
    """Of a row [vocabulary], in place: those first in this order, the largest, none over 0, that hold so much of it."""
    weights = scaled.exp()
    wanted = float(np.float32(part)) * float(weights.sum(dtype=torch.float64))
    scaled[order < _mass_bound(order.numpy(), weights.numpy(), wanted)] = -torch.inf


def drops_first_choices(sampling: RowSampling, position: int) -> bool:
    """Whether xtc acts on the token at this position: by a number of its own, beside the draw's."""
    (uniform,) = uniform_draws(
        np.array([sampling.seed], np.uint64), np.array([position]), np.array([sampling.choice]), XTC_STREAM
    )
    return bool(uniform <= np.float32(sampling.xtc_probability))
