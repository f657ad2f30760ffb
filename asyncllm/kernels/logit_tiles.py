"""The maximum and the sum of each tile of a row's logits, and what they tell of the row.

They are what a draw without filters needs: it picks the tile and reads that one again. Sums of tiles are float32, sums
over tiles and within what is drawn from float64.

All that counts is reading the logits once at the speed of memory: by many programs, each of which asks for all that it
sums up at once. Where no row filters, the program that comes last to its row draws, so that there is no second launch,
and rows are drawn while later ones are read.
"""

from __future__ import annotations

import torch

from asyncllm.kernels.language import (
    await_previous,
    ceil_div,
    constexpr,
    jit,
    jit_unspecialized,
    launch_next,
    next_power_of_2,
    overlap_options,
    tl,
)
from asyncllm.kernels.sampled_rows import NO_TOKEN, TILE, AdjustedLogits, LogitRows, RowSettings, SamplingWorkspace
from asyncllm.kernels.thresholds import largest_threshold
from asyncllm.kernels.uniform_draw import uniform_draw

# Measured on an H200, 256 rows of 151,936.
_AT_ONCE = 32  # tiles of a program
_WARPS = 4

_NO_TOKEN = constexpr(NO_TOKEN)


@jit
def clean(x: tl.tensor) -> tl.tensor:
    """float32, not-a-number as -infinity, and no +infinity, which is as large as a number can be."""
    # of a number and not-a-number, both operations give the number
    return tl.minimum(tl.maximum(x.to(tl.float32), float("-inf")), 3.4028234663852886e38)


