"""The next token of each row: temperature, top-k, top-p, min-p and a draw that depends on the row's settings alone.

A draw is u = ((w >> 8) + ½) · 2⁻²⁴ in float32, w the first word of Philox4x32-10 (Salmon et al., 2011) with the seed as
key and (position low, position high, choice, 0) as counter. The token is the first, in the order of ids, at which the
cumulative probability of the kept tokens reaches u times their total. A filter keeps every token that is at least as
likely as some token, so each is a threshold on the logits, found without sorting:

- top-k: the k-th largest logit (with all that tie with it);
- top-p: of the tokens left, the largest threshold at which those above it, or at it, hold top_p of their probability;
- min-p: the largest logit + temperature · ln(min_p).

The first launch leaves the sum and the maximum of each tile of `_TILE` logits. In the second, one program a row draws:
without a filter it picks the tile and reads that one again; with one, the tiles tell how small a logit may be that is
kept, what is at least that gets listed, and thresholds and draw are found in the list. A third is for rows whose list
is too short for that; the others leave it at once. It has a longer one, and where that is too short as well, finds the
thresholds by halving their range over the logits. So a common filter costs a row little, and its registers are few.
Sums of tiles are float32, sums over tiles and within what is drawn from float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from asyncllm.kernels.language import ceil_div, jit, next_power_of_2, tl

# Measured on an H200, 256 rows of 151,936.
_TILE = 256
_TILES_AT_ONCE = 8
_TILES_WARPS = 4
_LISTED_AT_ONCE = 8
_DRAW_WARPS = 4
_DRAW_REGISTERS = 168  # three programs fit on a multiprocessor, so that 256 rows are all drawn at once
_WIDE_AT_ONCE = 32
_WIDE_WARPS = 16
_FEW, _CANDIDATES = 512, 4096
"""Lengths of the list of logits that filters may keep."""


@dataclass(frozen=True, slots=True)
class RowSettings:
    """Sampling settings of every row of the batch, on the device; the fields of `RowSampling` in `engine.plan`."""

    temperature: torch.Tensor  # [rows] float32; 0 is greedy
    top_k: torch.Tensor  # [rows] int32; 0 keeps all
    top_p: torch.Tensor  # [rows] float32; 1 keeps all
    min_p: torch.Tensor  # [rows] float32; 0 keeps all
    seed: torch.Tensor  # [rows] int64, the bits of an unsigned seed
    choice: torch.Tensor  # [rows] int32
    suppress_before: torch.Tensor  # [rows] int32
    num_suppressed: torch.Tensor  # [rows] int32, how many of `suppressed` count
    suppressed: torch.Tensor  # [rows, most] int32, dense


@dataclass(frozen=True, slots=True)
class SamplingWorkspace:
    """Device memory between the launches, for one stream. Make it with `make_sampling_workspace`."""

    tops: torch.Tensor  # [n, tiles] float32: largest logit of a tile
    sums: torch.Tensor  # [n, tiles] float32: its sum of exp((logit - top) / temperature), of kept tokens
    lists: torch.Tensor  # [n, tiles] int32: tiles that reach a threshold
    is_wide: torch.Tensor  # [n] int32: 1 where the filters may keep too many logits for the short list
    candidates: torch.Tensor  # [n, _CANDIDATES] float32: logits that filters may keep
    candidate_ids: torch.Tensor  # [n, _CANDIDATES] int32


def make_sampling_workspace(
    max_rows: int, vocabulary: int, device: torch.device, candidates: int = _CANDIDATES
) -> SamplingWorkspace:
    """Allocate for up to `max_rows` rows of logits. `candidates`, a power of two, is for tests of its overflow."""
    tiles = ceil_div(vocabulary, _TILE)

    def make(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    return SamplingWorkspace(
        tops=make(max_rows, tiles),
        sums=make(max_rows, tiles),
        lists=make(max_rows, tiles, dtype=torch.int32),
        is_wide=make(max_rows, dtype=torch.int32),
        candidates=make(max_rows, candidates),
        candidate_ids=make(max_rows, candidates, dtype=torch.int32),
    )


@jit
def _clean(x: tl.tensor) -> tl.tensor:
    """float32, not-a-number as -infinity, and no +infinity: so a broken row still yields some id."""
    # of a number and not-a-number, both operations give the number
    return tl.minimum(tl.maximum(x.to(tl.float32), float("-inf")), 3.4028234663852886e38)


@jit
def _read(
    source: tl.tensor,
    adjusted: tl.tensor,
    is_adjusted: tl.tensor,
    ids: tl.tensor,
    inside: tl.tensor,
    ADJUSTED: tl.constexpr,
) -> tl.tensor:
    """A row's logits of these ids, -infinity outside: the model's own, or those that the row has adjusted."""
    if ADJUSTED:
        first_own = tl.where(is_adjusted == 0, 0, 0x7FFFFFFF)  # no id is that large
        own = tl.load(source + ids, mask=inside & (ids >= first_own), other=float("-inf")).to(tl.float32)
        x = tl.load(adjusted + ids, mask=inside & (ids < first_own), other=float("-inf"))
        return _clean(tl.where(is_adjusted != 0, x, own))
    return _clean(tl.load(source + ids, mask=inside, other=float("-inf")))


@jit
def _tiles_kernel(
    tops: tl.tensor,
    sums: tl.tensor,
    logits: tl.tensor,
    adjusted: tl.tensor,
    rows: tl.tensor,
    positions: tl.tensor,
    num_rows: tl.tensor,
    temperature: tl.tensor,
    suppress_before: tl.tensor,
    num_suppressed: tl.tensor,
    suppressed: tl.tensor,
    duties: tl.tensor,
    LOGITS_STRIDE: tl.constexpr,
    ADJUSTED_STRIDE: tl.constexpr,
    ADJUSTED: tl.constexpr,
    MOST_SUPPRESSED: tl.constexpr,
    VOCABULARY: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    AT_ONCE: tl.constexpr,
) -> None:
    index = tl.program_id(0)
    if index >= tl.load(num_rows):
        return
    row = tl.load(rows + index)
    tiles = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)
    ids = tiles[:, None] * TILE + tl.arange(0, TILE)[None, :]
    source = logits + index.to(tl.int64) * LOGITS_STRIDE
    is_adjusted = tl.zeros([], tl.int32)
    if ADJUSTED:
        is_adjusted = tl.load(duties + row)
        adjusted += index.to(tl.int64) * ADJUSTED_STRIDE
    if ADJUSTED or (tl.program_id(1) + 1) * (TILE * AT_ONCE) > VOCABULARY:
        x = _read(source, adjusted, is_adjusted, ids, ids < VOCABULARY, ADJUSTED)
    else:  # a look at each id's place costs as much as the sums
        x = _clean(tl.load(source + ids))
    if (is_adjusted == 0) & (tl.load(positions + index) < tl.load(suppress_before + row)):
        for i in range(0, tl.load(num_suppressed + row)):
            banned = tl.load(suppressed + row * MOST_SUPPRESSED + i)
            x = tl.where(ids == banned, float("-inf"), x)
            tl.store(source + banned, float("-inf"), mask=banned // (TILE * AT_ONCE) == tl.program_id(1))
    top = tl.max(x, axis=1)
    heat = tl.load(temperature + row)
    shift = tl.where(top == float("-inf"), 0.0, top)
    factor = 1.4426950408889634 / tl.where(heat > 0.0, heat, 1.0)
    total = tl.sum(tl.exp2((x - shift[:, None]) * factor), axis=1)
    target = index * TILES + tiles
    tl.store(tops + target, top, mask=tiles < TILES)
    tl.store(sums + target, total, mask=tiles < TILES)


@jit
def _order(x: tl.tensor) -> tl.tensor:
    """Integers in the order of float32 numbers (and the other way: it is its own inverse)."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@jit
