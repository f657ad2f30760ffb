"""Draws of rows of which the filters may keep more logits than a short list holds. As `sampling` has them, exactly.

One program a row, and about one reading of it for a filter that looks for a threshold (top-k, top-p). A sample of the
row tells within what bounds the threshold should lie. The row is read once: what is above the bounds is counted and
weighed, what is between them is listed, and so what was guessed is known: whether the threshold lies there. It is found
in the list then, and the draw takes what tiles hold from the same reading and the list. Where the guess was wrong, the
bounds are moved to their neighbours; where that is wrong too, or the list is too short (many equal logits), the range
that is left is halved until it holds no more than the list has room for. Sums over tiles and over the list are float64.
"""

from __future__ import annotations

from asyncllm.kernels.language import await_previous, constexpr, jit, launch_next, overlap_options, tl
from asyncllm.kernels.logit_tiles import draw_from_tiles, lower_bound, read_logits, tile_weights
from asyncllm.kernels.sampled_rows import Draw
from asyncllm.kernels.thresholds import largest_threshold, number_of, order_of
from asyncllm.kernels.uniform_draw import uniform_draw

_AT_ONCE = 16
_WARPS = 8
_REGISTERS = 128  # two programs fit on a multiprocessor, so that 256 rows are all drawn at once
_SAMPLE = 8192
"""Logits that a guess looks at. Of 151,936 with a spread of 1, a top-p of 0.9 is then within 600 tokens (one standard
deviation), and the list has room for 1,800 on either side."""

_NOTHING, _SEARCH, _SEARCH_LIST, _LOOK = (constexpr(task) for task in range(4))
"""What `_search` is to do: nothing; find the threshold; find it in the list of the last look; or it is known, but that
list does not tell what is above it, so one more look is needed."""


