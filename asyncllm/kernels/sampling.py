"""The next token of each row: temperature, top-k, top-p, min-p and a draw (`uniform_draw`).

The token is the first, in the order of ids, at which the cumulative probability of the kept tokens reaches u times
their total. A filter keeps every token that is at least as likely as some token, so each is a threshold on the logits,
found without sorting:

- top-k: the k-th largest logit (with all that tie with it);
- top-p: of the tokens left, the largest threshold at which those above it, or at it, hold top_p of their probability;
- min-p: the largest logit + temperature · ln(min_p).

The first launch leaves the sum and the maximum of each tile of logits (`logit_tiles`). A row without a filter picks the
tile and reads that one again: where no row has any, in the same launch. Else one program a row draws in a second one:
the tiles tell how small a logit may be that a filter keeps, what is at least that gets listed, and thresholds and draw
are found in the list. So a common filter costs a row little, and its registers are few. Rows whose list is too short
for that are drawn by a third (`wide_rows`).
"""

from __future__ import annotations

import torch

from asyncllm.kernels.language import await_previous, ceil_div, constexpr, jit, launch_next, overlap_options, tl
from asyncllm.kernels.logit_tiles import (
    draw_unfiltered,
    highest_logit,
    lower_bound,
    read_logits,
    sum_tiles,
    tile_weights,
)
from asyncllm.kernels.sampled_rows import (
    FILTERS,
    NO_TOKEN,
    TILE,
    AdjustedLogits,
    Draw,
    LogitRows,
    RowSettings,
    SamplingWorkspace,
)
from asyncllm.kernels.thresholds import largest_threshold
from asyncllm.kernels.uniform_draw import philox4x32, uniform_draw
from asyncllm.kernels.wide_rows import draw_wide_rows

# Measured on an H200, 256 rows of 151,936.
_LISTED_AT_ONCE = 8
_DRAW_WARPS = 4
_DRAW_REGISTERS = 168  # three programs fit on a multiprocessor, so that 256 rows are all drawn at once
_FEW, _MOST = 512, 4096
"""Lengths of the list of logits that filters may keep: of a common row, and of a wide one."""

_FILTERS, _NO_TOKEN = constexpr(FILTERS), constexpr(NO_TOKEN)