def _value(order: tl.tensor) -> tl.tensor:
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@jit
def _largest(
    x: tl.tensor,
    measure: tl.tensor,
    above: tl.tensor,
    need: tl.tensor,
    lowest: tl.tensor,
    highest: tl.tensor,
    WAYS: tl.constexpr,
) -> tl.tensor:
    """The largest threshold t in [lowest, highest] with above + sum of measure[x >= t] >= need, or lowest.

    Each turn tries WAYS thresholds between those that still stand.
    """
    orders = _order(x)
    low = _order(lowest).to(tl.int64)
    high = _order(highest).to(tl.int64) + 1
    while high - low > 1:
        step = (high - low + WAYS - 1) // WAYS
        marks = low + step * (1 + tl.arange(0, WAYS))
        sums = tl.sum(tl.where(orders[None, :] >= marks.to(tl.int32)[:, None], measure[None, :], 0.0), axis=1)
        passed = tl.sum(((above + sums >= need) & (marks < high)).to(tl.int64), axis=0)
        high = tl.minimum(high, low + step * (passed + 1))
        low += step * passed
    return _value(low.to(tl.int32))


@jit
def _list_tiles(
    tops: tl.tensor, targets: tl.tensor, low: tl.tensor, TILES: tl.constexpr, PAD: tl.constexpr
) -> tl.tensor:
    """Write the numbers of the tiles that reach `low`, in order; returns how many."""
    tiles = tl.arange(0, PAD)
    reach = tl.load(tops + tiles, mask=tiles < TILES, other=float("-inf")) >= low
    reach &= tiles < TILES
    place = tl.cumsum(reach.to(tl.int32), axis=0) - 1
    tl.debug_barrier()  # others may still read the list of before
    tl.store(targets + place, tiles, mask=reach)
    tl.debug_barrier()
    return tl.sum(reach.to(tl.int32), axis=0)