@jit
def _look(
    source: tl.tensor,
    adjusted: tl.tensor,
    is_adjusted: tl.tensor,
    maxima: tl.tensor,
    sums: tl.tensor,
    ends: tl.tensor,
    candidates: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    highest: tl.tensor,
    temperature: tl.tensor,
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
    factor = 1.0 / temperature
    count = tl.zeros([], tl.int32)
    weight = tl.zeros([], tl.float64)
    filled = tl.zeros([], tl.int32)
    inside = tl.zeros([], tl.float64)
    tl.debug_barrier()  # others may still read what the look before this one has left
    for first in range(0, TILES, AT_ONCE):
        tiles = first + tl.arange(0, AT_ONCE)
        tile_maxima = tl.load(maxima + tiles, mask=tiles < TILES, other=float("-inf"))
        reaches = (tile_maxima >= low) & (tile_maxima > float("-inf"))
        ids = tiles[:, None] * TILE + tl.arange(0, TILE)[None, :]
        x = read_logits(source, adjusted, is_adjusted, ids, reaches[:, None] & (ids < VOCABULARY), ADJUSTED)
        shift = tl.where(tile_maxima == float("-inf"), 0.0, tile_maxima)
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
    temperature: tl.tensor,
    by_count: tl.tensor,
    need: tl.tensor,
    spare: tl.tensor,
    ADJUSTED: tl.constexpr,
    VOCABULARY: tl.constexpr,
    SAMPLE: tl.constexpr,
    AIM: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Bounds between which the threshold of `_search` should lie, and some AIM logits: [low, high)."""
    places = tl.arange(0, SAMPLE)
    ids = places
    stands_for = 1.0  # logits that one of the sample stands for
    if VOCABULARY > SAMPLE:  # neighbours of eight, evenly spread: the least that memory gives at once
        ids = ((places // 8).to(tl.int64) * (VOCABULARY - 8) // (SAMPLE // 8 - 1)).to(tl.int32) + places % 8
        stands_for = VOCABULARY / SAMPLE
    x = read_logits(source, adjusted, is_adjusted, ids, ids < VOCABULARY, ADJUSTED)
    is_number = x > float("-inf")
    weights = tl.where(by_count, 1.0, tl.exp((x - highest) * (1.0 / temperature)))
    measure = tl.where(is_number & (x >= floor), weights * stands_for, 0.0)
    low = tl.maximum(tl.min(tl.where(is_number, x, highest), axis=0), lowest)
    span = highest - low
    near = span / 128.0
    steps = tl.arange(0, 4).to(tl.float32)
    for _ in range(6):
        span /= 4.0
        marks = low + span * steps
        # what weighs less than a threshold that is high up is of many small parts, so that a sample tells it well
        sums = tl.sum(tl.where((x[None, :] >= marks[:, None]) == by_count, measure[None, :], 0.0), axis=1)
        passed = tl.where(by_count, sums >= need.to(tl.float32), sums <= spare.to(tl.float32))
        low += span * tl.maximum(tl.sum(passed.to(tl.int32), axis=0) - 1, 0).to(tl.float32)
    distance = tl.where(is_number, tl.abs(x - low), float("inf"))
    neighbours = tl.sum(tl.where(distance <= near, stands_for, 0.0), axis=0)
    reach = near * AIM / tl.maximum(neighbours, stands_for)  # if all about here were as dense as near by
    fits = tl.sum(tl.where(distance[None, :] <= reach * (0.25 + 0.25 * steps)[:, None], stands_for, 0.0), axis=1) <= AIM
    reach *= 0.25 * tl.maximum(tl.sum(fits.to(tl.int32), axis=0), 1).to(tl.float32)
    high = low + span + reach
    low = tl.maximum(low - reach, lowest)
    low = tl.where(low <= highest, low, lowest)  # a span of infinity makes no numbers
    high = tl.where(high > low, high, float("inf"))
    if tl.sum(tl.where(is_number & (x >= low), stands_for, 0.0), axis=0) <= AIM:
        high = tl.full([], float("inf"), tl.float32)  # all that may be kept goes into the list
    return low, high


@jit
def _search(
    source: tl.tensor,
    adjusted: tl.tensor,
    is_adjusted: tl.tensor,
    maxima: tl.tensor,
    sums: tl.tensor,
    ends: tl.tensor,
    candidates: tl.tensor,
    floor: tl.tensor,
    lowest: tl.tensor,
    highest: tl.tensor,
    temperature: tl.tensor,
    by_count: tl.tensor,
    need: tl.tensor,
    spare: tl.tensor,
    task: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    above: tl.tensor,
    filled: tl.tensor,
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

    Or number `need`, where `by_count`. Of what is at least `floor`, `spare` may lie under it. `task` says what is to be
    done. Takes and returns, after the threshold, of the last look: its bounds, what is at or above the higher one
    weighs, and how many logits it listed. Where there was anything to do, the list is one that a draw can use: the
    threshold is within its bounds.
    """
    threshold = lowest
    least = lowest  # what is at or above this is enough, or this is the answer whether or not
    most = number_of(order_of(highest) + 1)  # what is at or above this is not
    at_least = tl.full([], VOCABULARY, tl.int32)  # logits at or above `least`, at most
    at_most = tl.zeros([], tl.int32)  # those at or above `most`
    count = tl.zeros([], tl.int32)
    inside = tl.zeros([], tl.float64)
    if task == _SEARCH:
        low, high = _guess(
            source, adjusted, is_adjusted, floor, lowest, highest, temperature, by_count, need, spare,
            ADJUSTED, VOCABULARY, SAMPLE, AIM,
        )  # fmt: skip
        high = tl.minimum(high, most)
    elif task == _LOOK:
        low = threshold
        high = threshold
    width = high - low
    turn = tl.zeros([], tl.int32)
    while task != _NOTHING:
        if task != _SEARCH_LIST:
            count, above, filled, inside = _look(
                source, adjusted, is_adjusted, maxima, sums, ends, candidates, low, high, highest, temperature,
                ADJUSTED, VOCABULARY, TILES, TILE, AT_ONCE, CANDIDATES,
            )  # fmt: skip
        if task == _LOOK:
            task = tl.full([], _NOTHING, tl.int32)
        else:
            passed = tl.where(by_count, count.to(tl.float64), above)
            both = passed + tl.where(by_count, filled.to(tl.float64), inside)
            up = (task == _SEARCH) & (passed >= need)
            here = (up == 0) & ((both >= need) | (low <= least)) & (low < high)
            here |= task == _SEARCH_LIST
            least = tl.where(up, high, tl.where(here, low, least))
            at_least = tl.where(up, count, tl.where(here, count + filled, at_least))
            most = tl.where(up, most, tl.where(here, high, low))
            at_most = tl.where(up, at_most, tl.where(here, count, count + filled))
            is_found = order_of(most).to(tl.int64) - order_of(least).to(tl.int64) <= 1
            if here & (filled <= CANDIDATES):
                places = tl.arange(0, CANDIDATES)
                x = tl.load(candidates + places, mask=places < filled, other=float("-inf"))
                weights = tl.where(by_count, 1.0, tl.exp((x - highest) * (1.0 / temperature)))
                measure = tl.where((x >= floor) & (places < filled), weights, 0.0).to(tl.float64)
                start = tl.maximum(low, floor)
                limit = tl.maximum(tl.minimum(high, highest), start)
                threshold = tl.maximum(lowest, largest_threshold(x, measure, passed, need, start, limit, 4))
                is_found = here
            elif is_found:
                threshold = least
            if is_found:
                is_usable = (filled <= CANDIDATES) & (threshold >= low) & (threshold <= high)
                task = tl.where(is_usable, _NOTHING, _LOOK)
                low = tl.where(is_usable, low, threshold)
                high = tl.where(is_usable, high, threshold)
            else:
                task = tl.full([], _SEARCH, tl.int32)
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
    return threshold, low, high, above, filled


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
    maxima: tl.tensor,
    sums: tl.tensor,
    ends: tl.tensor,
    candidates: tl.tensor,
    logits: tl.tensor,
    adjusted: tl.tensor,
    rows: tl.tensor,
    positions: tl.tensor,
    num_rows: tl.tensor,
    temperatures: tl.tensor,
    top_ks: tl.tensor,
    top_ps: tl.tensor,
    min_ps: tl.tensor,
    seeds: tl.tensor,
    choices: tl.tensor,
    duties: tl.tensor,
    reached: tl.tensor,
    LOGITS_STRIDE: tl.constexpr,
    ADJUSTED_STRIDE: tl.constexpr,
    ADJUSTED: tl.constexpr,
    VOCABULARY: tl.constexpr,
    TILES: tl.constexpr,
    TILES_PAD: tl.constexpr,
    TILE: tl.constexpr,
    CANDIDATES: tl.constexpr,
    AT_ONCE: tl.constexpr,
    SAMPLE: tl.constexpr,
    AIM: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    index = tl.program_id(0)
    if index >= tl.load(num_rows):
        return
    await_previous(OVERLAP)
    launch_next(OVERLAP)
    if tl.load(is_wide + index) == 0:
        return
    row = tl.load(rows + index)
    temperature = tl.load(temperatures + row)
    top_k = tl.load(top_ks + row)
    top_p = tl.load(top_ps + row)
    min_p = tl.load(min_ps + row)
    is_adjusted = tl.zeros([], tl.int32)
    if ADJUSTED:
        is_adjusted = tl.load(duties + row)
        adjusted += index.to(tl.int64) * ADJUSTED_STRIDE
    maxima += index * TILES
    sums += index * TILES
    ends += index * TILES
    candidates += index.to(tl.int64) * CANDIDATES
    reached += index.to(tl.int64) * CANDIDATES
    source = logits + index.to(tl.int64) * LOGITS_STRIDE
    tiles = tl.arange(0, TILES_PAD)
    places = tl.arange(0, CANDIDATES)
    tile_maxima = tl.load(maxima + tiles, mask=tiles < TILES, other=float("-inf"))
    highest = tl.max(tile_maxima, axis=0)
    factor = 1.0 / temperature
    weights = tile_weights(tile_maxima, tl.load(sums + tiles, mask=tiles < TILES, other=0.0), highest, temperature)
    total = tl.sum(weights.to(tl.float64), axis=0)
    threshold = lower_bound(
        tile_maxima, highest, tl.sum(weights, axis=0), temperature, top_k, top_p, min_p, VOCABULARY, TILES, TILES_PAD
    )
    floor = tl.full([], float("-inf"), tl.float32)
    low = threshold  # bounds of the last look
    high = threshold
    filled = tl.full([], CANDIDATES + 1, tl.int32)  # of its list; more than there is room for: it is of no use
    above = tl.zeros([], tl.float64)  # what it found above its bounds
    for stage in range(0, 2):  # top-k, then top-p; one after another, since each is much code
        by_count = stage == 0
        need = tl.where(by_count, top_k.to(tl.float64), top_p.to(tl.float64) * total)
        if by_count:
            task = tl.where((top_k > 0) & (top_k < VOCABULARY), _SEARCH, _NOTHING)
        else:
            if min_p > 0.0:
                threshold = tl.maximum(threshold, highest + temperature * tl.log(min_p))
            is_usable = (filled <= CANDIDATES) & (threshold >= low) & (threshold <= high)
            task = tl.where(is_usable, _NOTHING, _LOOK)
            if top_p < 1.0:
                task = tl.where((filled <= CANDIDATES) & (above < need), _SEARCH_LIST, _SEARCH)
        threshold, low, high, above, filled = _search(
            source, adjusted, is_adjusted, maxima, sums, ends, candidates, floor, threshold, highest, temperature,
            by_count, need, total - need, task, low, high, above, filled,
            ADJUSTED, VOCABULARY, TILES, TILE, AT_ONCE, CANDIDATES, SAMPLE, AIM,
        )  # fmt: skip
        if by_count & (task != _NOTHING):
            floor = threshold
            x = tl.load(candidates + places, mask=places < filled, other=float("-inf"))
            kept = tl.where((x >= floor) & (places < filled), tl.exp((x - highest) * factor), 0.0)
            total = above + tl.sum(kept.to(tl.float64), axis=0)
    x = tl.load(candidates + places, mask=places < filled, other=float("-inf"))
    kept = tl.where((x >= threshold) & (places < filled), tl.exp((x - highest) * factor), 0.0)
    tl.store(reached + places, tl.cumsum(kept.to(tl.float64), axis=0))
    tl.debug_barrier()
    end = tl.load(ends + tiles, mask=tiles < TILES, other=0)
    begin = tl.load(ends + tiles - 1, mask=(tiles < TILES) & (tiles > 0), other=0)
    listed = tl.load(reached + end - 1, mask=end > begin, other=0.0)
    listed -= tl.load(reached + begin - 1, mask=(end > begin) & (begin > 0), other=0.0)
    weights = tile_weights(tile_maxima, tl.load(sums + tiles, mask=tiles < TILES, other=0.0), highest, temperature)
    uniform = uniform_draw(tl.load(seeds + row), tl.load(positions + index).to(tl.int64), tl.load(choices + row), 0)
    token = draw_from_tiles(
        source, adjusted, is_adjusted, weights.to(tl.float64) + listed, highest, threshold, uniform, temperature,
        ADJUSTED, VOCABULARY, TILES_PAD, TILE,
    )  # fmt: skip
    token = tl.minimum(token, VOCABULARY - 1)
    tl.store(token_ids + index, token)
    tl.store(row_token_ids + row, token)


def draw_wide_rows(draw: Draw) -> None:
    """Sample a token for each row that `workspace.is_wide` names, whose maxima and sums are in the workspace: a part of
    `sample`, whose reference is this one's too."""
    most = draw.workspace.candidates.shape[1]
    _draw_wide_kernel[(len(draw.logits),)](
        *draw.arguments(),
        draw.workspace.reached,
        **draw.constants(),
        AT_ONCE=_AT_ONCE,
        SAMPLE=_SAMPLE,
        AIM=most * 7 // 8,  # the guess of how many there are is not exact
        num_warps=_WARPS,
        maxnreg=_REGISTERS,
        **overlap_options(draw.logits.device),
    )
