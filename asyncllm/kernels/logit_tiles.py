"""The maximum and the sum of each tile of a row's logits, and what they tell of the row.

They are what a draw without filters needs: it picks the tile and reads that one again. Sums of tiles are float32, sums
over tiles and within what is drawn from float64.
"""

from __future__ import annotations

import torch

from asyncllm.kernels.language import ceil_div, jit, jit_unspecialized, tl
from asyncllm.kernels.sampled_rows import TILE, AdjustedLogits, LogitRows, RowSettings, SamplingWorkspace
from asyncllm.kernels.thresholds import largest_threshold

# Measured on an H200, 256 rows of 151,936.
_AT_ONCE = 8
_WARPS = 4


@jit
def clean(x: tl.tensor) -> tl.tensor:
    """float32, not-a-number as -infinity, and no +infinity: so a broken row still yields some id."""
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
    most_suppressed: tl.int32,
    LOGITS_STRIDE: tl.constexpr,
    ADJUSTED_STRIDE: tl.constexpr,
    ADJUSTED: tl.constexpr,
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
        x = read_logits(source, adjusted, is_adjusted, ids, ids < VOCABULARY, ADJUSTED)
    else:  # a look at each id's place costs as much as the sums
        x = clean(tl.load(source + ids))
    # while the logits are on their way: after them, these reads would take as long again
    temperature = tl.load(temperatures + row)
    is_suppressing = tl.load(positions + index) < tl.load(suppress_before + row)
    if (is_adjusted == 0) & is_suppressing:
        for i in range(0, tl.load(num_suppressed + row)):
            banned = tl.load(suppressed + row * most_suppressed + i)
            x = tl.where(ids == banned, float("-inf"), x)
            tl.store(source + banned, float("-inf"), mask=banned // (TILE * AT_ONCE) == tl.program_id(1))
    top = tl.max(x, axis=1)
    shift = tl.where(top == float("-inf"), 0.0, top)
    factor = 1.4426950408889634 / tl.where(temperature > 0.0, temperature, 1.0)
    total = tl.sum(tl.exp2((x - shift[:, None]) * factor), axis=1)
    target = index * TILES + tiles
    tl.store(maxima + target, top, mask=tiles < TILES)
    tl.store(sums + target, total, mask=tiles < TILES)


def sum_tiles(
    logits: torch.Tensor,
    where: LogitRows,
    settings: RowSettings,
    workspace: SamplingWorkspace,
    adjusted: AdjustedLogits | None = None,
) -> None:
    """Write the maxima and sums of the first num_rows rows of logits to the workspace, and -infinity over the logits of
    suppressed ids; the rest as `sample`."""
    tiles = ceil_div(where.vocabulary, TILE)
    others = adjusted or AdjustedLogits(where.rows, logits)
    _sum_tiles_kernel[(len(logits), ceil_div(tiles, _AT_ONCE))](
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
        settings.suppressed.shape[1],
        LOGITS_STRIDE=logits.stride(0),
        ADJUSTED_STRIDE=others.logits.stride(0),
        ADJUSTED=adjusted is not None,
        VOCABULARY=where.vocabulary,
        TILES=tiles,
        TILE=TILE,
        AT_ONCE=_AT_ONCE,
        num_warps=_WARPS,
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