@jit
def _read_tiles(
    source: tl.tensor,
    adjusted: tl.tensor,
    is_adjusted: tl.tensor,
    tiles_list: tl.tensor,
    first: tl.tensor,
    count: tl.tensor,
    ADJUSTED: tl.constexpr,
    VOCABULARY: tl.constexpr,
    TILE: tl.constexpr,
    AT_ONCE: tl.constexpr,
) -> tl.tensor:
    """Logits of listed tiles `first` and on, [AT_ONCE, TILE], -infinity past the end."""
    slots = first + tl.arange(0, AT_ONCE)
    tiles = tl.load(tiles_list + slots, mask=slots < count, other=0)
    ids = tiles[:, None] * TILE + tl.arange(0, TILE)[None, :]
    return _read(source, adjusted, is_adjusted, ids, (slots < count)[:, None] & (ids < VOCABULARY), ADJUSTED)


@jit
def _search(
    source: tl.tensor,
    adjusted: tl.tensor,
    is_adjusted: tl.tensor,
    tops: tl.tensor,
    tiles_list: tl.tensor,
    candidates: tl.tensor,
    low: tl.tensor,
    need: tl.tensor,
    highest: tl.tensor,
    heat: tl.tensor,
    BY_COUNT: tl.constexpr,
    ADJUSTED: tl.constexpr,
    VOCABULARY: tl.constexpr,
    TILES: tl.constexpr,
    TILES_PAD: tl.constexpr,
    TILE: tl.constexpr,
    AT_ONCE: tl.constexpr,
    CANDIDATES: tl.constexpr,
) -> tl.tensor:
    """A threshold with the same tokens at or above it as the largest one for which they number `need`.

    Or sum to it, in exp((x - highest) / heat), unless BY_COUNT. It must be at least `low`. Logits in [low, high) are in
    doubt; those at or above `high` measure `above`. While too many are in doubt, the middle of their range decides over
    some; the rest goes into one tensor.
    """
    listed = _list_tiles(tops, tiles_list, low, TILES, TILES_PAD)
    factor = 1.0 / heat
    high = float("inf")
    upper = highest
    above = 0.0
    doubtful = 0
    least = highest
    for first in range(0, listed, AT_ONCE):
        x = _read_tiles(source, adjusted, is_adjusted, tiles_list, first, listed, ADJUSTED, VOCABULARY, TILE, AT_ONCE)
        chosen = (x >= low) & (x > float("-inf"))
        doubtful += tl.sum(tl.sum(chosen.to(tl.int32), axis=1), axis=0)
        least = tl.minimum(least, tl.min(tl.min(tl.where(chosen, x, float("inf")), axis=1), axis=0))
    low = least
    middle = _between(low, upper, high)
    while (doubtful > CANDIDATES) & (middle > low):
        measure = tl.zeros([AT_ONCE, TILE], tl.float32)
        found = tl.zeros([AT_ONCE, TILE], tl.int32)
        for first in range(0, listed, AT_ONCE):
            x = _read_tiles(
                source, adjusted, is_adjusted, tiles_list, first, listed, ADJUSTED, VOCABULARY, TILE, AT_ONCE
            )
            chosen = (x >= middle) & (x < high)
            found += chosen.to(tl.int32)
            if not BY_COUNT:
                measure += tl.where(chosen, tl.exp((x - highest) * factor), 0.0)
        count = tl.sum(tl.sum(found, axis=1), axis=0)
        amount = count.to(tl.float32)
        if not BY_COUNT:
            amount = tl.sum(tl.sum(measure, axis=1), axis=0)
        if above + amount >= need:
            low = middle
            doubtful = count
        else:
            high = middle
            upper = middle
            above += amount
            doubtful -= count
        middle = _between(low, upper, high)
    answer = low
    if doubtful <= CANDIDATES:
        filled = 0
        for first in range(0, listed, AT_ONCE):
            x = _read_tiles(
                source, adjusted, is_adjusted, tiles_list, first, listed, ADJUSTED, VOCABULARY, TILE, AT_ONCE
            )
            chosen = (x >= low) & (x < high)
            counts = tl.sum(chosen.to(tl.int32), axis=1)
            place = filled + (tl.cumsum(counts, axis=0) - counts)[:, None] + tl.cumsum(chosen.to(tl.int32), axis=1) - 1
            tl.store(candidates + place, x, mask=chosen)
            filled += tl.sum(counts, axis=0)
        tl.debug_barrier()
        places = tl.arange(0, CANDIDATES)
        x = tl.load(candidates + places, mask=places < filled, other=float("-inf"))
        weights = (places < filled).to(tl.float32)
        if not BY_COUNT:
            weights = tl.exp((x - highest) * factor)
        answer = _largest(x, weights, above, need, low, upper, 8)
        tl.debug_barrier()  # the next search writes there
    return answer


