"""Filters that few rows use, and those after which they come: top_n_sigma, top-k, typical_p, top-p, min-p, xtc, in this
order, on the adjusted logits of the rows whose duty they are. What is dropped becomes -infinity.

One program a row reads it a few times. A threshold is the largest number that leaves enough: looked for over its bits,
four at a time, until few logits are left to decide between, which are listed. What they do is as in
`engine/execution/sampler.py`.
"""

from __future__ import annotations

import math

import torch

from asyncllm.kernels.language import constexpr, jit, tl
from asyncllm.kernels.logit_adjustment import RowAdjustments
from asyncllm.kernels.logit_tiles import clean
from asyncllm.kernels.sampled_rows import FILTERS, LogitRows, RowSettings, SamplingWorkspace
from asyncllm.kernels.thresholds import largest_threshold, number_of, order_of
from asyncllm.kernels.uniform_draw import philox4x32, uniform_draw

_BLOCK = 4096

_FILTERS = constexpr(FILTERS)


@jit
def _typicality(x: tl.tensor, highest: tl.tensor, factor: tl.tensor, middle: tl.tensor) -> tl.tensor:
    """Minus the distance of a logit's surprise from the expected one."""
    return -tl.abs((x - highest) * factor - middle)


@jit
def _is_kept(
    x: tl.tensor, low: tl.tensor, nearest: tl.tensor, highest: tl.tensor, factor: tl.tensor, middle: tl.tensor
) -> tl.tensor:
    """By the filters so far: at least `low`, and within the distance `nearest` of what is typical."""
    return (x >= low) & (x > float("-inf")) & (_typicality(x, highest, factor, middle) >= nearest)


