"""Log-probabilities of the rows that ask for them: of the most likely tokens, and of some by id, with their ranks.

Before the draw, `score_most_likely` reads the row twice for the logarithm of its sum, keeps the maxima of its tiles,
and takes the largest logit again and again, each time looking at one tile only. After it, `score_named` reads the row
once for the token that was drawn and once for each that was named, and counts what is larger. Results go to a line of a
ring, which may lie in pinned memory of the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from asyncllm.kernels.language import ceil_div, jit, jit_unspecialized, next_power_of_2, tl
from asyncllm.kernels.sampled_rows import LogitRows

MOST_LIKELY = 20
"""So many at most."""

_TILE = 512
_AT_ONCE = 8
_BLOCK = 4096


@dataclass(frozen=True, slots=True)
class ScoreRing:
    """Where results are left: a line for each step of a ring."""

    top_ids: torch.Tensor  # [steps, rows, MOST_LIKELY] int32
    top_scores: torch.Tensor  # [steps, rows, MOST_LIKELY] float32; -infinity where there is no more
    named_scores: torch.Tensor  # [steps, rows, 1 + most] float32: of the drawn token, then of those that are named
    named_ranks: torch.Tensor  # [steps, rows, 1 + most] int32: 1 + how many are more likely


@dataclass(frozen=True, slots=True)
class ScoreRequests:
    """What each row asks for, on the device."""

    tops: torch.Tensor  # [rows] int32: 0 asks for nothing, else 1 + the number of most likely tokens
    num_named: torch.Tensor  # [rows] int32
    named: torch.Tensor  # [rows, most] int32


@dataclass(frozen=True, slots=True)
class ScoreWorkspace:
    """Device memory between the launches."""

    peaks: torch.Tensor  # [n, tiles] float32
    sums: torch.Tensor  # [n] float32: log of the sum of exp


def make_score_workspace(max_rows: int, vocabulary: int, device: torch.device) -> ScoreWorkspace:
    """For up to `max_rows` rows of logits."""
    return ScoreWorkspace(
        peaks=torch.empty((max_rows, ceil_div(vocabulary, _TILE)), dtype=torch.float32, device=device),
        sums=torch.empty(max_rows, dtype=torch.float32, device=device),
    )


@jit
def _read_scaled(source: tl.tensor, ids: tl.tensor, factor: tl.tensor, VOCABULARY: tl.constexpr) -> tl.tensor:
    x = tl.load(source + ids, mask=ids < VOCABULARY, other=float("-inf")).to(tl.float32) * factor
    return tl.maximum(x, float("-inf"))  # of a number and not-a-number, the number


@jit
def _factor(temperatures: tl.tensor, row: tl.tensor, PROCESSED: tl.constexpr) -> tl.tensor:
    """What logits are multiplied by: over the temperature where they are scored as they are drawn from."""
    factor = tl.full([], 1.0, tl.float32)
    if PROCESSED:
        temperature = tl.load(temperatures + row)
        factor = tl.where(temperature > 0.0, 1.0 / tl.where(temperature > 0.0, temperature, 1.0), 1.0)
    return factor


@jit
def _most_likely_kernel(
    top_ids: tl.tensor,
    top_scores: tl.tensor,
    peaks: tl.tensor,
    sums: tl.tensor,
    logits: tl.tensor,
    turn: tl.tensor,
    rows: tl.tensor,
    num_rows: tl.tensor,
    tops: tl.tensor,
    temperatures: tl.tensor,
    LINE: tl.constexpr,
    LOGITS_STRIDE: tl.constexpr,
    PROCESSED: tl.constexpr,
    VOCABULARY: tl.constexpr,
    TILES: tl.constexpr,
    TILES_PAD: tl.constexpr,
    TILE: tl.constexpr,
    AT_ONCE: tl.constexpr,
    MOST: tl.constexpr,
) -> None:
    index = tl.program_id(0)
    if index >= tl.load(num_rows):
        return
    row = tl.load(rows + index)
    asked = tl.load(tops + row)
    if asked == 0:
        return
    factor = _factor(temperatures, row, PROCESSED)
    source = logits + index.to(tl.int64) * LOGITS_STRIDE
    peaks += index * TILES
    for first in range(0, TILES, AT_ONCE):
        tiles = first + tl.arange(0, AT_ONCE)
        x = _read_scaled(source, tiles[:, None] * TILE + tl.arange(0, TILE)[None, :], factor, VOCABULARY)
        tl.store(peaks + tiles, tl.max(x, axis=1), mask=tiles < TILES)
    tl.debug_barrier()
    tiles = tl.arange(0, TILES_PAD)
    highs = tl.load(peaks + tiles, mask=tiles < TILES, other=float("-inf"))
    highest = tl.max(highs, axis=0)
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    total = tl.zeros([AT_ONCE, TILE], tl.float32)
    for first in range(0, TILES, AT_ONCE):
        some = first + tl.arange(0, AT_ONCE)
        x = _read_scaled(source, some[:, None] * TILE + tl.arange(0, TILE)[None, :], factor, VOCABULARY)
        total += tl.exp(x - shift)
    whole = shift + tl.log(tl.sum(tl.sum(total, axis=1), axis=0))
    tl.store(sums + index, whole)
    target = tl.load(turn).to(tl.int64) * LINE + index * MOST
    last = tl.full([], float("inf"), tl.float32)
    last_id = tl.full([], -1, tl.int32)
    for place in range(0, asked - 1):
        best = tl.max(highs, axis=0)
        tile = tl.min(tl.where(highs == best, tiles, TILES - 1), axis=0)
        ids = tile * TILE + tl.arange(0, TILE)
        x = _read_scaled(source, ids, factor, VOCABULARY)
        left = (x < last) | ((x == last) & (ids > last_id))  # what comes after the last one taken
        last = tl.max(tl.where(left, x, float("-inf")), axis=0)
        last_id = tl.min(tl.where(left & (x == last), ids, VOCABULARY - 1), axis=0)
        left &= ids != last_id
        highs = tl.where(tiles == tile, tl.max(tl.where(left, x, float("-inf")), axis=0), highs)
        tl.store(top_ids + target + place, last_id)
        tl.store(top_scores + target + place, last - whole)


@jit_unspecialized("line", "most")
def _named_kernel(
    named_scores: tl.tensor,
    named_ranks: tl.tensor,
    sums: tl.tensor,
    token_ids: tl.tensor,
    logits: tl.tensor,
    turn: tl.tensor,
    rows: tl.tensor,
    num_rows: tl.tensor,
    tops: tl.tensor,
    num_named: tl.tensor,
    named: tl.tensor,
    temperatures: tl.tensor,
    line: tl.int32,
    most: tl.int32,
    LOGITS_STRIDE: tl.constexpr,
    PROCESSED: tl.constexpr,
    VOCABULARY: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    index = tl.program_id(0)
    if index >= tl.load(num_rows):
        return
    row = tl.load(rows + index)
    place = tl.program_id(1)
    if (tl.load(tops + row) == 0) | (place > tl.load(num_named + row)):
        return
    token = tl.maximum(tl.load(token_ids + index), 0)  # where none was drawn, any
    if place > 0:
        token = tl.load(named + row * most + place - 1)
    factor = _factor(temperatures, row, PROCESSED)
    source = logits + index.to(tl.int64) * LOGITS_STRIDE
    value = tl.maximum(tl.load(source + token).to(tl.float32) * factor, float("-inf"))
    larger = tl.zeros([BLOCK], tl.int32)
    for start in range(0, VOCABULARY, BLOCK):
        larger += (_read_scaled(source, start + tl.arange(0, BLOCK), factor, VOCABULARY) > value).to(tl.int32)
    target = tl.load(turn).to(tl.int64) * line + index * (1 + most) + place
    tl.store(named_scores + target, value - tl.load(sums + index))
    tl.store(named_ranks + target, 1 + tl.sum(larger, axis=0))


def score_most_likely(
    logits: torch.Tensor,
    where: LogitRows,
    requests: ScoreRequests,
    workspace: ScoreWorkspace,
    ring: ScoreRing,
    *,
    turn: torch.Tensor,
    temperature: torch.Tensor | None = None,
) -> None:
    """The most likely tokens of each of the first num_rows rows of logits that asks, to the line of turn [1] int32.

    logits [n, at least vocabulary] of any float type. temperature [rows] float32:
    score what is drawn from, the logits over it, where it is not 0. Equally likely tokens come by id.
    """
    count = len(logits)
    tiles = ceil_div(where.vocabulary, _TILE)
    if count:
        _most_likely_kernel[(count,)](
            ring.top_ids,
            ring.top_scores,
            workspace.peaks,
            workspace.sums,
            logits,
            turn,
            where.rows,
            where.num_rows,
            requests.tops,
            workspace.sums if temperature is None else temperature,
            LINE=ring.top_ids.stride(0),
            LOGITS_STRIDE=logits.stride(0),
            PROCESSED=temperature is not None,
            VOCABULARY=where.vocabulary,
            TILES=tiles,
            TILES_PAD=next_power_of_2(tiles),
            TILE=_TILE,
            AT_ONCE=_AT_ONCE,
            MOST=MOST_LIKELY,
            num_warps=8,
        )


def score_named(
    logits: torch.Tensor,
    where: LogitRows,
    requests: ScoreRequests,
    workspace: ScoreWorkspace,
    ring: ScoreRing,
    token_ids: torch.Tensor,
    *,
    turn: torch.Tensor,
    temperature: torch.Tensor | None = None,
) -> None:
    """The drawn tokens token_ids [n] int32, and those that rows name. After `score_most_likely` of the same logits."""
    if len(logits):
        most = requests.named.shape[1]
        _named_kernel[(len(logits), 1 + most)](
            ring.named_scores,
            ring.named_ranks,
            workspace.sums,
            token_ids,
            logits,
            turn,
            where.rows,
            where.num_rows,
            requests.tops,
            requests.num_named,
            requests.named,
            workspace.sums if temperature is None else temperature,
            ring.named_scores.stride(0),
            most,
            LOGITS_STRIDE=logits.stride(0),
            PROCESSED=temperature is not None,
            VOCABULARY=where.vocabulary,
            BLOCK=_BLOCK,
            num_warps=8,
        )


def score_reference(
    logits: torch.Tensor,
    where: LogitRows,
    requests: ScoreRequests,
    ring: ScoreRing,
    token_ids: torch.Tensor,
    *,
    turn: torch.Tensor,
    temperature: torch.Tensor | None = None,
) -> None:
    """Both in plain torch, row by row."""
    line = int(turn)
    for i in range(int(where.num_rows)):
        row = int(where.rows[i])
        asked = int(requests.tops[row])
        if not asked:
            continue
        x = logits[i, : where.vocabulary].float()
        if temperature is not None and float(temperature[row]) > 0.0:
            x = x / temperature[row]
        scores = x.log_softmax(0)
        best = scores.sort(descending=True, stable=True)
        top = asked - 1
        ring.top_ids[line, i, :top] = best.indices[:top].int().to(ring.top_ids.device)
        ring.top_scores[line, i, :top] = best.values[:top].to(ring.top_ids.device)
        named = [max(0, int(token_ids[i])), *requests.named[row, : int(requests.num_named[row])].tolist()]
        for place, token_id in enumerate(named):
            ring.named_scores[line, i, place] = scores[token_id]
            ring.named_ranks[line, i, place] = 1 + (scores > scores[token_id]).sum()