@jit
def _between(low: tl.tensor, upper: tl.tensor, high: tl.tensor) -> tl.tensor:
    """A number over `low` that halves [low, upper], or [low, high) once high is finite; `low` if there is none."""
    middle = low + 0.5 * (upper - low)
    return tl.where((middle > low) & (middle < upper), middle, tl.where(high == float("inf"), upper, low))


@jit
def _list_candidates(
    source: tl.tensor,
    adjusted: tl.tensor,
    is_adjusted: tl.tensor,
    tiles_list: tl.tensor,
    listed: tl.tensor,
    candidates: tl.tensor,
    candidate_ids: tl.tensor,
    low: tl.tensor,
    ADJUSTED: tl.constexpr,
    VOCABULARY: tl.constexpr,
    TILE: tl.constexpr,
    AT_ONCE: tl.constexpr,
    CANDIDATES: tl.constexpr,
) -> tl.tensor:
    """Write the logits of at least `low`, in the order of ids, and their ids; returns how many there are. Where that
    is more than there is room for, it stops, and what it wrote is of no use."""
    filled = 0
    first = 0
    while (first < listed) & (filled <= CANDIDATES):
        slots = first + tl.arange(0, AT_ONCE)
        tiles = tl.load(tiles_list + slots, mask=slots < listed, other=0)
        ids = tiles[:, None] * TILE + tl.arange(0, TILE)[None, :]
        inside = (slots < listed)[:, None] & (ids < VOCABULARY)
        x = _read(source, adjusted, is_adjusted, ids, inside, ADJUSTED)
        chosen = (x >= low) & (x > float("-inf"))
        counts = tl.sum(chosen.to(tl.int32), axis=1)
        place = filled + (tl.cumsum(counts, axis=0) - counts)[:, None] + tl.cumsum(chosen.to(tl.int32), axis=1) - 1
        chosen &= place < CANDIDATES
        tl.store(candidates + place, x, mask=chosen)
        tl.store(candidate_ids + place, ids, mask=chosen)
        filled += tl.sum(counts, axis=0)
        first += AT_ONCE
    tl.debug_barrier()
    return filled


@jit
def _draw_candidate(
    candidates: tl.tensor,
    candidate_ids: tl.tensor,
    filled: tl.tensor,
    low: tl.tensor,
    highest: tl.tensor,
    total: tl.tensor,
    uniform: tl.tensor,
    heat: tl.tensor,
    k: tl.tensor,
    nucleus: tl.tensor,
    share: tl.tensor,
    VOCABULARY: tl.constexpr,
    SIZE: tl.constexpr,
) -> tl.tensor:
    """A token of the candidates, which hold all that the filters keep; `total` sums over the whole vocabulary."""
    places = tl.arange(0, SIZE)
    x = tl.load(candidates + places, mask=places < filled, other=float("-inf"))
    weights = tl.exp((x - highest) * (1.0 / heat))
    threshold = low
    if (k > 0) & (k < VOCABULARY):
        threshold = _largest(x, (places < filled).to(tl.float32), 0.0, k.to(tl.float32), low, highest, 8)
        weights = tl.where(x >= threshold, weights, 0.0)
        total = tl.sum(weights, axis=0)
    if nucleus < 1.0:
        threshold = _largest(x, weights, 0.0, nucleus * total, threshold, highest, 8)
    if share > 0.0:
        threshold = tl.maximum(threshold, highest + heat * tl.log(share))
    kept = tl.where(x >= threshold, weights, 0.0).to(tl.float64)
    reached = tl.cumsum(kept, axis=0)
    target = uniform * tl.max(reached, axis=0)
    # rounding may leave the target above every sum: then the last with a share
    place = tl.minimum(tl.sum((reached < target).to(tl.int32), axis=0), tl.max(tl.where(kept > 0.0, places, 0), axis=0))
    return tl.load(candidate_ids + place)


