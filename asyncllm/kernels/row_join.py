"""Requests take rows: their settings go from words that the host wrote into the state of the rows.

Mostly a step does that itself, see `step_layout`; this launch is for rows that have suppressed ids.

A record is `RECORD_WORDS` int32 words: the eight settings in the order of `JOIN_SETTINGS` (float32 ones as their bits),
the low and high half of the seed, the row, and where the row's suppressed ids begin among those of all records.
"""

from __future__ import annotations

import torch

from asyncllm.kernels.language import jit, jit_unspecialized, tl

JOIN_SETTINGS = (
    "prompt_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "choice",
    "suppress_before",
    "num_suppressed",
)
RECORD_WORDS = 16  # of which the last four are not used
_SEED, _ROW, _FIRST = 8, 10, 11
_BLOCK = 128


@jit
def take_row(record: tl.tensor, settings: tl.tensor, seeds: tl.tensor, rows: tl.int32) -> tl.tensor:
    """Write a record, all but its suppressed ids. Returns the row."""
    row = tl.load(record + 10)
    fields = tl.arange(0, 8)
    tl.store(settings + fields * rows + row, tl.load(record + fields))
    halves = tl.arange(0, 2)
    tl.store(seeds + 2 * row + halves, tl.load(record + 8 + halves))
    return row


@jit_unspecialized("most")
def _row_join_kernel(
    settings: tl.tensor,
    seeds: tl.tensor,
    suppressed: tl.tensor,
    records: tl.tensor,
    suppressed_ids: tl.tensor,
    rows: tl.int32,
    most: tl.int32,
    RECORD: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    record = records + tl.program_id(0) * RECORD
    row = take_row(record, settings, seeds, rows)
    count = tl.load(record + 7)
    first = tl.load(record + 11)
    for start in range(0, count, BLOCK):
        places = start + tl.arange(0, BLOCK)
        ids = tl.load(suppressed_ids + first + places, mask=places < count, other=0)
        tl.store(suppressed + row * most + places, ids, mask=places < count)


def join_rows(
    settings: torch.Tensor,
    seeds: torch.Tensor,
    suppressed: torch.Tensor,
    records: torch.Tensor,
    suppressed_ids: torch.Tensor,
) -> None:
    """Write `records` [n, RECORD_WORDS] int32, of n different rows, into the rows' state.

    settings [8, rows] int32, one line for each of `JOIN_SETTINGS`; seeds [rows] int64; suppressed [rows, most] int32,
    of which a row's first num_suppressed count; suppressed_ids [any] int32, those of all records. All are dense;
    records and suppressed_ids may lie in pinned memory of the host.
    """
    if len(records):
        _row_join_kernel[(len(records),)](
            settings,
            seeds.view(torch.int32),
            suppressed,
            records,
            suppressed_ids,
            rows=settings.shape[1],
            most=suppressed.shape[1],
            RECORD=RECORD_WORDS,
            BLOCK=_BLOCK,
            num_warps=1,
        )


def join_rows_reference(
    settings: torch.Tensor,
    seeds: torch.Tensor,
    suppressed: torch.Tensor,
    records: torch.Tensor,
    suppressed_ids: torch.Tensor,
) -> None:
    """`join_rows` in plain torch."""
    for record in records:
        row, first, count = int(record[_ROW]), int(record[_FIRST]), int(record[JOIN_SETTINGS.index("num_suppressed")])
        settings[:, row] = record[: len(JOIN_SETTINGS)]
        seeds.view(torch.int32)[2 * row : 2 * row + 2] = record[_SEED : _SEED + 2]
        suppressed[row, :count] = suppressed_ids[first : first + count]