@jit
def _read_kept(
    source: tl.tensor,
    start: tl.tensor,
    low: tl.tensor,
    nearest: tl.tensor,
    highest: tl.tensor,
    factor: tl.tensor,
    middle: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """A block of logits, and which of them are kept."""
    ids = start + tl.arange(0, BLOCK)
    x = tl.load(source + ids, mask=ids < SIZE, other=float("-inf"))
    return x, _is_kept(x, low, nearest, highest, factor, middle)


@jit
def _weigh(
    source: tl.tensor,
    low: tl.tensor,
    nearest: tl.tensor,
    highest: tl.tensor,
    factor: tl.tensor,
    middle: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The sum of exp((x - highest) * factor) over what is kept, as float64; and the mean of (x - highest) * factor by
    these weights."""
    total = tl.zeros([], tl.float64)
    expected = tl.zeros([], tl.float64)
    for start in range(0, SIZE, BLOCK):
        x, kept = _read_kept(source, start, low, nearest, highest, factor, middle, SIZE, BLOCK)
        scaled = tl.where(kept, (x - highest) * factor, 0.0)
        weights = tl.where(kept, tl.exp(scaled), 0.0)
        total += tl.sum(weights, axis=0).to(tl.float64)
        expected += tl.sum(scaled * weights, axis=0).to(tl.float64)
    return total, (expected / total).to(tl.float32)


@jit
def _search(
    source: tl.tensor,
    candidates: tl.tensor,
    low: tl.tensor,
    nearest: tl.tensor,
    need: tl.tensor,
    highest: tl.tensor,
    factor: tl.tensor,
    middle: tl.tensor,
    by_count: tl.tensor,
    by_typicality: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    CANDIDATES: tl.constexpr,
) -> tl.tensor:
    """The largest threshold at which the kept logits that reach it number `need` (or hold so much), if any; or those
    whose typicality does. Once few lie between the thresholds that still stand, it is found among these."""
    bottom = order_of(tl.full([], float("-inf"), tl.float32)).to(tl.int64)
    top = order_of(tl.full([], float("inf"), tl.float32)).to(tl.int64)
    above = tl.zeros([], tl.float64)  # what reaches `top` holds
    at_least = tl.zeros([], tl.int32)  # how many reach `top`
    at_most = tl.full([], SIZE, tl.int32)  # how many reach `bottom`
    ways = tl.arange(0, 4)
    # Where the list has room for all, no turn is compiled: Triton 3.6 fails on a loop of which it can tell that the
    # body never runs, if that loads by addresses of its own.
    if SIZE > CANDIDATES:
        while (top - bottom > 1) & (at_most - at_least > CANDIDATES):
            step = (top - bottom + 3) // 4
            marks = bottom + step * (1 + ways)
            limits = tl.minimum(marks, 0x7F800000).to(tl.int32)
            sums = tl.zeros([4, BLOCK], tl.float32)
            counts = tl.zeros([4, BLOCK], tl.int32)
            for start in range(0, SIZE, BLOCK):
                x, kept = _read_kept(source, start, low, nearest, highest, factor, middle, SIZE, BLOCK)
                key = tl.where(by_typicality, _typicality(x, highest, factor, middle), x)
                reaches = order_of(tl.where(kept, key, float("-inf")))[None, :] >= limits[:, None]
                sums += tl.where(reaches, tl.where(kept, tl.exp((x - highest) * factor), 0.0)[None, :], 0.0)
                counts += (reaches & kept[None, :]).to(tl.int32)
            count = tl.sum(counts, axis=1)
            held = tl.where(by_count, count.to(tl.float64), tl.sum(sums.to(tl.float64), axis=1))
            passed = tl.sum(((held >= need) & (marks < top)).to(tl.int32), axis=0)
            is_top = (ways == passed) & (marks < top)
            found = tl.sum(is_top.to(tl.int32), axis=0) > 0
            above = tl.where(found, tl.sum(tl.where(is_top, held, 0.0), axis=0), above)
            at_least = tl.where(found, tl.sum(tl.where(is_top, count, 0), axis=0), at_least)
            at_most = tl.where(passed > 0, tl.sum(tl.where(ways == passed - 1, count, 0), axis=0), at_most)
            top = tl.minimum(top, bottom + step * (passed + 1))
            bottom += step * passed
    threshold = number_of(bottom.to(tl.int32))
    if top - bottom > 1:
        filled = tl.zeros([], tl.int32)
        tl.debug_barrier()  # others may still read the list of before
        for start in range(0, SIZE, BLOCK):
            x, kept = _read_kept(source, start, low, nearest, highest, factor, middle, SIZE, BLOCK)
            key = tl.where(by_typicality, _typicality(x, highest, factor, middle), x)
            order = order_of(key).to(tl.int64)
            chosen = kept & (order >= bottom) & (order < top)
            place = filled + tl.cumsum(chosen.to(tl.int32), axis=0) - 1
            tl.store(candidates + place, x, mask=chosen)
            filled += tl.sum(chosen.to(tl.int32), axis=0)
        tl.debug_barrier()
        places = tl.arange(0, CANDIDATES)
        x = tl.load(candidates + places, mask=places < filled, other=float("-inf"))
        key = tl.where(by_typicality, _typicality(x, highest, factor, middle), x)
        weights = tl.where(by_count, 1.0, tl.exp((x - highest) * factor))
        measure = tl.where(places < filled, weights, 0.0).to(tl.float64)
        threshold = largest_threshold(key, measure, above, need, threshold, number_of((top - 1).to(tl.int32)), 4)
    return threshold


@jit
def _rare_filters_kernel(
    adjusted: tl.tensor,
    candidates: tl.tensor,
    rows: tl.tensor,
    positions: tl.tensor,
    num_rows: tl.tensor,
    duties: tl.tensor,
    temperatures: tl.tensor,
    top_ks: tl.tensor,
    top_ps: tl.tensor,
    min_ps: tl.tensor,
    seeds: tl.tensor,
    choices: tl.tensor,
    typical_ps: tl.tensor,
    top_n_sigmas: tl.tensor,
    xtc_probabilities: tl.tensor,
    xtc_thresholds: tl.tensor,
    ADJUSTED_STRIDE: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    CANDIDATES: tl.constexpr,
) -> None:
    index = tl.program_id(0)
    if index >= tl.load(num_rows):
        return
    row = tl.load(rows + index)
    temperature = tl.load(temperatures + row)
    if ((tl.load(duties + row) & _FILTERS) == 0) | (temperature <= 0.0):
        return
    source = adjusted + index.to(tl.int64) * ADJUSTED_STRIDE
    candidates += index.to(tl.int64) * CANDIDATES
    factor = 1.0 / temperature
    highest = tl.full([], float("-inf"), tl.float32)
    count = tl.zeros([], tl.int32)
    for start in range(0, SIZE, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        x = clean(tl.load(source + ids, mask=ids < SIZE, other=float("-inf")))
        tl.store(source + ids, x, mask=ids < SIZE)
        highest = tl.maximum(highest, tl.max(x, axis=0))
        count += tl.sum((x > float("-inf")).to(tl.int32), axis=0)
    tl.debug_barrier()
    if count == 0:
        return
    low = tl.full([], float("-inf"), tl.float32)
    nearest = low
    middle = tl.zeros([], tl.float32)
    sigmas = tl.load(top_n_sigmas + row)
    if sigmas > 0.0:
        total = tl.zeros([], tl.float64)
        for start in range(0, SIZE, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            x = tl.load(source + ids, mask=ids < SIZE, other=float("-inf"))
            total += tl.sum(tl.where(x > float("-inf"), x - highest, 0.0), axis=0).to(tl.float64)
        mean = (total / count).to(tl.float32)
        total = tl.zeros([], tl.float64)
        for start in range(0, SIZE, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            x = tl.load(source + ids, mask=ids < SIZE, other=float("-inf"))
            far = tl.where(x > float("-inf"), x - highest - mean, 0.0)
            total += tl.sum(far * far, axis=0).to(tl.float64)
        low = highest - sigmas * tl.sqrt((total / count).to(tl.float32))
    top_k = tl.load(top_ks + row)
    typical_p = tl.load(typical_ps + row)
    top_p = tl.load(top_ps + row)
    for stage in range(0, 3):  # top-k, typical_p, top-p; one after another, since a search is much code
        by_count = stage == 0
        by_typicality = stage == 1
        share = tl.where(by_typicality, typical_p, top_p)
        if tl.where(by_count, (top_k > 0) & (top_k < SIZE), share < 1.0):
            total, expected = _weigh(source, low, nearest, highest, factor, middle, SIZE, BLOCK)
            # surprise - expected surprise = expected scaled logit - scaled logit
            middle = tl.where(by_typicality, expected, middle)
            need = tl.where(by_count, top_k.to(tl.float64), share.to(tl.float64) * total)
            bound = _search(
                source, candidates, low, nearest, need, highest, factor, middle, by_count, by_typicality,
                SIZE, BLOCK, CANDIDATES,
            )  # fmt: skip
            low = tl.where(by_typicality, low, tl.maximum(low, bound))
            nearest = tl.where(by_typicality, bound, nearest)
    min_p = tl.load(min_ps + row)
    if min_p > 0.0:
        peak = tl.full([], float("-inf"), tl.float32)
        for start in range(0, SIZE, BLOCK):
            x, kept = _read_kept(source, start, low, nearest, highest, factor, middle, SIZE, BLOCK)
            peak = tl.maximum(peak, tl.max(tl.where(kept, x, float("-inf")), axis=0))
        low = tl.maximum(low, peak + temperature * tl.log(min_p))
    high = tl.full([], float("inf"), tl.float32)
    chance = tl.load(xtc_probabilities + row)
    if chance > 0.0:
        uniform = uniform_draw(tl.load(seeds + row), tl.load(positions + index).to(tl.int64), tl.load(choices + row), 1)
        if uniform <= chance.to(tl.float64):
            total, _expected = _weigh(source, low, nearest, highest, factor, middle, SIZE, BLOCK)
            enough = (tl.load(xtc_thresholds + row).to(tl.float64) * total).to(tl.float32)
            for start in range(0, SIZE, BLOCK):
                x, kept = _read_kept(source, start, low, nearest, highest, factor, middle, SIZE, BLOCK)
                chosen = kept & (tl.exp((x - highest) * factor) >= enough)
                high = tl.minimum(high, tl.min(tl.where(chosen, x, float("inf")), axis=0))
    tl.debug_barrier()
    for start in range(0, SIZE, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        x, kept = _read_kept(source, start, low, nearest, highest, factor, middle, SIZE, BLOCK)
        tl.store(source + ids, float("-inf"), mask=((kept & (x <= high)) == 0) & (ids < SIZE))


def filter_rare_rows(
    adjusted: torch.Tensor,
    where: LogitRows,
    settings: RowSettings,
    adjustments: RowAdjustments,
    workspace: SamplingWorkspace,
) -> None:
    """Filter adjusted [n, at least vocabulary] float32 of the drawn rows whose duty is `FILTERS`; the rest as
    `sample`."""
    if len(adjusted):
        _rare_filters_kernel[(len(adjusted),)](
            adjusted,
            workspace.candidates,
            where.rows,
            where.positions,
            where.num_rows,
            adjustments.integers("duties"),
            *settings.draw_arguments(),
            adjustments.floats("typical_p"),
            adjustments.floats("top_n_sigma"),
            adjustments.floats("xtc_probability"),
            adjustments.floats("xtc_threshold"),
            ADJUSTED_STRIDE=adjusted.stride(0),
            SIZE=where.vocabulary,
            BLOCK=_BLOCK,
            CANDIDATES=workspace.candidates.shape[1],
            num_warps=16,
        )


def filter_rare_rows_reference(
    adjusted: torch.Tensor, where: LogitRows, settings: RowSettings, adjustments: RowAdjustments
) -> None:
    """`filter_rare_rows` in plain torch, row by row, in float64."""
    for i in range(int(where.num_rows)):
        row = int(where.rows[i])
        temperature = float(settings.temperature[row])
        if not int(adjustments.integers("duties")[row]) & FILTERS or temperature == 0.0:
            continue
        x = adjusted[i, : where.vocabulary]
        x.nan_to_num_(-torch.inf, torch.finfo(torch.float32).max, -torch.inf)
        if not bool((x > -torch.inf).any()):
            continue
        scaled = x.double() / temperature
        sigmas, k = float(adjustments.floats("top_n_sigma")[row]), int(settings.top_k[row])
        if sigmas > 0.0:
            finite = scaled[scaled > -torch.inf]
            scaled[scaled < scaled.max() - sigmas * finite.std(correction=0)] = -torch.inf
        if 0 < k < where.vocabulary:
            scaled[scaled < scaled.sort(descending=True).values[k - 1]] = -torch.inf
        _drop_unlikely(scaled, settings, adjustments, row)
        chance = float(adjustments.floats("xtc_probability")[row])
        if chance > 0.0:
            seed = int(settings.seed[row]) & (2**64 - 1)
            words = philox4x32(seed, int(where.positions[i]), int(settings.choice[row]), 1)
            if ((words[0] >> 8) + 0.5) * 2.0**-24 <= chance:
                chosen = scaled[scaled.softmax(0) >= float(adjustments.floats("xtc_threshold")[row])]
                if len(chosen):
                    scaled[scaled > chosen.min()] = -torch.inf
        x[scaled == -torch.inf] = -torch.inf


def _drop_unlikely(scaled: torch.Tensor, settings: RowSettings, adjustments: RowAdjustments, row: int) -> None:
    """typical_p, top-p, min-p."""
    share = float(adjustments.floats("typical_p")[row])
    if share < 1.0:
        surprise = -scaled.log_softmax(0)
        expected = torch.where(surprise < torch.inf, surprise * (-surprise).exp(), 0.0).sum()
        distance = (surprise - expected).abs()
        nearest = distance.sort()
        held = scaled.softmax(0)[nearest.indices].cumsum(0)
        scaled[distance > nearest.values[min(int((held < share).sum()), len(scaled) - 1)]] = -torch.inf
    share = float(settings.top_p[row])
    if share < 1.0:
        best = scaled.sort(descending=True).values
        held = best.softmax(0).cumsum(0)
        scaled[scaled < best[min(int((held < share).sum()), len(scaled) - 1)]] = -torch.inf
    share = float(settings.min_p[row])
    if share > 0.0:
        scaled[scaled < scaled.max() + math.log(share)] = -torch.inf