@jit
def _threshold(
    source: tl.tensor,
    adjusted: tl.tensor,
    is_adjusted: tl.tensor,
    tops: tl.tensor,
    sums: tl.tensor,
    lists: tl.tensor,
    candidates: tl.tensor,
    low: tl.tensor,
    highest: tl.tensor,
    total: tl.tensor,
    heat: tl.tensor,
    k: tl.tensor,
    nucleus: tl.tensor,
    share: tl.tensor,
    ADJUSTED: tl.constexpr,
    VOCABULARY: tl.constexpr,
    TILES: tl.constexpr,
    TILES_PAD: tl.constexpr,
    TILE: tl.constexpr,
    AT_ONCE: tl.constexpr,
    CANDIDATES: tl.constexpr,
) -> tl.tensor:
    """The smallest logit that the filters keep, where too many may be; `sums` become those of the kept tokens."""
    factor = 1.0 / heat
    threshold = low
    if (k > 0) & (k < VOCABULARY):
        threshold = _search(
            source, adjusted, is_adjusted, tops, lists, candidates, low, k.to(tl.float32), highest, heat, True,
            ADJUSTED, VOCABULARY, TILES, TILES_PAD, TILE, AT_ONCE, CANDIDATES,
        )  # fmt: skip
        total = 0.0
        listed = _list_tiles(tops, lists, threshold, TILES, TILES_PAD)
        for first in range(0, listed, AT_ONCE):
            x = _read_tiles(source, adjusted, is_adjusted, lists, first, listed, ADJUSTED, VOCABULARY, TILE, AT_ONCE)
            total += tl.sum(tl.sum(tl.where(x >= threshold, tl.exp((x - highest) * factor), 0.0), axis=1), axis=0)
    if nucleus < 1.0:
        threshold = _search(
            source, adjusted, is_adjusted, tops, lists, candidates, threshold, nucleus * total, highest, heat, False,
            ADJUSTED, VOCABULARY, TILES, TILES_PAD, TILE, AT_ONCE, CANDIDATES,
        )  # fmt: skip
    if share > 0.0:
        threshold = tl.maximum(threshold, highest + heat * tl.log(share))
    tiles = tl.arange(0, TILES_PAD)
    tl.store(sums + tiles, 0.0, mask=tiles < TILES)
    listed = _list_tiles(tops, lists, threshold, TILES, TILES_PAD)
    for first in range(0, listed, AT_ONCE):
        slots = first + tl.arange(0, AT_ONCE)
        tile = tl.load(lists + slots, mask=slots < listed, other=0)
        peak = tl.load(tops + tile)
        x = _read_tiles(source, adjusted, is_adjusted, lists, first, listed, ADJUSTED, VOCABULARY, TILE, AT_ONCE)
        kept = tl.where(x >= threshold, tl.exp((x - peak[:, None]) * factor), 0.0)
        tl.store(sums + tile, tl.sum(kept, axis=1), mask=slots < listed)
    tl.debug_barrier()
    return threshold


