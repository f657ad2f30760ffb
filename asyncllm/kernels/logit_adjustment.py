"""What rows do to their logits before anything is drawn: bans, bias, and penalties for tokens that came before.

The logits of a row with a duty are spread out in float32, so that nothing is lost to rounding and the model's own stay
as they are; all other rows are left alone. What changes few logits (suppressed ids, bias, penalties) is scattered over
them. The tokens of a row's prompt and output are a list of different ids, each with how often the output has it; a draw
adds to it on the device. The order is bans, bias, repetition, frequency, presence, as in
`engine/execution/logit_adjustment.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from asyncllm.kernels.language import ceil_div, constexpr, jit, jit_unspecialized, tl
from asyncllm.kernels.sampled_rows import COUNTS, MASKS, LogitRows, RowSettings

FIELDS = (
    "row",
    "duties",
    "repetition",
    "frequency",
    "presence",
    "typical_p",
    "top_n_sigma",
    "xtc_probability",
    "xtc_threshold",
    "num_biases",
    "num_seen",
    "counted",
    "first_bias",
    "first_seen",
    "first_mask",
    "unused",
)
"""Of a record, which is what a row is told when a request takes it; the first twelve are also what the device keeps."""
_BLOCK = 1024
_SPREAD = 4096

_MASKS, _COUNTS = constexpr(MASKS), constexpr(COUNTS)
_WORDS = constexpr(len(FIELDS))
_ROW, _DUTIES, _NUM_BIASES, _NUM_SEEN, _FIRST_BIAS, _FIRST_SEEN, _FIRST_MASK = (
    constexpr(FIELDS.index(name))
    for name in ("row", "duties", "num_biases", "num_seen", "first_bias", "first_seen", "first_mask")
)


@dataclass(frozen=True, slots=True)
class RowAdjustments:
    """What every row does, on the device."""

    fields: torch.Tensor  # [len(FIELDS), rows] int32, float32 ones as their bits
    biased: torch.Tensor  # [rows, most] int32 ids, of which num_biases count
    biases: torch.Tensor  # [rows, most] float32
    seen: torch.Tensor  # [rows, most] int32: different tokens of prompt and output, of which num_seen count
    seen_counts: torch.Tensor  # [rows, most] int32: how often the output has them
    masks: torch.Tensor  # [rows, ceil(vocabulary / 32)] int32: bit v of a row says that token v may be sampled

    def integers(self, name: str) -> torch.Tensor:
        """A field of all rows."""
        return self.fields[FIELDS.index(name)]

    def floats(self, name: str) -> torch.Tensor:
        """A field of all rows that is a float32."""
        return self.integers(name).view(torch.float32)


def make_row_adjustments(rows: int, vocabulary: int, device: torch.device, *, biases: int, seen: int) -> RowAdjustments:
    """Room for so many biases, and so many different tokens, in each row."""

    def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return RowAdjustments(
        fields=zeros(len(FIELDS), rows),
        biased=zeros(rows, biases),
        biases=zeros(rows, biases, dtype=torch.float32),
        seen=zeros(rows, seen),
        seen_counts=zeros(rows, seen),
        masks=zeros(rows, ceil_div(vocabulary, 32)),
    )


@jit
def _copy(target: tl.tensor, source: tl.tensor, first: tl.tensor, count: tl.tensor, BLOCK: tl.constexpr) -> None:
    for start in range(0, count, BLOCK):
        places = start + tl.arange(0, BLOCK)
        tl.store(target + places, tl.load(source + first + places, mask=places < count, other=0), mask=places < count)


@jit_unspecialized("most_biases")
def _adjustment_join_kernel(
    fields: tl.tensor,
    biased: tl.tensor,
    biases: tl.tensor,
    seen: tl.tensor,
    seen_counts: tl.tensor,
    masks: tl.tensor,
    records: tl.tensor,
    words: tl.tensor,
    rows: tl.int32,
    most_biases: tl.int32,
    most_seen: tl.int32,
    mask_words: tl.int32,
    BLOCK: tl.constexpr,
) -> None:
    record = records + tl.program_id(0) * _WORDS
    row = tl.load(record + _ROW)
    lines = tl.arange(0, _WORDS)
    tl.store(fields + lines * rows + row, tl.load(record + lines))
    count = tl.load(record + _NUM_BIASES)
    first = tl.load(record + _FIRST_BIAS)
    _copy(biased + row.to(tl.int64) * most_biases, words, first, count, BLOCK)
    _copy(biases + row.to(tl.int64) * most_biases, words, first + count, count, BLOCK)
    count = tl.load(record + _NUM_SEEN)
    first = tl.load(record + _FIRST_SEEN)
    _copy(seen + row.to(tl.int64) * most_seen, words, first, count, BLOCK)
    _copy(seen_counts + row.to(tl.int64) * most_seen, words, first + count, count, BLOCK)
    if (tl.load(record + _DUTIES) & _MASKS) != 0:
        _copy(masks + row.to(tl.int64) * mask_words, words, tl.load(record + _FIRST_MASK), mask_words, BLOCK)


def join_adjustments(adjustments: RowAdjustments, records: torch.Tensor, words: torch.Tensor) -> None:
    """Requests take rows. records [n, len(FIELDS)] int32, of n different rows, floats as their bits; words [any] int32:
    what the records' `first_…` point into, ids and then biases (or counts) of each list, and masks. Both may lie in
    pinned memory of the host."""
    if len(records):
        _adjustment_join_kernel[(len(records),)](
            adjustments.fields,
            adjustments.biased,
            adjustments.biases.view(torch.int32),
            adjustments.seen,
            adjustments.seen_counts,
            adjustments.masks,
            records,
            words,
            rows=adjustments.fields.shape[1],
            most_biases=adjustments.biased.shape[1],
            most_seen=adjustments.seen.shape[1],
            mask_words=adjustments.masks.shape[1],
            BLOCK=_BLOCK,
            num_warps=4,
        )


def join_adjustments_reference(adjustments: RowAdjustments, records: torch.Tensor, words: torch.Tensor) -> None:
    """`join_adjustments` in plain torch."""
    lists = (
        ("num_biases", "first_bias", adjustments.biased, adjustments.biases.view(torch.int32)),
        ("num_seen", "first_seen", adjustments.seen, adjustments.seen_counts),
    )
    for record in records:
        row = int(record[FIELDS.index("row")])
        adjustments.fields[:, row] = record
        for number, place, ids, values in lists:
            count, first = int(record[FIELDS.index(number)]), int(record[FIELDS.index(place)])
            ids[row, :count] = words[first : first + count]
            values[row, :count] = words[first + count : first + 2 * count]
        if int(record[FIELDS.index("duties")]) & MASKS:
            first = int(record[FIELDS.index("first_mask")])
            adjustments.masks[row] = words[first : first + adjustments.masks.shape[1]]


@jit
def _spread_kernel(
    adjusted: tl.tensor,
    logits: tl.tensor,
    rows: tl.tensor,
    num_rows: tl.tensor,
    duties: tl.tensor,
    masks: tl.tensor,
    LOGITS_STRIDE: tl.constexpr,
    ADJUSTED_STRIDE: tl.constexpr,
    VOCABULARY: tl.constexpr,
    MASK_WORDS: tl.constexpr,
    SKIP: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    index = tl.program_id(0)
    if index >= tl.load(num_rows):
        return
    row = tl.load(rows + index)
    duty = tl.load(duties + row)
    if (duty == 0) | ((duty & SKIP) != 0):
        return
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = ids < VOCABULARY
    x = tl.load(logits + index.to(tl.int64) * LOGITS_STRIDE + ids, mask=inside, other=0.0).to(tl.float32)
    if (duty & _MASKS) != 0:
        word = tl.load(masks + row.to(tl.int64) * MASK_WORDS + ids // 32, mask=inside, other=0)
        x = tl.where(((word >> (ids % 32)) & 1) != 0, x, float("-inf"))
    tl.store(adjusted + index.to(tl.int64) * ADJUSTED_STRIDE + ids, x, mask=inside)


@jit_unspecialized("most_suppressed", "most_biases")
def _scatter_kernel(
    adjusted: tl.tensor,
    rows: tl.tensor,
    positions: tl.tensor,
    num_rows: tl.tensor,
    suppress_before: tl.tensor,
    num_suppressed: tl.tensor,
    suppressed: tl.tensor,
    duties: tl.tensor,
    repetition: tl.tensor,
    frequency: tl.tensor,
    presence: tl.tensor,
    num_biases: tl.tensor,
    biased: tl.tensor,
    biases: tl.tensor,
    num_seen: tl.tensor,
    seen: tl.tensor,
    seen_counts: tl.tensor,
    most_suppressed: tl.int32,
    most_biases: tl.int32,
    ADJUSTED_STRIDE: tl.constexpr,
    MOST_SEEN: tl.constexpr,
    SKIP: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    index = tl.program_id(0)
    if index >= tl.load(num_rows):
        return
    row = tl.load(rows + index)
    duty = tl.load(duties + row)
    if (duty == 0) | ((duty & SKIP) != 0):
        return
    target = adjusted + index.to(tl.int64) * ADJUSTED_STRIDE
    lanes = tl.arange(0, BLOCK)
    if tl.load(positions + index) < tl.load(suppress_before + row):
        count = tl.load(num_suppressed + row)
        for start in range(0, count, BLOCK):
            inside = start + lanes < count
            ids = tl.load(suppressed + row * most_suppressed + start + lanes, mask=inside, other=0)
            tl.store(target + ids, float("-inf"), mask=inside)
        tl.debug_barrier()  # other threads read on what these wrote
    count = tl.load(num_biases + row)
    for start in range(0, count, BLOCK):
        inside = start + lanes < count
        places = row.to(tl.int64) * most_biases + start + lanes
        ids = tl.load(biased + places, mask=inside, other=0)
        x = tl.load(target + ids, mask=inside, other=0.0)
        tl.store(target + ids, x + tl.load(biases + places, mask=inside, other=0.0), mask=inside)
    if (duty & _COUNTS) != 0:
        tl.debug_barrier()
        factor = tl.load(repetition + row)
        for_each = tl.load(frequency + row)
        for_any = tl.load(presence + row)
        count = tl.load(num_seen + row)
        for start in range(0, count, BLOCK):
            inside = start + lanes < count
            places = row.to(tl.int64) * MOST_SEEN + start + lanes
            ids = tl.load(seen + places, mask=inside, other=0)
            times = tl.load(seen_counts + places, mask=inside, other=0)
            x = tl.load(target + ids, mask=inside, other=0.0)
            x = tl.where(x > 0.0, tl.div_rn(x, factor), x * factor)
            x -= for_each * times.to(tl.float32)
            x -= tl.where(times > 0, for_any, 0.0)
            tl.store(target + ids, x, mask=inside)


def adjust_logits(
    adjusted: torch.Tensor,
    logits: torch.Tensor,
    where: LogitRows,
    settings: RowSettings,
    adjustments: RowAdjustments,
    *,
    skip: int = 0,
) -> None:
    """Write the adjusted logits of rows with a duty to adjusted [n, at least vocabulary] float32; the rest as
    `sample`."""
    count = logits.shape[0]
    if not count:
        return
    duties = adjustments.integers("duties")
    _spread_kernel[(count, ceil_div(where.vocabulary, _SPREAD))](
        adjusted,
        logits,
        where.rows,
        where.num_rows,
        duties,
        adjustments.masks,
        LOGITS_STRIDE=logits.stride(0),
        ADJUSTED_STRIDE=adjusted.stride(0),
        VOCABULARY=where.vocabulary,
        MASK_WORDS=adjustments.masks.shape[1],
        SKIP=skip,
        BLOCK=_SPREAD,
        num_warps=8,
    )
    _scatter_kernel[(count,)](
        adjusted,
        where.rows,
        where.positions,
        where.num_rows,
        settings.suppress_before,
        settings.num_suppressed,
        settings.suppressed,
        duties,
        adjustments.floats("repetition"),
        adjustments.floats("frequency"),
        adjustments.floats("presence"),
        adjustments.integers("num_biases"),
        adjustments.biased,
        adjustments.biases,
        adjustments.integers("num_seen"),
        adjustments.seen,
        adjustments.seen_counts,
        settings.suppressed.shape[1],
        adjustments.biased.shape[1],
        ADJUSTED_STRIDE=adjusted.stride(0),
        MOST_SEEN=adjustments.seen.shape[1],
        SKIP=skip,
        BLOCK=_BLOCK,
        num_warps=4,
    )


def adjust_logits_reference(
    adjusted: torch.Tensor,
    logits: torch.Tensor,
    where: LogitRows,
    settings: RowSettings,
    adjustments: RowAdjustments,
    *,
    skip: int = 0,
) -> None:
    """`adjust_logits` in plain torch, row by row."""
    for i in range(int(where.num_rows)):
        row = int(where.rows[i])
        duty = int(adjustments.integers("duties")[row])
        if not duty or duty & skip:
            continue
        x = logits[i, : where.vocabulary].float().clone()
        if duty & MASKS:
            bits = (adjustments.masks[row][:, None] >> torch.arange(32, device=x.device)) & 1
            x[bits.view(-1)[: where.vocabulary] == 0] = -torch.inf
        if where.positions[i] < settings.suppress_before[row]:
            x[settings.suppressed[row, : settings.num_suppressed[row]].long()] = -torch.inf
        count = int(adjustments.integers("num_biases")[row])
        x[adjustments.biased[row, :count].long()] += adjustments.biases[row, :count]
        if duty & COUNTS:
            count = int(adjustments.integers("num_seen")[row])
            ids, times = adjustments.seen[row, :count].long(), adjustments.seen_counts[row, :count].float()
            values = x[ids]
            factor = adjustments.floats("repetition")[row]
            values = torch.where(values > 0, values / factor, values * factor)
            values = values - adjustments.floats("frequency")[row] * times
            x[ids] = values - adjustments.floats("presence")[row] * (times > 0)
        adjusted[i, : where.vocabulary] = x


@jit
def _token_count_kernel(
    token_ids: tl.tensor,
    rows: tl.tensor,
    positions: tl.tensor,
    num_rows: tl.tensor,
    duties: tl.tensor,
    num_seen: tl.tensor,
    counted: tl.tensor,
    seen: tl.tensor,
    seen_counts: tl.tensor,
    MOST_SEEN: tl.constexpr,
    SKIP: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    index = tl.program_id(0)
    if index >= tl.load(num_rows):
        return
    row = tl.load(rows + index)
    position = tl.load(positions + index)
    duty = tl.load(duties + row)
    if ((duty & _COUNTS) == 0) | ((duty & SKIP) != 0) | (position < tl.load(counted + row)):
        return
    token = tl.load(token_ids + index)
    if token < 0:  # none was drawn
        return
    count = tl.load(num_seen + row)
    seen += row.to(tl.int64) * MOST_SEEN
    seen_counts += row.to(tl.int64) * MOST_SEEN
    place = tl.full([], -1, tl.int32)
    for start in range(0, count, BLOCK):
        places = start + tl.arange(0, BLOCK)
        same = tl.load(seen + places, mask=places < count, other=-1) == token
        place = tl.maximum(place, tl.max(tl.where(same, places, -1), axis=0))
    is_new = place < 0
    place = tl.where(is_new, count, place)
    times = tl.load(seen_counts + place, mask=is_new == 0, other=0)
    tl.debug_barrier()  # every thread has read what one of them writes
    tl.store(seen + place, token)
    tl.store(seen_counts + place, times + 1)
    tl.store(num_seen + row, count + is_new.to(tl.int32))
    tl.store(counted + row, position + 1)


def count_tokens(adjustments: RowAdjustments, token_ids: torch.Tensor, where: LogitRows, *, skip: int = 0) -> None:
    """The first num_rows rows have token_ids [n] int32 in their output, at these positions. `NO_TOKEN` is not
    counted, nor a position twice. A row is there once at most. Rows with a duty among `skip` are left out."""
    if len(token_ids):
        _token_count_kernel[(len(token_ids),)](
            token_ids,
            where.rows,
            where.positions,
            where.num_rows,
            adjustments.integers("duties"),
            adjustments.integers("num_seen"),
            adjustments.integers("counted"),
            adjustments.seen,
            adjustments.seen_counts,
            MOST_SEEN=adjustments.seen.shape[1],
            SKIP=skip,
            BLOCK=_BLOCK,
            num_warps=4,
        )


def count_tokens_reference(
    adjustments: RowAdjustments, token_ids: torch.Tensor, where: LogitRows, *, skip: int = 0
) -> None:
    """`count_tokens` in plain torch."""
    duties, num_seen, counted = (adjustments.integers(name) for name in ("duties", "num_seen", "counted"))
    for i in range(int(where.num_rows)):
        row, token_id, position = int(where.rows[i]), int(token_ids[i]), int(where.positions[i])
        if not int(duties[row]) & COUNTS or int(duties[row]) & skip or position < int(counted[row]) or token_id < 0:
            continue
        count = int(num_seen[row])
        known = adjustments.seen[row, :count].tolist()
        place = known.index(token_id) if token_id in known else count
        if place == count:
            num_seen[row] += 1
            adjustments.seen[row, place] = token_id
            adjustments.seen_counts[row, place] = 0
        adjustments.seen_counts[row, place] += 1
        counted[row] = position + 1