@jit
def read_logits(
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
        return clean(tl.where(is_adjusted != 0, x, own))
    return clean(tl.load(source + ids, mask=inside, other=float("-inf")))


@jit
def _sum_group(
    maxima: tl.tensor, sums: tl.tensor, x: tl.tensor, tiles: tl.tensor, factor: tl.tensor, TILES: tl.constexpr
) -> tl.tensor:
    """Write the maxima and sums of tiles [n], whose logits are x [lines of a tile · n, numbers of a line]; returns the
    sums."""
    x = tl.reshape(x, [x.shape[0] // tiles.shape[0], tiles.shape[0], x.shape[1]])
    top = tl.max(tl.max(x, axis=0), axis=1)
    shift = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.sum(tl.exp2((x - shift[None, :, None]) * factor), axis=0), axis=1)
    tl.store(maxima + tiles, top, mask=tiles < TILES)
    tl.store(sums + tiles, total, mask=tiles < TILES)
    return total


@jit
def _suppress(
    maxima: tl.tensor,
    sums: tl.tensor,
    source: tl.tensor,
    suppressed: tl.tensor,
    count: tl.tensor,
    first: tl.tensor,
    last: tl.tensor,
    factor: tl.tensor,
    VOCABULARY: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Ban what is suppressed in tiles [first, last), and sum those that it is in again."""
    for i in range(0, count):
        banned = tl.load(suppressed + i)
        tl.store(source + banned, float("-inf"), mask=(banned // TILE >= first) & (banned // TILE < last))
    tl.debug_barrier()
    for i in range(0, count):
        tile = tl.load(suppressed + i) // TILE
        if (tile >= first) & (tile < last):
            ids = tile * TILE + tl.arange(0, TILE)
            x = clean(tl.load(source + ids, mask=ids < VOCABULARY, other=float("-inf")))
            top = tl.max(x, axis=0)
            shift = tl.where(top == float("-inf"), 0.0, top)
            tl.store(maxima + tile, top)
            tl.store(sums + tile, tl.sum(tl.exp2((x - shift) * factor), axis=0))


@jit
def highest_logit(tile_maxima: tl.tensor) -> tl.tensor:
    """Of a row; 0 where there is none, whose difference to itself would be no number."""
    highest = tl.max(tile_maxima, axis=0)
    return tl.where(highest == float("-inf"), 0.0, highest)


@jit
def tile_weights(tile_maxima: tl.tensor, sums: tl.tensor, highest: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    """Of each tile, the sum of exp((logit - highest) / temperature), as float32; from its maximum and its own sum."""
    weights = sums * tl.exp((tile_maxima - highest) * (1.0 / temperature))
    return tl.where(tile_maxima == float("-inf"), 0.0, weights)


@jit
def lower_bound(
    tile_maxima: tl.tensor,
    highest: tl.tensor,
    total: tl.tensor,
    temperature: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    VOCABULARY: tl.constexpr,
    TILES: tl.constexpr,
    TILES_PAD: tl.constexpr,
) -> tl.tensor:
    """What the filters keep is at least this, as the tiles' maxima and the sum over all tell."""
    lowest = tl.full([], float("-inf"), tl.float32)
    low = lowest
    tiles = tl.arange(0, TILES_PAD)
    if (top_k > 0) & (top_k < VOCABULARY):
        # the k-th largest logit is no less than the k-th largest of the tiles' maxima
        low = largest_threshold(
            tile_maxima, (tiles < TILES).to(tl.float32), 0.0, top_k.to(tl.float32), lowest, highest, 8
        )
    elif top_p < 1.0:
        # tokens that each hold less than (1 - top_p) / vocabulary hold together less than what may be left out; and the
        # maxima alone may hold top_p, rounding apart
        held = tl.where(tile_maxima == float("-inf"), 0.0, tl.exp((tile_maxima - highest) * (1.0 / temperature)))
        low = largest_threshold(tile_maxima, held, 0.0, top_p * total * 1.0001, lowest, highest, 8)
        low = tl.maximum(low, highest + temperature * tl.log((1.0 - top_p) * total * (0.5 / VOCABULARY)))
    if (min_p > 0.0) & ((top_k <= 0) | (top_k >= VOCABULARY) | (top_p >= 1.0)):
        # what min-p drops counts among what top-p holds a share of, where that follows top-k
        low = tl.maximum(low, highest + temperature * tl.log(min_p))
    return low


@jit
def most_likely(
    source: tl.tensor,
    adjusted: tl.tensor,
    is_adjusted: tl.tensor,
    tile_maxima: tl.tensor,
    ADJUSTED: tl.constexpr,
    VOCABULARY: tl.constexpr,
    TILES: tl.constexpr,
    TILES_PAD: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """The lowest of the ids with the largest logit."""
    highest = tl.max(tile_maxima, axis=0)
    tiles = tl.arange(0, TILES_PAD)
    tile = tl.min(tl.where(tile_maxima == highest, tiles, TILES - 1), axis=0)
    places = tl.arange(0, TILE)
    ids = tile * TILE + places
    x = read_logits(source, adjusted, is_adjusted, ids, ids < VOCABULARY, ADJUSTED)
    return tile * TILE + tl.min(tl.where(x == highest, places, TILE - 1), axis=0)


@jit
def draw_from_tiles(
    source: tl.tensor,
    adjusted: tl.tensor,
    is_adjusted: tl.tensor,
    weights: tl.tensor,
    highest: tl.tensor,
    threshold: tl.tensor,
    uniform: tl.tensor,
    temperature: tl.tensor,
    ADJUSTED: tl.constexpr,
    VOCABULARY: tl.constexpr,
    TILES_PAD: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """A token of those at or above the threshold. weights [TILES_PAD] float64: what those of each tile weigh."""
    tiles = tl.arange(0, TILES_PAD)
    factor = 1.0 / temperature
    reached = tl.cumsum(weights, axis=0)
    target = uniform * tl.max(reached, axis=0)
    # rounding may leave the target above every sum: then the last with a share
    tile = tl.minimum(
        tl.sum((reached < target).to(tl.int32), axis=0), tl.max(tl.where(weights > 0.0, tiles, 0), axis=0)
    )
    before = tl.max(tl.where(tiles < tile, reached, 0.0), axis=0)
    places = tl.arange(0, TILE)
    ids = tile * TILE + places
    x = read_logits(source, adjusted, is_adjusted, ids, ids < VOCABULARY, ADJUSTED)
    shares = tl.where(x >= threshold, tl.exp((x - highest) * factor), 0.0)
    count = tl.sum((before + tl.cumsum(shares.to(tl.float64), axis=0) < target).to(tl.int32), axis=0)
    return tile * TILE + tl.minimum(count, tl.max(tl.where(shares > 0.0, places, 0), axis=0))


@jit
def draw_unfiltered(
    source: tl.tensor,
    adjusted: tl.tensor,
    is_adjusted: tl.tensor,
    tile_maxima: tl.tensor,
    tile_sums: tl.tensor,
    seed: tl.tensor,
    position: tl.tensor,
    choice: tl.tensor,
    temperature: tl.tensor,
    ADJUSTED: tl.constexpr,
    VOCABULARY: tl.constexpr,
    TILES: tl.constexpr,
    TILES_PAD: tl.constexpr,
    TILE: tl.constexpr,
    NO_TOKEN: tl.constexpr,
) -> tl.tensor:
    """The token of a row without filters, or of a greedy one; or none."""
    if temperature <= 0.0:
        token = most_likely(source, adjusted, is_adjusted, tile_maxima, ADJUSTED, VOCABULARY, TILES, TILES_PAD, TILE)
    else:
        highest = highest_logit(tile_maxima)
        weights = tile_weights(tile_maxima, tile_sums, highest, temperature).to(tl.float64)
        uniform = uniform_draw(seed, position.to(tl.int64), choice, 0)
        token = draw_from_tiles(
            source, adjusted, is_adjusted, weights, highest, float("-inf"), uniform, temperature,
            ADJUSTED, VOCABULARY, TILES_PAD, TILE,
        )  # fmt: skip
    return tl.where(tl.max(tile_maxima, axis=0) == float("-inf"), NO_TOKEN, tl.minimum(token, VOCABULARY - 1))


@jit_unspecialized("most_suppressed")
def _sum_tiles_kernel(
    maxima: tl.tensor,
    sums: tl.tensor,
    logits: tl.tensor,
    adjusted: tl.tensor,
    rows: tl.tensor,
    positions: tl.tensor,
    num_rows: tl.tensor,
    temperatures: tl.tensor,
    suppress_before: tl.tensor,
    num_suppressed: tl.tensor,
    suppressed: tl.tensor,
    duties: tl.tensor,
    token_ids: tl.tensor,
    row_token_ids: tl.tensor,
    arrivals: tl.tensor,
    seeds: tl.tensor,
    choices: tl.tensor,
    most_suppressed: tl.int32,
    LOGITS_STRIDE: tl.constexpr,
    ADJUSTED_STRIDE: tl.constexpr,
    ADJUSTED: tl.constexpr,
    VOCABULARY: tl.constexpr,
    TILES: tl.constexpr,
    TILES_PAD: tl.constexpr,
    TILE: tl.constexpr,
    LINE: tl.constexpr,
    AT_ONCE: tl.constexpr,
    DRAW: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    part = tl.program_id(0)
    index = tl.program_id(1)
    await_previous(OVERLAP)
    launch_next(OVERLAP)
    count = tl.load(num_rows)
    row = tl.load(rows + index)
    if (index >= count) | (row < 0):  # no row is: both are read at once, where the compiler would wait for the first
        return
    maxima += index * TILES
    sums += index * TILES
    source = logits + index.to(tl.int64) * LOGITS_STRIDE
    is_adjusted = tl.zeros([], tl.int32)
    if ADJUSTED:
        is_adjusted = tl.load(duties + row)
        adjusted += index.to(tl.int64) * ADJUSTED_STRIDE
    # The first lines of all tiles, then their second ones, and so on: a thread gets numbers of every line of its tiles,
    # and few threads share a tile.
    lines = tl.arange(0, AT_ONCE * TILE // LINE)
    starts = lines % AT_ONCE * TILE + lines // AT_ONCE * LINE
    within = starts[:, None] + tl.arange(0, LINE)[None, :]
    temperature = tl.load(temperatures + row)
    position = tl.load(positions + index)
    suppressed_before = tl.load(suppress_before + row)
    if DRAW:
        seed = tl.load(seeds + row)
        choice = tl.load(choices + row)
    factor = 1.4426950408889634 / tl.where(temperature > 0.0, temperature, 1.0)
    size: tl.constexpr = AT_ONCE * TILE
    ids = part * size + within
    tiles = part * AT_ONCE + tl.arange(0, AT_ONCE)
    is_whole = part < VOCABULARY // size
    checked = tl.zeros([AT_ONCE], tl.float32)
    if is_whole:
        if ADJUSTED:
            x = read_logits(source, adjusted, is_adjusted, ids, ids < VOCABULARY, ADJUSTED)
        else:
            x = tl.load(source + ids, eviction_policy="evict_first").to(tl.float32)
        checked = _sum_group(maxima, sums, x, tiles, factor, TILES)
    # Once more where a logit is not a number, or infinite: seldom, and a look at each costs as much as the sums. And
    # what is left of the vocabulary, where a look at each id's place is needed.
    is_broken = tl.min((checked >= 0.0).to(tl.int32), axis=0) == 0
    if is_broken | (part >= VOCABULARY // size):
        x = read_logits(source, adjusted, is_adjusted, ids, ids < VOCABULARY, ADJUSTED)
        _sum_group(maxima, sums, x, tiles, factor, TILES)
    if (is_adjusted == 0) & (position < suppressed_before):
        _suppress(
            maxima, sums, source, suppressed + row * most_suppressed,
            tl.load(num_suppressed + row), part * AT_ONCE, (part + 1) * AT_ONCE, factor, VOCABULARY, TILE,
        )  # fmt: skip
    if DRAW:
        tl.debug_barrier()  # every thread has stored
        if tl.atomic_add(arrivals + index, 1, sem="acq_rel", scope="gpu") != tl.num_programs(0) - 1:
            return
        tl.store(arrivals + index, 0)
        # past the first-level cache, which other multiprocessors do not write to
        tiles = tl.arange(0, TILES_PAD)
        tile_maxima = tl.load(maxima + tiles, mask=tiles < TILES, other=float("-inf"), cache_modifier=".cg")
        tile_sums = tl.load(sums + tiles, mask=tiles < TILES, other=0.0, cache_modifier=".cg")
        token = draw_unfiltered(
            source, adjusted, is_adjusted, tile_maxima, tile_sums, seed, position, choice, temperature,
            ADJUSTED, VOCABULARY, TILES, TILES_PAD, TILE, _NO_TOKEN,
        )  # fmt: skip
        tl.store(token_ids + index, token)
        tl.store(row_token_ids + row, tl.maximum(token, 0))


def sum_tiles(
    logits: torch.Tensor,
    where: LogitRows,
    settings: RowSettings,
    workspace: SamplingWorkspace,
    adjusted: AdjustedLogits | None = None,
    tokens: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Write the maxima and sums of the first num_rows rows of logits to the workspace, and -infinity over the logits of
    suppressed ids; the rest as `sample`. With `tokens`, its `token_ids` and `row_token_ids`, draw as well, as if no row
    used filters."""
    tiles = ceil_div(where.vocabulary, TILE)
    others = adjusted or AdjustedLogits(where.rows, logits)
    token_ids, row_token_ids = tokens or (where.rows, where.rows)
    _sum_tiles_kernel[(ceil_div(tiles, _AT_ONCE), len(logits))](
        workspace.maxima,
        workspace.sums,
        logits,
        others.logits,
        where.rows,
        where.positions,
        where.num_rows,
        settings.temperature,
        settings.suppress_before,
        settings.num_suppressed,
        settings.suppressed,
        others.duties,
        token_ids,
        row_token_ids,
        workspace.arrivals,
        settings.seed,
        settings.choice,
        settings.suppressed.shape[1],
        LOGITS_STRIDE=logits.stride(0),
        ADJUSTED_STRIDE=others.logits.stride(0),
        ADJUSTED=adjusted is not None,
        VOCABULARY=where.vocabulary,
        TILES=tiles,
        TILES_PAD=next_power_of_2(tiles),
        TILE=TILE,
        LINE=128 // logits.element_size(),
        AT_ONCE=_AT_ONCE,
        DRAW=tokens is not None,
        num_warps=_WARPS,
        **overlap_options(logits.device),
    )


def sum_tiles_reference(
    logits: torch.Tensor,
    where: LogitRows,
    settings: RowSettings,
    workspace: SamplingWorkspace,
    adjusted: AdjustedLogits | None = None,
) -> None:
    """`sum_tiles` in plain torch, row by row."""
    for i in range(int(where.num_rows)):
        row = int(where.rows[i])
        is_adjusted = adjusted is not None and bool(adjusted.duties[row])
        if not is_adjusted and where.positions[i] < settings.suppress_before[row]:
            logits[i, settings.suppressed[row, : settings.num_suppressed[row]].long()] = -torch.inf
        x = adjusted.logits[i] if is_adjusted and adjusted is not None else logits[i]
        x = x[: where.vocabulary].float().nan_to_num(-torch.inf, torch.finfo(torch.float32).max, -torch.inf)
        temperature = float(settings.temperature[row]) or 1.0
        for tile, start in enumerate(range(0, len(x), TILE)):
            part = x[start : start + TILE]
            top = part.max()
            workspace.maxima[i, tile] = top
            workspace.sums[i, tile] = ((part - top.clamp(min=torch.finfo(top.dtype).min)) / temperature).exp().sum()