@jit
def _draw_from_tiles(
    source: tl.tensor,
    adjusted: tl.tensor,
    is_adjusted: tl.tensor,
    peaks: tl.tensor,
    sums: tl.tensor,
    highest: tl.tensor,
    threshold: tl.tensor,
    uniform: tl.tensor,
    heat: tl.tensor,
    ADJUSTED: tl.constexpr,
    VOCABULARY: tl.constexpr,
    TILES: tl.constexpr,
    TILES_PAD: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """A token of those at or above the threshold, whose sums over tiles are given."""
    tiles = tl.arange(0, TILES_PAD)
    factor = 1.0 / heat
    weights = tl.load(sums + tiles, mask=tiles < TILES, other=0.0)
    weights = tl.where(peaks == float("-inf"), 0.0, weights * tl.exp((peaks - highest) * factor)).to(tl.float64)
    reached = tl.cumsum(weights, axis=0)
    target = uniform * tl.max(reached, axis=0)
    # rounding may leave the target above every sum: then the last with a share
    tile = tl.minimum(
        tl.sum((reached < target).to(tl.int32), axis=0), tl.max(tl.where(weights > 0.0, tiles, 0), axis=0)
    )
    before = tl.max(tl.where(tiles < tile, reached, 0.0), axis=0)
    places = tl.arange(0, TILE)
    ids = tile * TILE + places
    x = _read(source, adjusted, is_adjusted, ids, ids < VOCABULARY, ADJUSTED)
    shares = tl.where(x >= threshold, tl.exp((x - highest) * factor), 0.0)
    count = tl.sum((before + tl.cumsum(shares.to(tl.float64), axis=0) < target).to(tl.int32), axis=0)
    return tile * TILE + tl.minimum(count, tl.max(tl.where(shares > 0.0, places, 0), axis=0))


@jit
def _draw_kernel(
    token_ids: tl.tensor,
    row_token_ids: tl.tensor,
    is_wide: tl.tensor,
    tops: tl.tensor,
    sums: tl.tensor,
    lists: tl.tensor,
    candidates: tl.tensor,
    candidate_ids: tl.tensor,
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
    FILTERS: tl.constexpr,
    VOCABULARY: tl.constexpr,
    TILES: tl.constexpr,
    TILES_PAD: tl.constexpr,
    TILE: tl.constexpr,
    AT_ONCE: tl.constexpr,
    FEW: tl.constexpr,
    CANDIDATES: tl.constexpr,
) -> None:
    index = tl.program_id(0)
    if index >= tl.load(num_rows):
        return
    row = tl.load(rows + index)
    heat = tl.load(temperature + row)
    is_adjusted = tl.zeros([], tl.int32)
    filtered = index < 0
    if ADJUSTED:
        is_adjusted = tl.load(duties + row)
        adjusted += index.to(tl.int64) * ADJUSTED_STRIDE
    if FILTERS:
        k = tl.load(top_k + row)
        nucleus = tl.load(top_p + row)
        share = tl.load(min_p + row)
        filtered = ((k > 0) & (k < VOCABULARY)) | (nucleus < 1.0) | (share > 0.0)
        if ADJUSTED:
            filtered &= (is_adjusted & 2) == 0  # `FILTERS` of `logit_adjustment`
    tops += index * TILES
    sums += index * TILES
    source = logits + index.to(tl.int64) * LOGITS_STRIDE
    tiles = tl.arange(0, TILES_PAD)
    peaks = tl.load(tops + tiles, mask=tiles < TILES, other=float("-inf"))
    highest = tl.max(peaks, axis=0)
    token = tl.zeros([], tl.int32)
    wide = tl.zeros([], tl.int32)
    if heat <= 0.0:
        tile = tl.min(tl.where(peaks == highest, tiles, TILES - 1), axis=0)
        places = tl.arange(0, TILE)
        ids = tile * TILE + places
        x = _read(source, adjusted, is_adjusted, ids, ids < VOCABULARY, ADJUSTED)
        token = tile * TILE + tl.min(tl.where(x == highest, places, TILE - 1), axis=0)
    else:
        highest = tl.where(highest == float("-inf"), 0.0, highest)  # a broken row: its difference to itself is a number
        uniform = uniform_draw(tl.load(seed + row), tl.load(positions + index).to(tl.int64), tl.load(choice + row), 0)
        if filtered == 0:
            token = _draw_from_tiles(
                source, adjusted, is_adjusted, peaks, sums, highest, float("-inf"), uniform, heat,
                ADJUSTED, VOCABULARY, TILES, TILES_PAD, TILE,
            )  # fmt: skip
        if FILTERS:  # noqa: SIM102 # a constant of the kernel, apart from what a row asks for
            if filtered:
                lists += index * TILES
                candidates += index.to(tl.int64) * CANDIDATES
                candidate_ids += index.to(tl.int64) * CANDIDATES
                total = _total(peaks, sums, highest, heat, TILES, TILES_PAD)
                low = _lower_bound(peaks, highest, total, heat, k, nucleus, share, VOCABULARY, TILES, TILES_PAD)
                listed = _list_tiles(tops, lists, low, TILES, TILES_PAD)
                filled = _list_candidates(
                    source, adjusted, is_adjusted, lists, listed, candidates, candidate_ids, low,
                    ADJUSTED, VOCABULARY, TILE, AT_ONCE, FEW,
                )  # fmt: skip
                if filled <= FEW:
                    token = _draw_candidate(
                        candidates, candidate_ids, filled, low, highest, total, uniform, heat, k, nucleus, share,
                        VOCABULARY, FEW,
                    )  # fmt: skip
                wide = (filled > FEW).to(tl.int32)
    if FILTERS:
        tl.store(is_wide + index, wide)
    token = tl.minimum(token, VOCABULARY - 1)
    tl.store(token_ids + index, token)
    tl.store(row_token_ids + row, token)


@jit
def _draw_wide_kernel(
    token_ids: tl.tensor,
    row_token_ids: tl.tensor,
    is_wide: tl.tensor,
    tops: tl.tensor,
    sums: tl.tensor,
    lists: tl.tensor,
    candidates: tl.tensor,
    candidate_ids: tl.tensor,
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
    lists += index * TILES
    candidates += index.to(tl.int64) * CANDIDATES
    candidate_ids += index.to(tl.int64) * CANDIDATES
    source = logits + index.to(tl.int64) * LOGITS_STRIDE
    tiles = tl.arange(0, TILES_PAD)
    peaks = tl.load(tops + tiles, mask=tiles < TILES, other=float("-inf"))
    highest = tl.max(peaks, axis=0)
    uniform = uniform_draw(tl.load(seed + row), tl.load(positions + index).to(tl.int64), tl.load(choice + row), 0)
    total = _total(peaks, sums, highest, heat, TILES, TILES_PAD)
    low = _lower_bound(peaks, highest, total, heat, k, nucleus, share, VOCABULARY, TILES, TILES_PAD)
    listed = _list_tiles(tops, lists, low, TILES, TILES_PAD)
    filled = _list_candidates(
        source, adjusted, is_adjusted, lists, listed, candidates, candidate_ids, low,
        ADJUSTED, VOCABULARY, TILE, AT_ONCE, CANDIDATES,
    )  # fmt: skip
    token = tl.zeros([], tl.int32)
    if filled <= CANDIDATES:
        token = _draw_candidate(
            candidates, candidate_ids, filled, low, highest, total, uniform, heat, k, nucleus, share,
            VOCABULARY, CANDIDATES,
        )  # fmt: skip
    else:
        threshold = _threshold(
            source, adjusted, is_adjusted, tops, sums, lists, candidates, low, highest, total, heat,
            k, nucleus, share, ADJUSTED, VOCABULARY, TILES, TILES_PAD, TILE, AT_ONCE, CANDIDATES,
        )  # fmt: skip
        token = _draw_from_tiles(
            source, adjusted, is_adjusted, peaks, sums, highest, threshold, uniform, heat,
            ADJUSTED, VOCABULARY, TILES, TILES_PAD, TILE,
        )  # fmt: skip
    token = tl.minimum(token, VOCABULARY - 1)
    tl.store(token_ids + index, token)
    tl.store(row_token_ids + row, token)


@jit
def _total(
    peaks: tl.tensor, sums: tl.tensor, highest: tl.tensor, heat: tl.tensor, TILES: tl.constexpr, TILES_PAD: tl.constexpr
) -> tl.tensor:
    """The sum of exp((logit - highest) / heat) over the vocabulary."""
    tiles = tl.arange(0, TILES_PAD)
    weights = tl.load(sums + tiles, mask=tiles < TILES, other=0.0) * tl.exp((peaks - highest) * (1.0 / heat))
    return tl.sum(tl.where(peaks == float("-inf"), 0.0, weights), axis=0)


@jit
def _lower_bound(
    peaks: tl.tensor,
    highest: tl.tensor,
    total: tl.tensor,
    heat: tl.tensor,
    k: tl.tensor,
    nucleus: tl.tensor,
    share: tl.tensor,
    VOCABULARY: tl.constexpr,
    TILES: tl.constexpr,
    TILES_PAD: tl.constexpr,
) -> tl.tensor:
    """What the filters keep is at least this, as the tiles' maxima and the sum over all tell."""
    lowest = tl.full([], float("-inf"), tl.float32)
    low = lowest
    tiles = tl.arange(0, TILES_PAD)
    if (k > 0) & (k < VOCABULARY):
        # the k-th largest logit is no less than the k-th largest of the tiles' maxima
        low = _largest(peaks, (tiles < TILES).to(tl.float32), 0.0, k.to(tl.float32), lowest, highest, 8)
    elif nucleus < 1.0:
        # tokens that each hold less than (1 - top_p) / vocabulary hold together less than what may be left out; and the
        # maxima alone may hold top_p, rounding apart
        held = tl.where(peaks == float("-inf"), 0.0, tl.exp((peaks - highest) * (1.0 / heat)))
        low = _largest(peaks, held, 0.0, nucleus * total * 1.0001, lowest, highest, 8)
        low = tl.maximum(low, highest + heat * tl.log((1.0 - nucleus) * total * (0.5 / VOCABULARY)))
    if (share > 0.0) & ((k <= 0) | (k >= VOCABULARY) | (nucleus >= 1.0)):
        # what min-p drops counts among what top-p holds a share of, where that follows top-k
        low = tl.maximum(low, highest + heat * tl.log(share))
    return low


@jit
def uniform_draw(seed: tl.tensor, position: tl.tensor, choice: tl.tensor, STREAM: tl.constexpr) -> tl.tensor:
    """A number in (0, 1] from Philox4x32-10, as float64. Each stream has numbers of its own."""
    low = (position & 0xFFFFFFFF).to(tl.uint32)
    high = (position >> 32).to(tl.uint32)
    word, _, _, _ = tl.philox(seed, low, high, choice.to(tl.uint32), tl.zeros_like(low) + STREAM)
    return (((word >> 8).to(tl.float32) + 0.5) * 5.9604644775390625e-08).to(tl.float64)


@dataclass(frozen=True, slots=True)
class AdjustedLogits:
    """Logits of rows that do more to them than `sample` does."""

    duties: torch.Tensor  # [rows] int32: not 0 for such rows; bit 1: the row's filters have been at work, all of them
    logits: torch.Tensor  # [n, at least vocabulary] float32, dense: read in place of the model's own for rows with any


def sample(
    logits: torch.Tensor,
    settings: RowSettings,
    workspace: SamplingWorkspace,
    *,
    rows: torch.Tensor,
    positions: torch.Tensor,
    num_rows: torch.Tensor,
    vocabulary: int,
    token_ids: torch.Tensor,
    row_token_ids: torch.Tensor,
    adjusted: AdjustedLogits | None = None,
    filters: bool = True,
) -> None:
    """Sample a token for each of the first `num_rows` rows of logits; nothing waits for the host.

    logits [n, at least vocabulary], last dimension dense, any float type; logits of suppressed ids are overwritten with
    -infinity. rows [n] int32: the row whose settings count; positions [n] int32 or int64: the absolute position of the
    token to be sampled; num_rows [1] int32. The token of logits i goes to token_ids[i] and row_token_ids[rows[i]], both
    int32. Rows with a duty are read from `adjusted`, where suppressed ids are not suppressed once more. `filters=False`
    promises that no row uses top-k, top-p or min-p.
    """
    count = logits.shape[0]
    tiles = ceil_div(vocabulary, _TILE)
    padded = next_power_of_2(tiles)
    if not count:
        return
    duties = rows if adjusted is None else adjusted.duties
    others = logits if adjusted is None else adjusted.logits
    _tiles_kernel[(count, ceil_div(tiles, _TILES_AT_ONCE))](
        workspace.tops,
        workspace.sums,
        logits,
        others,
        rows,
        positions,
        num_rows,
        settings.temperature,
        settings.suppress_before,
        settings.num_suppressed,
        settings.suppressed,
        duties,
        LOGITS_STRIDE=logits.stride(0),
        ADJUSTED_STRIDE=others.stride(0),
        ADJUSTED=adjusted is not None,
        MOST_SUPPRESSED=settings.suppressed.shape[1],
        VOCABULARY=vocabulary,
        TILES=tiles,
        TILE=_TILE,
        AT_ONCE=_TILES_AT_ONCE,
        num_warps=_TILES_WARPS,
    )
    candidates = workspace.candidates.shape[1]
    arguments = (
        token_ids,
        row_token_ids,
        workspace.is_wide,
        workspace.tops,
        workspace.sums,
        workspace.lists,
        workspace.candidates,
        workspace.candidate_ids,
        logits,
        others,
        rows,
        positions,
        num_rows,
        settings.temperature,
        settings.top_k,
        settings.top_p,
        settings.min_p,
        settings.seed,
        settings.choice,
        duties,
    )
    sizes = {
        "LOGITS_STRIDE": logits.stride(0),
        "ADJUSTED_STRIDE": others.stride(0),
        "ADJUSTED": adjusted is not None,
        "VOCABULARY": vocabulary,
        "TILES": tiles,
        "TILES_PAD": padded,
        "TILE": _TILE,
        "CANDIDATES": candidates,
    }
    few = min(_FEW, candidates)
    _draw_kernel[(count,)](
        *arguments,
        **sizes,
        AT_ONCE=_LISTED_AT_ONCE,
        FEW=few,
        FILTERS=filters,
        num_warps=_DRAW_WARPS,
        maxnreg=_DRAW_REGISTERS,
    )
    if filters:
        _draw_wide_kernel[(count,)](*arguments, **sizes, AT_ONCE=_WIDE_AT_ONCE, num_warps=_WIDE_WARPS)


def sample_reference(
    logits: torch.Tensor,
    settings: RowSettings,
    *,
    rows: torch.Tensor,
    positions: torch.Tensor,
    num_rows: torch.Tensor,
    vocabulary: int,
) -> torch.Tensor:
    """`sample` in plain torch, row by row: [num_rows] int32 token ids."""
    tokens = []
    for i in range(int(num_rows)):
        row, position = int(rows[i]), int(positions[i])
        x = logits[i, :vocabulary].float().nan_to_num(-torch.inf, torch.finfo(torch.float32).max, -torch.inf)
        if position < settings.suppress_before[row]:
            x[settings.suppressed[row, : settings.num_suppressed[row]].long()] = -torch.inf
        heat = float(settings.temperature[row])
        if heat == 0.0:
            tokens.append(int(torch.nonzero(x == x.max())[0]))
            continue
        weights = ((x - x.max()) / heat).exp()
        kept = _kept(x, weights.double(), settings, row)
        reached = torch.where(kept, weights.double(), 0.0).cumsum(0)
        words = philox4x32(int(settings.seed[row]) & 0xFFFFFFFFFFFFFFFF, position, int(settings.choice[row]))
        u = (torch.tensor(float(words[0] >> 8)) + 0.5) * 2.0**-24  # float32
        token = int((reached < u.double() * reached[-1]).sum())
        tokens.append(min(token, int(torch.nonzero(kept)[-1])))
    return torch.tensor(tokens, dtype=torch.int32, device=logits.device)


def _kept(x: torch.Tensor, weights: torch.Tensor, settings: RowSettings, row: int) -> torch.Tensor:
    k, nucleus, share = int(settings.top_k[row]), float(settings.top_p[row]), float(settings.min_p[row])
    heat = float(settings.temperature[row])
    kept = x > -torch.inf
    if 0 < k < len(x):
        kept &= x >= x.sort(descending=True).values[k - 1]
    if nucleus < 1.0:
        order = torch.where(kept, x, -torch.inf).sort(descending=True)
        held = torch.where(kept, weights, 0.0)[order.indices].cumsum(0)
        kept &= x >= order.values[int((held < nucleus * held[-1]).sum())]
    if share > 0.0:
        kept &= x >= x.max() + heat * torch.log(torch.tensor(share))
    return kept


def philox4x32(seed: int, position: int, choice: int, stream: int = 0) -> tuple[int, ...]:
    """The four words of Philox4x32-10 for a draw."""
    mask = 0xFFFFFFFF
    counter = [position & mask, position >> 32, choice, stream]
    key = [seed & mask, seed >> 32]
    for _ in range(10):
        first, second = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [
            (second >> 32) ^ counter[1] ^ key[0],
            second & mask,
            (first >> 32) ^ counter[3] ^ key[1],
            first & mask,
        ]
        key = [(key[0] + 0x9E3779B9) & mask, (key[1] + 0xBB67AE85) & mask]
    return tuple(counter)
