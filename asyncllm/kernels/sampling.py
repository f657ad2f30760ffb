"""The next token of each row: temperature, top-k, top-p, min-p and a draw (`uniform_draw`).

The token is the first, in the order of ids, at which the cumulative probability of the kept tokens reaches u times
their total. A filter keeps every token that is at least as likely as some token, so each is a threshold on the logits,
found without sorting:

- top-k: the k-th largest logit (with all that tie with it);
- top-p: of the tokens left, the largest threshold at which those above it, or at it, hold top_p of their probability;
- min-p: the largest logit + temperature · ln(min_p).

The first launch leaves the sum and the maximum of each tile of logits (`logit_tiles`). In the second, one program a row
draws: without a filter it picks the tile and reads that one again; with one, the tiles tell how small a logit may be
that is kept, what is at least that gets listed, and thresholds and draw are found in the list. So a common filter costs
a row little, and its registers are few. Rows whose list is too short for that are drawn by a third (`wide_rows`).
"""

from __future__ import annotations

import torch

from asyncllm.kernels.language import ceil_div, constexpr, jit, next_power_of_2, tl
from asyncllm.kernels.logit_tiles import TILE, draw_from_tiles, lower_bound, read_logits, sum_tiles, tile_weights
from asyncllm.kernels.sampled_rows import FILTERS, AdjustedLogits, LogitRows, RowSettings, SamplingWorkspace
from asyncllm.kernels.thresholds import largest_threshold
from asyncllm.kernels.uniform_draw import philox4x32, uniform_draw
from asyncllm.kernels.wide_rows import draw_wide_rows

# Measured on an H200, 256 rows of 151,936.
_LISTED_AT_ONCE = 8
_DRAW_WARPS = 4
_DRAW_REGISTERS = 168  # three programs fit on a multiprocessor, so that 256 rows are all drawn at once
_FEW, _MOST = 512, 4096
"""Lengths of the list of logits that filters may keep: of a common row, and of a wide one."""

_FILTERS = constexpr(FILTERS)


def make_sampling_workspace(
    max_rows: int, vocabulary: int, device: torch.device, candidates: int = _MOST
) -> SamplingWorkspace:
    """Allocate for up to `max_rows` rows of logits. `candidates`, a power of two, is for tests of its overflow."""
    tiles, few = ceil_div(vocabulary, TILE), min(_FEW, candidates)

    def make(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    return SamplingWorkspace(
        tops=make(max_rows, tiles),
        sums=make(max_rows, tiles),
        lists=make(max_rows, tiles, dtype=torch.int32),
        is_wide=make(max_rows, dtype=torch.int32),
        candidates=make(max_rows, candidates),
        candidate_ids=make(max_rows, few, dtype=torch.int32),
        reached=make(max_rows, candidates, dtype=torch.float64),
    )


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
        x = read_logits(source, adjusted, is_adjusted, ids, inside, ADJUSTED)
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
        threshold = largest_threshold(x, (places < filled).to(tl.float32), 0.0, k.to(tl.float32), low, highest, 8)
        weights = tl.where(x >= threshold, weights, 0.0)
        total = tl.sum(weights, axis=0)
    if nucleus < 1.0:
        threshold = largest_threshold(x, weights, 0.0, nucleus * total, threshold, highest, 8)
    if share > 0.0:
        threshold = tl.maximum(threshold, highest + heat * tl.log(share))
    kept = tl.where(x >= threshold, weights, 0.0).to(tl.float64)
    reached = tl.cumsum(kept, axis=0)
    target = uniform * tl.max(reached, axis=0)
    # rounding may leave the target above every sum: then the last with a share
    place = tl.minimum(tl.sum((reached < target).to(tl.int32), axis=0), tl.max(tl.where(kept > 0.0, places, 0), axis=0))
    return tl.load(candidate_ids + place)


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
            filtered &= (is_adjusted & _FILTERS) == 0
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
        x = read_logits(source, adjusted, is_adjusted, ids, ids < VOCABULARY, ADJUSTED)
        token = tile * TILE + tl.min(tl.where(x == highest, places, TILE - 1), axis=0)
    else:
        highest = tl.where(highest == float("-inf"), 0.0, highest)  # a broken row: its difference to itself is a number
        uniform = uniform_draw(tl.load(seed + row), tl.load(positions + index).to(tl.int64), tl.load(choice + row), 0)
        weights = tile_weights(peaks, sums, highest, heat, TILES, TILES_PAD)
        if filtered == 0:
            token = draw_from_tiles(
                source, adjusted, is_adjusted, weights.to(tl.float64), highest, float("-inf"), uniform, heat,
                ADJUSTED, VOCABULARY, TILES_PAD, TILE,
            )  # fmt: skip
        if FILTERS:  # noqa: SIM102 # a constant of the kernel, apart from what a row asks for
            if filtered:
                lists += index * TILES
                candidates += index.to(tl.int64) * CANDIDATES
                candidate_ids += index.to(tl.int64) * FEW
                total = tl.sum(weights, axis=0)
                low = lower_bound(peaks, highest, total, heat, k, nucleus, share, VOCABULARY, TILES, TILES_PAD)
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


def sample(
    logits: torch.Tensor,
    where: LogitRows,
    settings: RowSettings,
    workspace: SamplingWorkspace,
    *,
    token_ids: torch.Tensor,
    row_token_ids: torch.Tensor,
    adjusted: AdjustedLogits | None = None,
    filters: bool = True,
) -> None:
    """Sample a token for each of the first num_rows rows of logits; nothing waits for the host.

    logits [n, at least vocabulary], last dimension dense, any float type; logits of suppressed ids are overwritten with
    -infinity. The token of logits i goes to token_ids[i] and row_token_ids[rows[i]], both int32. Rows with a duty are
    read from `adjusted`, where suppressed ids are not suppressed once more. `filters=False` promises that no row uses
    top-k, top-p or min-p.
    """
    if not len(logits):
        return
    sum_tiles(logits, where, settings, workspace, adjusted)
    tiles = ceil_div(where.vocabulary, TILE)
    others = adjusted or AdjustedLogits(where.rows, logits)
    _draw_kernel[(len(logits),)](
        token_ids,
        row_token_ids,
        workspace.is_wide,
        workspace.tops,
        workspace.sums,
        workspace.lists,
        workspace.candidates,
        workspace.candidate_ids,
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
        FILTERS=filters,
        VOCABULARY=where.vocabulary,
        TILES=tiles,
        TILES_PAD=next_power_of_2(tiles),
        TILE=TILE,
        AT_ONCE=_LISTED_AT_ONCE,
        FEW=workspace.candidate_ids.shape[1],
        CANDIDATES=workspace.candidates.shape[1],
        num_warps=_DRAW_WARPS,
        maxnreg=_DRAW_REGISTERS,
    )
    if filters:
        draw_wide_rows(
            logits, where, settings, workspace, token_ids=token_ids, row_token_ids=row_token_ids, adjusted=adjusted
        )


def sample_reference(logits: torch.Tensor, where: LogitRows, settings: RowSettings) -> torch.Tensor:
    """`sample` in plain torch, row by row: [num_rows] int32 token ids."""
    tokens = []
    for i in range(int(where.num_rows)):
        row, position = int(where.rows[i]), int(where.positions[i])
        x = logits[i, : where.vocabulary].float().nan_to_num(-torch.inf, torch.finfo(torch.float32).max, -torch.inf)
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
