"""What the device keeps of each running request between steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncllm.engine.execution.logit_adjustment import LogitAdjustment
from asyncllm.engine.execution.prompt_scores import PromptPart, prompt_part
from asyncllm.engine.execution.sampler import SampledRows, has_rare_filter
from asyncllm.engine.plan import (
    NO_TOKEN,
    NULL_BLOCK,
    Chunk,
    Float32Array,
    Int32Array,
    LogprobsRequest,
    RowJoin,
    RowSampling,
    TableEdits,
)
from asyncllm.kernels.cpu.decoder import Draws

Int64Array = NDArray[np.int64]
_NEVER = np.iinfo(np.int64).max


class RowState:
    """Arrays with one entry per row. For the CPU, so in main memory."""

    def __init__(self, num_rows: int, num_groups: int, row_blocks: int, vocabulary: int) -> None:
        """`row_blocks`: entries of a block table, enough for the longest request."""
        self._vocabulary = vocabulary
        self.last_token = np.zeros(num_rows, np.int64)
        self.position = np.zeros(num_rows, np.int64)  # computed so far: where the next token is computed
        self.prompt_tokens = np.zeros(num_rows, np.int64)
        self.tables = np.full((num_groups, num_rows, row_blocks), NULL_BLOCK, np.int64)
        self._temperature = np.zeros(num_rows, np.float32)
        self._top_k = np.zeros(num_rows, np.int64)
        self._top_p = np.ones(num_rows, np.float32)
        self._min_p = np.zeros(num_rows, np.float32)
        self._seed = np.zeros(num_rows, np.uint64)
        self._choice = np.zeros(num_rows, np.int64)
        self._suppress_before = np.zeros(num_rows, np.int64)
        self._reads_logits = np.zeros(num_rows, np.bool_)
        self._plain_from = np.zeros(num_rows, np.int64)  # from this position on, see `draws`
        self._kept: dict[int, Tensor] = {}  # by late row: [vocabulary] float32 logits that wait for the host
        self._suppressed: list[Int64Array] = [np.zeros(0, np.int64)] * num_rows
        # Of the few rows that ask for more, by row.
        self._adjustments: dict[int, LogitAdjustment] = {}
        self._rare: dict[int, RowSampling] = {}
        self._logprobs: dict[int, LogprobsRequest] = {}
        self._told_prompts: dict[int, tuple[Int32Array, LogprobsRequest]] = {}

    def join(self, join: RowJoin) -> None:
        """A request takes a row."""
        row, sampling = join.row, join.sampling
        self.position[row] = 0
        self.prompt_tokens[row] = join.prompt_tokens
        self.tables[:, row] = NULL_BLOCK
        self._temperature[row] = sampling.temperature
        self._top_k[row] = sampling.top_k
        self._top_p[row] = sampling.top_p
        self._min_p[row] = sampling.min_p
        self._seed[row] = sampling.seed
        self._choice[row] = sampling.choice
        self._suppress_before[row] = sampling.suppress_before if sampling.suppressed else 0
        self._suppressed[row] = np.array(sampling.suppressed, np.int64)
        self._reads_logits[row] = sampling.reads_logits
        self._kept.pop(row, None)
        _put(self._adjustments, row, LogitAdjustment.of(join, self._vocabulary))
        _put(self._rare, row, sampling if has_rare_filter(sampling) else None)
        _put(self._logprobs, row, sampling.logprobs)
        told = sampling.prompt_logprobs
        _put(self._told_prompts, row, None if told is None else (join.known()[: join.prompt_tokens], told))
        altered = row in self._adjustments or row in self._logprobs or row in self._rare
        self._plain_from[row] = _NEVER if altered or _filters(sampling) else self._suppress_before[row]

    def edit_tables(self, edits: TableEdits) -> None:
        """Set block-table entries."""
        if not len(edits.blocks):
            return
        self.tables[edits.groups, edits.rows, edits.indices] = edits.blocks

    def sampling(self, rows: Int32Array | Int64Array, positions: Int64Array) -> SampledRows:
        """The settings of `rows`, which sample tokens at `positions`."""
        return SampledRows(
            temperature=self._temperature[rows],
            top_k=self._top_k[rows],
            top_p=self._top_p[rows],
            min_p=self._min_p[rows],
            seed=self._seed[rows],
            choice=self._choice[rows],
            position=positions,
            suppressed=self._suppressions(rows, positions),
            adjustments=_among(self._adjustments, rows),
            rare=_among(self._rare, rows),
        )

    def draws(self, rows: Int32Array | Int64Array, positions: Int64Array) -> Draws | None:
        """How `rows` draw tokens at `positions` and after them; None where one of them does not simply draw from its
        logits, or is told of them."""
        if (self._plain_from[rows] > positions).any():
            return None
        return Draws(
            temperature=torch.from_numpy(self._temperature[rows]),
            seed=torch.from_numpy(self._seed[rows].view(np.int64)),
            choice=torch.from_numpy(self._choice[rows]),
            token_ids=torch.from_numpy(np.empty(len(rows), np.int32)),
        )

    def logprobs(self, rows: Int32Array | Int64Array) -> Sequence[tuple[int, LogprobsRequest]]:
        """(index, what it asks for) of those of `rows` that ask for log-probabilities of their sampled tokens."""
        return _among(self._logprobs, rows)

    def keep(self, rows: Sequence[int], logits: Sequence[Tensor]) -> Float32Array | None:
        """Keep logits [vocabulary] float32 of late rows. Returns those [r, vocabulary] that the host reads, if any."""
        self._kept.update(zip(rows, logits, strict=True))
        read = [kept.numpy() for row, kept in zip(rows, logits, strict=True) if self._reads_logits[row]]
        return np.stack(read) if read else None

    def take_kept(self, rows: Int32Array) -> Tensor:
        """The kept logits [rows, vocabulary] of these late rows, for the last time."""
        return torch.stack([self._kept.pop(row) for row in rows.tolist()])

    def prompt_parts(self, chunks: Sequence[Chunk]) -> Sequence[PromptPart]:
        """What the chunks tell of prompts of which log-probabilities are asked for."""
        asking = _among(self._told_prompts, [chunk.row for chunk in chunks]) if self._told_prompts else ()
        parts = [prompt_part(index, chunks[index], *told) for index, told in asking]
        return [part for part in parts if part is not None]

    def take_tokens(self, rows: Int32Array | Int64Array, positions: Int64Array, token_ids: Int64Array) -> None:
        """These rows have sampled these tokens, or `NO_TOKEN`, at these positions."""
        self.last_token[rows] = np.maximum(token_ids, 0)
        for index, adjustment in _among(self._adjustments, rows):
            if adjustment.counts is not None and token_ids[index] != NO_TOKEN:
                adjustment.counts.add(int(positions[index]), int(token_ids[index]))

    def take_chunks(self, chunks: Sequence[Chunk]) -> None:
        """Before a step: the host has made these tokens known, some of them to the rows for the first time."""
        if not self._adjustments:
            return
        for index, adjustment in _among(self._adjustments, [chunk.row for chunk in chunks]):
            if adjustment.counts is not None:
                for position, token_id in enumerate(chunks[index].token_ids.tolist(), chunks[index].start):
                    adjustment.counts.add(position, token_id)

    def _suppressions(self, rows: Int32Array | Int64Array, positions: Int64Array) -> Sequence[tuple[int, Int64Array]]:
        early = np.flatnonzero(self._suppress_before[rows] > positions)
        return [(int(index), self._suppressed[rows[index]]) for index in early]


def _filters(sampling: RowSampling) -> bool:
    return sampling.temperature > 0 and (sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0)


_Value = TypeVar("_Value")


def _put(table: dict[int, _Value], row: int, value: _Value | None) -> None:
    if value is None:
        table.pop(row, None)
    else:
        table[row] = value


def _among(table: dict[int, _Value], rows: Int32Array | Int64Array | Sequence[int]) -> Sequence[tuple[int, _Value]]:
    """(index in `rows`, value) of the rows that are in the table; costs nothing where that is empty."""
    if not table:
        return ()
    return [(index, table[row]) for index, row in enumerate(np.asarray(rows).tolist()) if row in table]
