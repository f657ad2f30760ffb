"""Draws of rows of which the filters may keep more logits than a short list holds. As `sampling` has them, exactly.

One program a row, and about one reading of it for a filter that looks for a threshold (top-k, top-p). A sample of the
row tells within what bounds the threshold should lie. The row is read once: what is above the bounds is counted and
weighed, what is between them is listed, and so what was guessed is known: whether the threshold lies there. It is found
in the list then, and the draw takes what tiles hold from the same reading and the list. Where the guess was wrong, the
bounds are moved to their neighbours; where that is wrong too, or the list is too short (many equal logits), the range
that is left is halved until it holds no more than the list has room for. Sums over tiles and over the list are float64.

Written for few readings, and not yet timed on a GPU: `python -m benchmarks.sampling`.
"""

from __future__ import annotations

import torch

from asyncllm.kernels.language import ceil_div, jit, next_power_of_2, tl
from asyncllm.kernels.logit_tiles import TILE, draw_from_tiles, lower_bound, read_logits, tile_weights
from asyncllm.kernels.sampled_rows import AdjustedLogits, LogitRows, RowSettings, SamplingWorkspace
from asyncllm.kernels.thresholds import largest_threshold, number_of, order_of
from asyncllm.kernels.uniform_draw import uniform_draw

_AT_ONCE = 16
_WARPS = 8
_REGISTERS = 128  # two programs fit on a multiprocessor, so that 256 rows are all drawn at once
_SAMPLE = 8192
"""Logits that a guess looks at. Of 151,936 with a spread of 1, a top-p of 0.9 is then within 600 tokens (one standard
deviation), and the list has room for 1,800 on either side."""


