"""Filters that few rows use, and those after which they come: top_n_sigma, top-k, typical_p, top-p, min-p, xtc, in this
order, on the adjusted logits of the rows whose duty they are. What is dropped becomes -infinity.

One program a row reads it a few times; a threshold is the largest number that leaves enough, found over its bits by
trying four at a time. A row may take a millisecond. What they do is as in `engine/execution/sampler.py`.
"""

from __future__ import annotations

import math

import torch

from asyncllm.kernels.language import constexpr, jit, tl
from asyncllm.kernels.logit_adjustment import RowAdjustments
from asyncllm.kernels.logit_tiles import clean
from asyncllm.kernels.sampled_rows import FILTERS, LogitRows, RowSettings
from asyncllm.kernels.thresholds import number_of, order_of
from asyncllm.kernels.uniform_draw import philox4x32, uniform_draw

_BLOCK = 4096

_FILTERS = constexpr(FILTERS)


@jit
def _key(x: tl.tensor, highest: tl.tensor, factor: tl.tensor, middle: tl.tensor, TYPICAL: tl.constexpr) -> tl.tensor:
    """What is to be as large as can be: the logit, or minus the distance of its surprise from the expected one."""
    if TYPICAL:
        return -tl.abs((x - highest) * factor - middle)
    return x


@jit
def _is_kept(
    x: tl.tensor, low: tl.tensor, nearest: tl.tensor, highest: tl.tensor, factor: tl.tensor, middle: tl.tensor
) -> tl.tensor:
    """By the filters so far: at least `low`, and within the distance `nearest` of what is typical."""
    return (x >= low) & (x > float("-inf")) & (_key(x, highest, factor, middle, True) >= nearest)


