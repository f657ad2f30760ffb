"""Logits that wait for the host's word: kept in a buffer of their own row, and later banned as the host says."""

from __future__ import annotations

import torch

from asyncllm.kernels.language import ceil_div, constexpr, jit, tl
from asyncllm.kernels.sampled_rows import LATE, LogitRows

_BLOCK = 4096

_LATE = constexpr(LATE)


@jit
def _keep_kernel(
    kept: tl.tensor,
    logits: tl.tensor,
    rows: tl.tensor,
    num_rows: tl.tensor,
    duties: tl.tensor,
    KEPT_STRIDE: tl.constexpr,
    LOGITS_STRIDE: tl.constexpr,
    VOCABULARY: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    index = tl.program_id(0)
    if index >= tl.load(num_rows):
        return
    row = tl.load(rows + index)
    if (tl.load(duties + row) & _LATE) == 0:
        return
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + index.to(tl.int64) * LOGITS_STRIDE + ids, mask=ids < VOCABULARY, other=0.0)
    tl.store(kept + row.to(tl.int64) * KEPT_STRIDE + ids, x, mask=ids < VOCABULARY)


def keep_logits(kept: torch.Tensor, logits: torch.Tensor, where: LogitRows, duties: torch.Tensor) -> None:
    """Copy those of the first num_rows rows of logits [n, at least vocabulary] that are of late rows to their own rows
    of kept [rows, at least vocabulary], of the same type. duties [rows] int32."""
    if len(logits):
        _keep_kernel[(len(logits), ceil_div(where.vocabulary, _BLOCK))](
            kept,
            logits,
            where.rows,
            where.num_rows,
            duties,
            KEPT_STRIDE=kept.stride(0),
            LOGITS_STRIDE=logits.stride(0),
            VOCABULARY=where.vocabulary,
            BLOCK=_BLOCK,
            num_warps=8,
        )


def keep_logits_reference(kept: torch.Tensor, logits: torch.Tensor, where: LogitRows, duties: torch.Tensor) -> None:
    """`keep_logits` in plain torch."""
    for i in range(int(where.num_rows)):
        if int(duties[where.rows[i]]) & LATE:
            kept[where.rows[i], : where.vocabulary] = logits[i, : where.vocabulary]


@jit
def _mask_kernel(
    logits: tl.tensor,
    masks: tl.tensor,
    STRIDE: tl.constexpr,
    WORDS: tl.constexpr,
    VOCABULARY: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    index = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(masks + index * WORDS + ids // 32, mask=ids < VOCABULARY, other=-1)
    banned = ((word >> (ids % 32)) & 1) == 0
    tl.store(logits + index * STRIDE + ids, float("-inf"), mask=banned & (ids < VOCABULARY))


def mask_logits(logits: torch.Tensor, masks: torch.Tensor, *, vocabulary: int) -> None:
    """Ban in logits [n, at least vocabulary] what masks [n, ceil(vocabulary / 32)] int32 do not allow, in place: bit v
    of a row is token v's. The masks may lie in pinned memory of the host."""
    if len(masks):
        _mask_kernel[(len(masks), ceil_div(vocabulary, _BLOCK))](
            logits,
            masks,
            STRIDE=logits.stride(0),
            WORDS=masks.shape[1],
            VOCABULARY=vocabulary,
            BLOCK=_BLOCK,
            num_warps=8,
        )


def mask_logits_reference(logits: torch.Tensor, masks: torch.Tensor, *, vocabulary: int) -> None:
    """`mask_logits` in plain torch."""
    bits = (masks[:, :, None] >> torch.arange(32, device=masks.device)) & 1
    logits[: len(masks), :vocabulary].masked_fill_(bits.flatten(1)[:, :vocabulary] == 0, -torch.inf)