@jit
def _look(
    source: tl.tensor,
    adjusted: tl.tensor,
    is_adjusted: tl.tensor,
    tops: tl.tensor,
    sums: tl.tensor,
    ends: tl.tensor,
    candidates: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    highest: tl.tensor,
    heat: tl.tensor,
    ADJUSTED: tl.constexpr,
    VOCABULARY: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    AT_ONCE: tl.constexpr,
    CANDIDATES: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Read the tiles that reach `low`; list what is in [low, high), in the order of tiles, as far as there is room.

    Returns how many logits are at or above `high` and what they weigh, then the same of those in [low, high). `sums`
    become the tiles' sums of what is at or above `high`, and `ends` where their parts of the list end.
    """
    factor = 1.0 / heat
    count = tl.zeros([], tl.int32)
    weight = tl.zeros([], tl.float64)
    filled = tl.zeros([], tl.int32)
    inside = tl.zeros([], tl.float64)
    tl.debug_barrier()  # others may still read what the look before this one has left
    for first in range(0, TILES, AT_ONCE):
        tiles = first + tl.arange(0, AT_ONCE)
        peaks = tl.load(tops + tiles, mask=tiles < TILES, other=float("-inf"))
        reaches = (peaks >= low) & (peaks > float("-inf"))
        ids = tiles[:, None] * TILE + tl.arange(0, TILE)[None, :]
        x = read_logits(source, adjusted, is_adjusted, ids, reaches[:, None] & (ids < VOCABULARY), ADJUSTED)
        shift = tl.where(peaks == float("-inf"), 0.0, peaks)
        weights = tl.exp((x - shift[:, None]) * factor)
        above = (x >= high) & (x > float("-inf"))
        listed = (x >= low) & (x < high) & (x > float("-inf"))
        scale = tl.exp((shift - highest) * factor).to(tl.float64)
        of_tile = tl.sum(tl.where(above, weights, 0.0), axis=1)
        tl.store(sums + tiles, of_tile, mask=tiles < TILES)
        count += tl.sum(tl.sum(above.to(tl.int32), axis=1), axis=0)
        weight += tl.sum(of_tile.to(tl.float64) * scale, axis=0)
        inside += tl.sum(tl.sum(tl.where(listed, weights, 0.0), axis=1).to(tl.float64) * scale, axis=0)
        counts = tl.sum(listed.to(tl.int32), axis=1)
        ended = filled + tl.cumsum(counts, axis=0)
        tl.store(ends + tiles, ended, mask=tiles < TILES)
        place = (ended - counts)[:, None] + tl.cumsum(listed.to(tl.int32), axis=1) - 1
        tl.store(candidates + place, x, mask=listed & (place < CANDIDATES))
        filled += tl.sum(counts, axis=0)
    tl.debug_barrier()
    return count, weight, filled, inside


@jit
def _guess(
    source: tl.tensor,
    adjusted: tl.tensor,
    is_adjusted: tl.tensor,
    floor: tl.tensor,
    lowest: tl.tensor,
    highest: tl.tensor,
    heat: tl.tensor,
    need: tl.tensor,
    spare: tl.tensor,
    BY_COUNT: tl.constexpr,
    ADJUSTED: tl.constexpr,
    VOCABULARY: tl.constexpr,
    SAMPLE: tl.constexpr,
    AIM: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Bounds between which the threshold of `_search` should lie, and some AIM logits: [low, high)."""
    places = tl.arange(0, SAMPLE)
    ids = places
    share = 1.0  # logits that one of the sample stands for
    if VOCABULARY > SAMPLE:  # neighbours of eight, evenly spread: the least that memory gives at once
        ids = ((places // 8).to(tl.int64) * (VOCABULARY - 8) // (SAMPLE // 8 - 1)).to(tl.int32) + places % 8
        share = VOCABULARY / SAMPLE
    x = read_logits(source, adjusted, is_adjusted, ids, ids < VOCABULARY, ADJUSTED)
    is_number = x > float("-inf")
    measure = tl.where(is_number, share, 0.0)
    if not BY_COUNT:
        measure = tl.where(is_number & (x >= floor), tl.exp((x - highest) * (1.0 / heat)) * share, 0.0)
    low = tl.maximum(tl.min(tl.where(is_number, x, highest), axis=0), lowest)
    span = highest - low
    near = span / 128.0
    steps = tl.arange(0, 4).to(tl.float32)
    for _ in range(6):
        span /= 4.0
        marks = low + span * steps
        is_above = x[None, :] >= marks[:, None]
        if BY_COUNT:
            passed = tl.sum(tl.where(is_above, measure[None, :], 0.0), axis=1) >= need.to(tl.float32)
        else:  # what lies under a threshold that is high up is of many small parts, so that a sample tells it well
            passed = tl.sum(tl.where(is_above, 0.0, measure[None, :]), axis=1) <= spare.to(tl.float32)
        low += span * tl.maximum(tl.sum(passed.to(tl.int32), axis=0) - 1, 0).to(tl.float32)
    distance = tl.where(is_number, tl.abs(x - low), float("inf"))
    neighbours = tl.sum(tl.where(distance <= near, share, 0.0), axis=0)
    reach = near * AIM / tl.maximum(neighbours, share)  # if all about here were as dense as near by
    fits = tl.sum(tl.where(distance[None, :] <= reach * (0.25 + 0.25 * steps)[:, None], share, 0.0), axis=1) <= AIM
    reach *= 0.25 * tl.maximum(tl.sum(fits.to(tl.int32), axis=0), 1).to(tl.float32)
    high = low + span + reach
    low = tl.maximum(low - reach, lowest)
    low = tl.where(low <= highest, low, lowest)  # a span of infinity makes no numbers
    high = tl.where(high > low, high, float("inf"))
    if tl.sum(tl.where(is_number & (x >= low), share, 0.0), axis=0) <= AIM:
        high = tl.full([], float("inf"), tl.float32)  # all that may be kept goes into the list
    return low, high


@jit
def _search(
    source: tl.tensor,
    adjusted: tl.tensor,
    is_adjusted: tl.tensor,
    tops: tl.tensor,
    sums: tl.tensor,
    ends: tl.tensor,
    candidates: tl.tensor,
    floor: tl.tensor,
    lowest: tl.tensor,
    highest: tl.tensor,
    heat: tl.tensor,
    need: tl.tensor,
    spare: tl.tensor,
    BY_COUNT: tl.constexpr,
    ADJUSTED: tl.constexpr,
    VOCABULARY: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    AT_ONCE: tl.constexpr,
    CANDIDATES: tl.constexpr,
    SAMPLE: tl.constexpr,
    AIM: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """The largest threshold of at least `lowest` at which the logits at or above it weigh `need`, or `lowest`.

    Or number `need`, where BY_COUNT. Of what is at least `floor`, `spare` may lie under it. Returns the threshold, then
    of the last look: its bounds, what is at or above the higher one weighs, and how many logits it listed.
    """
    least = lowest  # what is at or above this is enough, or this is the answer whether or not
    most = number_of(order_of(highest) + 1)  # what is at or above this is not
    at_least = tl.full([], VOCABULARY, tl.int32)  # logits at or above `least`, at most
    at_most = tl.zeros([], tl.int32)  # those at or above `most`
    low, high = _guess(
        source, adjusted, is_adjusted, floor, lowest, highest, heat, need, spare,
        BY_COUNT, ADJUSTED, VOCABULARY, SAMPLE, AIM,
    )  # fmt: skip
    high = tl.minimum(high, most)
    width = high - low
    threshold = least
    weight = tl.zeros([], tl.float64)
    filled = tl.zeros([], tl.int32)
    turn = tl.zeros([], tl.int32)
    settled = tl.zeros([], tl.int32)
    while settled == 0:
        count, weight, filled, inside = _look(
            source, adjusted, is_adjusted, tops, sums, ends, candidates, low, high, highest, heat,
            ADJUSTED, VOCABULARY, TILES, TILE, AT_ONCE, CANDIDATES,
        )  # fmt: skip
        above = count.to(tl.float64) if BY_COUNT else weight
        both = above + (filled.to(tl.float64) if BY_COUNT else inside)
        up = above >= need
        here = (up == 0) & ((both >= need) | (low <= least)) & (low < high)
        least = tl.where(up, high, tl.where(here, low, least))
        at_least = tl.where(up, count, tl.where(here, count + filled, at_least))
        most = tl.where(up, most, tl.where(here, high, low))
        at_most = tl.where(up, at_most, tl.where(here, count, count + filled))
        threshold = least
        if here & (filled <= CANDIDATES):
            places = tl.arange(0, CANDIDATES)
            x = tl.load(candidates + places, mask=places < filled, other=float("-inf"))
            measure = (places < filled).to(tl.float64)
            if not BY_COUNT:
                measure = tl.where(places < filled, tl.exp((x - highest) * (1.0 / heat)), 0.0).to(tl.float64)
            threshold = largest_threshold(x, measure, above, need, low, tl.minimum(high, highest), 4)
            settled += 1
        elif order_of(most).to(tl.int64) - order_of(least).to(tl.int64) <= 1:
            settled += 1
        else:
            if at_least - at_most <= CANDIDATES:
                low = least
                high = most
            elif (turn == 0) & (here == 0):
                low = tl.where(up, least, tl.maximum(least, most - width))
                high = tl.where(up, tl.minimum(most, least + width), most)
            else:
                low = _middle(least, most, turn)
                high = low
            turn += 1
    return threshold, low, high, weight, filled


@jit
def _middle(low: tl.tensor, high: tl.tensor, turn: tl.tensor) -> tl.tensor:
    """A number between the two, which are no neighbours: in turn that of their range, and that of their bits."""
    orders = order_of(low).to(tl.int64) + order_of(high).to(tl.int64)
    by_bits = number_of((orders >> 1).to(tl.int32))
    by_range = 0.5 * low + 0.5 * high
    return tl.where((turn % 2 == 1) & (by_range > low) & (by_range < high), by_range, by_bits)


@jit
def _draw_wide_kernel(
    token_ids: tl.tensor,
    row_token_ids: tl.tensor,
    is_wide: tl.tensor,
    tops: tl.tensor,
    sums: tl.tensor,
    ends: tl.tensor,
    candidates: tl.tensor,
    reached: tl.tensor,
    logits: tl.tensor,
    adjusted: tl.tensor,
    rows: tl.tensor,
    positions: tl.tensor,
    num_rows: tl.tensor,
    temperature: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    seed: tl.tensor,
    choice: tl.tensor,
    duties: tl.tensor,
    LOGITS_STRIDE: tl.constexpr,
    ADJUSTED_STRIDE: tl.constexpr,
    ADJUSTED: tl.constexpr,
    VOCABULARY: tl.constexpr,
    TILES: tl.constexpr,
    TILES_PAD: tl.constexpr,
    TILE: tl.constexpr,
    AT_ONCE: tl.constexpr,
    CANDIDATES: tl.constexpr,
    SAMPLE: tl.constexpr,
    AIM: tl.constexpr,
) -> None:
    index = tl.program_id(0)
    if index >= tl.load(num_rows):
        return
    if tl.load(is_wide + index) == 0:
        return
    row = tl.load(rows + index)
    heat = tl.load(temperature + row)
    k = tl.load(top_k + row)
    nucleus = tl.load(top_p + row)
    share = tl.load(min_p + row)
    is_adjusted = tl.zeros([], tl.int32)
    if ADJUSTED:
        is_adjusted = tl.load(duties + row)
        adjusted += index.to(tl.int64) * ADJUSTED_STRIDE
    tops += index * TILES
    sums += index * TILES
    ends += index * TILES
    candidates += index.to(tl.int64) * CANDIDATES
    reached += index.to(tl.int64) * CANDIDATES
    source = logits + index.to(tl.int64) * LOGITS_STRIDE
    tiles = tl.arange(0, TILES_PAD)
    places = tl.arange(0, CANDIDATES)
    peaks = tl.load(tops + tiles, mask=tiles < TILES, other=float("-inf"))
    highest = tl.max(peaks, axis=0)
    factor = 1.0 / heat
    weights = tile_weights(peaks, sums, highest, heat, TILES, TILES_PAD)
    total = tl.sum(weights.to(tl.float64), axis=0)
    threshold = lower_bound(
        peaks, highest, tl.sum(weights, axis=0), heat, k, nucleus, share, VOCABULARY, TILES, TILES_PAD
    )
    floor = tl.full([], float("-inf"), tl.float32)
    low = threshold  # bounds of the last look
    high = threshold
    filled = tl.full([], CANDIDATES + 1, tl.int32)  # of its list; more than there is room for: it is of no use
    above = tl.zeros([], tl.float64)  # what it found above its bounds
    if (k > 0) & (k < VOCABULARY):
        threshold, low, high, above, filled = _search(
            source, adjusted, is_adjusted, tops, sums, ends, candidates, floor, threshold, highest, heat,
            k.to(tl.float64), total, True,
            ADJUSTED, VOCABULARY, TILES, TILE, AT_ONCE, CANDIDATES, SAMPLE, AIM,
        )  # fmt: skip
        if (filled > CANDIDATES) | (threshold < low) | (threshold > high):
            low = threshold
            high = threshold
            _count, above, filled, _inside = _look(
                source, adjusted, is_adjusted, tops, sums, ends, candidates, low, high, highest, heat,
                ADJUSTED, VOCABULARY, TILES, TILE, AT_ONCE, CANDIDATES,
            )  # fmt: skip
        floor = threshold
        x = tl.load(candidates + places, mask=places < filled, other=float("-inf"))
        kept = tl.where((x >= floor) & (places < filled), tl.exp((x - highest) * factor), 0.0)
        total = above + tl.sum(kept.to(tl.float64), axis=0)
    if share > 0.0:
        threshold = tl.maximum(threshold, highest + heat * tl.log(share))
    if nucleus < 1.0:
        need = nucleus.to(tl.float64) * total
        if (filled <= CANDIDATES) & (above < need):
            x = tl.load(candidates + places, mask=places < filled, other=float("-inf"))
            kept = tl.where((x >= floor) & (places < filled), tl.exp((x - highest) * factor), 0.0)
            limit = tl.maximum(tl.minimum(high, highest), floor)
            bound = largest_threshold(x, kept.to(tl.float64), above, need, floor, limit, 4)
            threshold = tl.maximum(threshold, bound)
        else:
            threshold, low, high, above, filled = _search(
                source, adjusted, is_adjusted, tops, sums, ends, candidates, floor, threshold, highest, heat,
                need, total - need, False,
                ADJUSTED, VOCABULARY, TILES, TILE, AT_ONCE, CANDIDATES, SAMPLE, AIM,
            )  # fmt: skip
    if (filled > CANDIDATES) | (threshold < low) | (threshold > high):
        low = threshold
        high = threshold
        _count, above, filled, _inside = _look(
            source, adjusted, is_adjusted, tops, sums, ends, candidates, low, high, highest, heat,
            ADJUSTED, VOCABULARY, TILES, TILE, AT_ONCE, CANDIDATES,
        )  # fmt: skip
    x = tl.load(candidates + places, mask=places < filled, other=float("-inf"))
    kept = tl.where((x >= threshold) & (places < filled), tl.exp((x - highest) * factor), 0.0)
    tl.store(reached + places, tl.cumsum(kept.to(tl.float64), axis=0))
    tl.debug_barrier()
    end = tl.load(ends + tiles, mask=tiles < TILES, other=0)
    begin = tl.load(ends + tiles - 1, mask=(tiles < TILES) & (tiles > 0), other=0)
    listed = tl.load(reached + end - 1, mask=end > begin, other=0.0)
    listed -= tl.load(reached + begin - 1, mask=(end > begin) & (begin > 0), other=0.0)
    weights = tile_weights(peaks, sums, highest, heat, TILES, TILES_PAD)
    uniform = uniform_draw(tl.load(seed + row), tl.load(positions + index).to(tl.int64), tl.load(choice + row), 0)
    token = draw_from_tiles(
        source, adjusted, is_adjusted, weights.to(tl.float64) + listed, highest, threshold, uniform, heat,
        ADJUSTED, VOCABULARY, TILES_PAD, TILE,
    )  # fmt: skip
    token = tl.minimum(token, VOCABULARY - 1)
    tl.store(token_ids + index, token)
    tl.store(row_token_ids + row, token)


def draw_wide_rows(
    logits: torch.Tensor,
    where: LogitRows,
    settings: RowSettings,
    workspace: SamplingWorkspace,
    *,
    token_ids: torch.Tensor,
    row_token_ids: torch.Tensor,
    adjusted: AdjustedLogits | None = None,
) -> None:
    """Sample a token for each row that `workspace.is_wide` names, whose tops and sums are in the workspace: a part of
    `sample`, whose reference is this one's too."""
    tiles, most = ceil_div(where.vocabulary, TILE), workspace.candidates.shape[1]
    others = adjusted or AdjustedLogits(where.rows, logits)
    _draw_wide_kernel[(len(logits),)](
        token_ids,
        row_token_ids,
        workspace.is_wide,
        workspace.tops,
        workspace.sums,
        workspace.lists,
        workspace.candidates,
        workspace.reached,
        logits,
        others.logits,
        where.rows,
        where.positions,
        where.num_rows,
        *settings.draw_arguments(),
        others.duties,
        LOGITS_STRIDE=logits.stride(0),
        ADJUSTED_STRIDE=others.logits.stride(0),
        ADJUSTED=adjusted is not None,
        VOCABULARY=where.vocabulary,
        TILES=tiles,
        TILES_PAD=next_power_of_2(tiles),
        TILE=TILE,
        AT_ONCE=_AT_ONCE,
        CANDIDATES=most,
        SAMPLE=_SAMPLE,
        AIM=most * 7 // 8,  # the guess of how many there are is not exact
        num_warps=_WARPS,
        maxnreg=_REGISTERS,
    )