@jit
def _mass(
    source: tl.tensor,
    low: tl.tensor,
    nearest: tl.tensor,
    highest: tl.tensor,
    factor: tl.tensor,
    middle: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """The sum of exp((x - highest) * factor) over what is kept, as float64."""
    total = tl.zeros([], tl.float64)
    for start in range(0, SIZE, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        x = tl.load(source + ids, mask=ids < SIZE, other=float("-inf"))
        kept = _is_kept(x, low, nearest, highest, factor, middle)
        total += tl.sum(tl.where(kept, tl.exp((x - highest) * factor), 0.0), axis=0).to(tl.float64)
    return total


@jit
def _largest_threshold(
    source: tl.tensor,
    low: tl.tensor,
    nearest: tl.tensor,
    need: tl.tensor,
    highest: tl.tensor,
    factor: tl.tensor,
    middle: tl.tensor,
    BY_COUNT: tl.constexpr,
    TYPICAL: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """The largest threshold at which the kept tokens whose key reaches it number `need` (or hold so much), if any."""
    bottom = order_of(tl.full([], float("-inf"), tl.float32)).to(tl.int64)
    top = order_of(tl.full([], float("inf"), tl.float32)).to(tl.int64)
    marks_of = tl.arange(0, 4)
    while top - bottom > 1:
        step = (top - bottom + 3) // 4
        marks = bottom + step * (1 + marks_of)
        limits = tl.minimum(marks, 0x7F800000).to(tl.int32)
        sums = tl.zeros([4, BLOCK], tl.float32)
        for start in range(0, SIZE, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            x = tl.load(source + ids, mask=ids < SIZE, other=float("-inf"))
            kept = _is_kept(x, low, nearest, highest, factor, middle)
            measure = kept.to(tl.float32)
            if not BY_COUNT:
                measure = tl.where(kept, tl.exp((x - highest) * factor), 0.0)
            orders = order_of(tl.where(kept, _key(x, highest, factor, middle, TYPICAL), float("-inf")))
            sums += tl.where(orders[None, :] >= limits[:, None], measure[None, :], 0.0)
        held = tl.sum(sums.to(tl.float64), axis=1)
        passed = tl.sum(((held >= need) & (marks < top)).to(tl.int64), axis=0)
        top = tl.minimum(top, bottom + step * (passed + 1))
        bottom += step * passed
    return number_of(bottom.to(tl.int32))


@jit
def _rare_filters_kernel(
    adjusted: tl.tensor,
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
) -> None:
    index = tl.program_id(0)
    if index >= tl.load(num_rows):
        return
    row = tl.load(rows + index)
    temperature = tl.load(temperatures + row)
    if ((tl.load(duties + row) & _FILTERS) == 0) | (temperature <= 0.0):
        return
    source = adjusted + index.to(tl.int64) * ADJUSTED_STRIDE
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
    k = tl.load(top_ks + row)
    if (k > 0) & (k < SIZE):
        bound = _largest_threshold(
            source, low, nearest, k.to(tl.float64), highest, factor, middle, True, False, SIZE, BLOCK
        )
        low = tl.maximum(low, bound)
    share = tl.load(typical_ps + row)
    if share < 1.0:
        total = _mass(source, low, nearest, highest, factor, middle, SIZE, BLOCK)
        expected = tl.zeros([], tl.float64)
        for start in range(0, SIZE, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            x = tl.load(source + ids, mask=ids < SIZE, other=float("-inf"))
            scaled = tl.where(_is_kept(x, low, nearest, highest, factor, middle), (x - highest) * factor, 0.0)
            weight = tl.where(_is_kept(x, low, nearest, highest, factor, middle), tl.exp(scaled), 0.0)
            expected += tl.sum(scaled * weight, axis=0).to(tl.float64)
        middle = (expected / total).to(tl.float32)  # surprise - expected surprise = middle - scaled logit
        nearest = _largest_threshold(
            source, low, nearest, share.to(tl.float64) * total, highest, factor, middle, False, True, SIZE, BLOCK
        )
    share = tl.load(top_ps + row)
    if share < 1.0:
        total = _mass(source, low, nearest, highest, factor, middle, SIZE, BLOCK)
        bound = _largest_threshold(
            source, low, nearest, share.to(tl.float64) * total, highest, factor, middle, False, False, SIZE, BLOCK
        )
        low = tl.maximum(low, bound)
    share = tl.load(min_ps + row)
    if share > 0.0:
        peak = tl.full([], float("-inf"), tl.float32)
        for start in range(0, SIZE, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            x = tl.load(source + ids, mask=ids < SIZE, other=float("-inf"))
            x = tl.where(_is_kept(x, low, nearest, highest, factor, middle), x, float("-inf"))
            peak = tl.maximum(peak, tl.max(x, axis=0))
        low = tl.maximum(low, peak + temperature * tl.log(share))
    high = tl.full([], float("inf"), tl.float32)
    chance = tl.load(xtc_probabilities + row)
    if chance > 0.0:
        uniform = uniform_draw(tl.load(seeds + row), tl.load(positions + index).to(tl.int64), tl.load(choices + row), 1)
        if uniform <= chance.to(tl.float64):
            total = _mass(source, low, nearest, highest, factor, middle, SIZE, BLOCK)
            enough = (tl.load(xtc_thresholds + row).to(tl.float64) * total).to(tl.float32)
            for start in range(0, SIZE, BLOCK):
                ids = start + tl.arange(0, BLOCK)
                x = tl.load(source + ids, mask=ids < SIZE, other=float("-inf"))
                chosen = _is_kept(x, low, nearest, highest, factor, middle)
                chosen &= tl.exp((x - highest) * factor) >= enough
                high = tl.minimum(high, tl.min(tl.where(chosen, x, float("inf")), axis=0))
    tl.debug_barrier()
    for start in range(0, SIZE, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        x = tl.load(source + ids, mask=ids < SIZE, other=float("-inf"))
        kept = _is_kept(x, low, nearest, highest, factor, middle) & (x <= high)
        tl.store(source + ids, float("-inf"), mask=(kept == 0) & (ids < SIZE))


def filter_rare_rows(
    adjusted: torch.Tensor, where: LogitRows, settings: RowSettings, adjustments: RowAdjustments
) -> None:
    """Filter adjusted [n, at least vocabulary] float32 of the drawn rows whose duty is `FILTERS`; the rest as
    `sample`."""
    if len(adjusted):
        _rare_filters_kernel[(len(adjusted),)](
            adjusted,
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