def make_sampling_workspace(
    max_rows: int, vocabulary: int, device: torch.device, candidates: int = _MOST
) -> SamplingWorkspace:
    """Allocate for up to `max_rows` rows of logits. `candidates`, a power of two, is for tests of its overflow."""
    tiles, few = ceil_div(vocabulary, TILE), min(_FEW, candidates)

    def make(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    return SamplingWorkspace(
        maxima=make(max_rows, tiles),
        sums=make(max_rows, tiles),
        arrivals=torch.zeros(max_rows, dtype=torch.int32, device=device),
        lists=make(max_rows, tiles, dtype=torch.int32),
        is_wide=make(max_rows, dtype=torch.int32),
        candidates=make(max_rows, candidates),
        candidate_ids=make(max_rows, few, dtype=torch.int32),
        reached=make(max_rows, candidates, dtype=torch.float64),
    )


@jit
def _list_tiles(
    maxima: tl.tensor, targets: tl.tensor, low: tl.tensor, TILES: tl.constexpr, PAD: tl.constexpr
) -> tl.tensor:
    """Write the numbers of the tiles that reach `low`, in order; returns how many."""
    tiles = tl.arange(0, PAD)
    reach = tl.load(maxima + tiles, mask=tiles < TILES, other=float("-inf")) >= low
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
    temperature: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    VOCABULARY: tl.constexpr,
    SIZE: tl.constexpr,
) -> tl.tensor:
    """A token of the candidates, which hold all that the filters keep; `total` sums over the whole vocabulary."""
    places = tl.arange(0, SIZE)
    x = tl.load(candidates + places, mask=places < filled, other=float("-inf"))
    weights = tl.exp((x - highest) * (1.0 / temperature))
    threshold = low
    if (top_k > 0) & (top_k < VOCABULARY):
        threshold = largest_threshold(x, (places < filled).to(tl.float32), 0.0, top_k.to(tl.float32), low, highest, 8)
        weights = tl.where(x >= threshold, weights, 0.0)
        total = tl.sum(weights, axis=0)
    if top_p < 1.0:
        threshold = largest_threshold(x, weights, 0.0, top_p * total, threshold, highest, 8)
    if min_p > 0.0:
        threshold = tl.maximum(threshold, highest + temperature * tl.log(min_p))
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
    maxima: tl.tensor,
    sums: tl.tensor,
    lists: tl.tensor,
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
    candidate_ids: tl.tensor,
    LOGITS_STRIDE: tl.constexpr,
    ADJUSTED_STRIDE: tl.constexpr,
    ADJUSTED: tl.constexpr,
    VOCABULARY: tl.constexpr,
    TILES: tl.constexpr,
    TILES_PAD: tl.constexpr,
    TILE: tl.constexpr,
    CANDIDATES: tl.constexpr,
    AT_ONCE: tl.constexpr,
    FEW: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    index = tl.program_id(0)
    if index >= tl.load(num_rows):
        return
    # what the kernel before does not write is read while it still runs
    row = tl.load(rows + index)
    position = tl.load(positions + index)
    temperature = tl.load(temperatures + row)
    seed = tl.load(seeds + row)
    choice = tl.load(choices + row)
    top_k = tl.load(top_ks + row)
    top_p = tl.load(top_ps + row)
    min_p = tl.load(min_ps + row)
    is_adjusted = tl.zeros([], tl.int32)
    filtered = ((top_k > 0) & (top_k < VOCABULARY)) | (top_p < 1.0) | (min_p > 0.0)
    if ADJUSTED:
        is_adjusted = tl.load(duties + row)
        adjusted += index.to(tl.int64) * ADJUSTED_STRIDE
        filtered &= (is_adjusted & _FILTERS) == 0
    await_previous(OVERLAP)
    launch_next(OVERLAP)
    maxima += index * TILES
    sums += index * TILES
    tiles = tl.arange(0, TILES_PAD)
    tile_maxima = tl.load(maxima + tiles, mask=tiles < TILES, other=float("-inf"))
    tile_sums = tl.load(sums + tiles, mask=tiles < TILES, other=0.0)
    source = logits + index.to(tl.int64) * LOGITS_STRIDE
    token = tl.zeros([], tl.int32)
    wide = tl.zeros([], tl.int32)
    if (temperature <= 0.0) | (filtered == 0):
        token = draw_unfiltered(
            source, adjusted, is_adjusted, tile_maxima, tile_sums, seed, position, choice, temperature,
            ADJUSTED, VOCABULARY, TILES, TILES_PAD, TILE, _NO_TOKEN,
        )  # fmt: skip
    else:
        lists += index * TILES
        candidates += index.to(tl.int64) * CANDIDATES
        candidate_ids += index.to(tl.int64) * FEW
        highest = highest_logit(tile_maxima)
        total = tl.sum(tile_weights(tile_maxima, tile_sums, highest, temperature), axis=0)
        low = lower_bound(tile_maxima, highest, total, temperature, top_k, top_p, min_p, VOCABULARY, TILES, TILES_PAD)
        listed = _list_tiles(maxima, lists, low, TILES, TILES_PAD)
        filled = _list_candidates(
            source, adjusted, is_adjusted, lists, listed, candidates, candidate_ids, low,
            ADJUSTED, VOCABULARY, TILE, AT_ONCE, FEW,
        )  # fmt: skip
        if filled <= FEW:
            uniform = uniform_draw(seed, position.to(tl.int64), choice, 0)
            token = _draw_candidate(
                candidates, candidate_ids, filled, low, highest, total, uniform, temperature, top_k, top_p, min_p,
                VOCABULARY, FEW,
            )  # fmt: skip
            token = tl.where(filled > 0, token, _NO_TOKEN)
        wide = (filled > FEW).to(tl.int32)
    tl.store(is_wide + index, wide)
    tl.store(token_ids + index, token)
    tl.store(row_token_ids + row, tl.maximum(token, 0))


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
    -infinity. The token of logits i goes to token_ids[i] and row_token_ids[rows[i]], both int32; where none is above
    -infinity, `NO_TOKEN` to the former, and 0, which a step can look up, to the latter. Rows with a duty are read from
    `adjusted`, where suppressed ids are not suppressed once more. `filters=False` promises that no row uses top-k,
    top-p or min-p.
    """
    if not len(logits):
        return
    if not filters:
        sum_tiles(logits, where, settings, workspace, adjusted, (token_ids, row_token_ids))
        return
    sum_tiles(logits, where, settings, workspace, adjusted)
    draw = Draw(logits, where, settings, workspace, token_ids, row_token_ids, adjusted)
    _draw_kernel[(len(logits),)](
        *draw.arguments(),
        workspace.candidate_ids,
        **draw.constants(),
        AT_ONCE=_LISTED_AT_ONCE,
        FEW=workspace.candidate_ids.shape[1],
        num_warps=_DRAW_WARPS,
        maxnreg=_DRAW_REGISTERS,
        **overlap_options(logits.device),
    )
    draw_wide_rows(draw)


def sample_reference(logits: torch.Tensor, where: LogitRows, settings: RowSettings) -> torch.Tensor:
    """`sample` in plain torch, row by row: [num_rows] int32 token ids."""
    tokens = []
    for i in range(int(where.num_rows)):
        row, position = int(where.rows[i]), int(where.positions[i])
        x = logits[i, : where.vocabulary].float().nan_to_num(-torch.inf, torch.finfo(torch.float32).max, -torch.inf)
        if position < settings.suppress_before[row]:
            x[settings.suppressed[row, : settings.num_suppressed[row]].long()] = -torch.inf
        if not bool((x > -torch.inf).any()):
            tokens.append(NO_TOKEN)
            continue
        temperature = float(settings.temperature[row])
        if temperature == 0.0:
            tokens.append(int(torch.nonzero(x == x.max())[0]))
            continue
        weights = ((x - x.max()) / temperature).exp()
        kept = _kept(x, weights.double(), settings, row)
        reached = torch.where(kept, weights.double(), 0.0).cumsum(0)
        words = philox4x32(int(settings.seed[row]) & 0xFFFFFFFFFFFFFFFF, position, int(settings.choice[row]))
        u = (torch.tensor(float(words[0] >> 8)) + 0.5) * 2.0**-24  # float32
        token = int((reached < u.double() * reached[-1]).sum())
        tokens.append(min(token, int(torch.nonzero(kept)[-1])))
    return torch.tensor(tokens, dtype=torch.int32, device=logits.device)


def _kept(x: torch.Tensor, weights: torch.Tensor, settings: RowSettings, row: int) -> torch.Tensor:
    top_k, top_p, min_p = int(settings.top_k[row]), float(settings.top_p[row]), float(settings.min_p[row])
    temperature = float(settings.temperature[row])
    kept = x > -torch.inf
    if 0 < top_k < len(x):
        kept &= x >= x.sort(descending=True).values[top_k - 1]
    if top_p < 1.0:
        order = torch.where(kept, x, -torch.inf).sort(descending=True)
        held = torch.where(kept, weights, 0.0)[order.indices].cumsum(0)
        kept &= x >= order.values[int((held < top_p * held[-1]).sum())]
    if min_p > 0.0:
        kept &= x >= x.max() + temperature * torch.log(torch.tensor(min_p))
    return kept
