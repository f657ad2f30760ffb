"""What rows do to their logits, on the GPU: as `logit_adjustment`, and the rare filters of `sampler`, on the CPU.

Device memory is taken when the first row comes that does anything; the others cost nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from enum import IntEnum

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncllm.engine.execution.sampler import has_rare_filter
from asyncllm.engine.execution.step_ring import host_words
from asyncllm.engine.plan import Chunk, RowJoin, RowSampling
from asyncllm.kernels.logit_adjustment import (
    FIELDS,
    RowAdjustments,
    count_tokens,
    join_adjustments,
    make_row_adjustments,
)
from asyncllm.kernels.sampled_rows import ADJUSTS, COUNTS, FILTERS, LATE, MASKS, LogitRows

_BIASES = 64
"""Biases that a row has room for at first."""


class SamplerUse(IntEnum):
    """What the rows of a step ask of the sampler. The launches for a use are right for every lower one too."""

    PLAIN = 0  # temperature alone
    FILTERED = 1  # top-k, top-p or min-p
    ADJUSTED = 2  # what only adjusted logits can do
    SCORED = 3  # and log-probabilities


class DeviceAdjustments:
    """Of all rows. Tensors' addresses stay, so that CUDA graphs can hold them; but see `join`."""

    def __init__(
        self,
        num_rows: int,
        vocabulary: int,
        max_length: int,
        like: Tensor,
        *,
        processed_logprobs: bool = False,
    ) -> None:
        """`max_length`: tokens of the longest request; `like`: a tensor of the logits' type, on their device."""
        self._num_rows = num_rows
        self._vocabulary = vocabulary
        self._most_seen = min(vocabulary, max_length)
        self._like = like
        self._device = like.device
        self.processed_logprobs = processed_logprobs
        self._uses: dict[int, SamplerUse] = {}  # by row; a row that is not there is a plain one
        self._counting: set[int] = set()
        self._known: dict[int, int] = {}  # by row: how many tokens it joined with
        self.rows: RowAdjustments | None = None
        self.logits: Tensor | None = None  # [num_rows, at least vocabulary] float32
        self.kept: Tensor | None = None  # [num_rows, vocabulary] the logits of late rows
        self._read: set[int] = set()  # rows whose kept logits go to the host

    def use(self, rows: Iterable[int]) -> SamplerUse:
        """The least that these rows need."""
        uses = self._uses
        return max((uses[row] for row in rows if row in uses), default=SamplerUse.PLAIN)

    def read(self, rows: Sequence[int]) -> Sequence[int]:
        """Those of these late rows whose kept logits go to the host."""
        return [row for row in rows if row in self._read] if self._read else ()

    @property
    def in_use(self) -> bool:
        """Whether any row was ever more than a plain one."""
        return bool(self._uses)

    @property
    def counting(self) -> bool:
        """Whether any row counts its tokens: `take_chunks` has nothing to do otherwise."""
        return bool(self._counting)

    def is_concerned(self, join: RowJoin) -> bool:
        """Whether `join` has anything to launch for it: it does something to its logits, or who had the row did."""
        return bool(self._duties(join.sampling)) or self._uses.get(join.row, SamplerUse.PLAIN) >= SamplerUse.ADJUSTED

    def join(self, joins: Sequence[RowJoin]) -> tuple[Tensor, ...]:
        """Requests take rows. Keep what is returned until the device has passed this.

        Where there is no room for a row's biases, `rows` is another object then, and graphs that hold its tensors must
        not run any more.
        """
        records: list[NDArray[np.int32]] = []
        words: list[NDArray[np.int32]] = []
        size = 0
        for join in joins:
            duties, concerned = self._duties(join.sampling), self.is_concerned(join)
            self._note(join.row, join.sampling, duties)
            if concerned:
                record, parts = self._record(join, duties, size)
                records.append(record)
                words += parts
                size += sum(map(len, parts))
        if not records:
            return ()
        self._make_room(max(len(join.sampling.logit_bias) for join in joins))
        assert self.rows is not None
        kept = (
            host_words(np.stack(records), self._device),
            host_words(np.concatenate([*words, np.zeros(1, np.int32)]), self._device),
        )
        join_adjustments(self.rows, *kept)
        return kept

    def take_chunks(self, chunks: Sequence[Chunk]) -> tuple[Tensor, ...]:
        """Before a step: the host has made these tokens known, some of them to the rows for the first time.

        Keep what is returned until the device has passed this.
        """
        kept: list[Tensor] = []
        if not self._counting or self.rows is None:
            return ()
        for chunk in chunks:
            if chunk.row in self._counting:
                for position, token_id in enumerate(chunk.token_ids.tolist(), chunk.start):
                    if position < self._known.get(chunk.row, 0):
                        continue
                    words = host_words(np.array([token_id, chunk.row, position, 1], np.int32), self._device)
                    token, row, place, one = words.view(4, 1)
                    count_tokens(self.rows, token, LogitRows(row, place, one, self._vocabulary))
                    kept.append(words)
        return tuple(kept)

    def _duties(self, sampling: RowSampling) -> int:
        """What a row has to do; see `kernels/sampled_rows.py`."""
        asks = sampling.logprobs is not None
        filters = has_rare_filter(sampling) or (asks and self.processed_logprobs)
        masks = sampling.allowed is not None or bool(sampling.banned)
        # suppressing in place would spoil the model's own logits
        adjusts = bool(sampling.logit_bias) or (asks and bool(sampling.suppressed))
        duties = LATE * sampling.late | FILTERS * filters | MASKS * masks | COUNTS * sampling.counts_tokens
        return duties | ADJUSTS * (adjusts or bool(duties))

    def _note(self, row: int, sampling: RowSampling, duties: int) -> None:
        use = SamplerUse.PLAIN
        if sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0:
            use = SamplerUse.FILTERED
        if duties:
            use = SamplerUse.ADJUSTED
        if sampling.logprobs is not None:
            use = SamplerUse.SCORED
        if use is SamplerUse.PLAIN:
            self._uses.pop(row, None)
        else:
            self._uses[row] = use
        self._read.discard(row)
        if sampling.reads_logits:
            self._read.add(row)
        self._counting.discard(row)
        if sampling.counts_tokens:
            self._counting.add(row)

    def _record(self, join: RowJoin, duties: int, start: int) -> tuple[NDArray[np.int32], list[NDArray[np.int32]]]:
        """The join's record, and what it points to among the words from `start` on."""
        sampling = join.sampling
        parts: list[NDArray[np.int32]] = []
        firsts = []
        lists = [
            (np.array([i for i, _ in sampling.logit_bias], np.int32), _bits(bias for _, bias in sampling.logit_bias)),
            self._seen(join),
        ]
        for ids, values in lists:
            firsts.append(start + sum(map(len, parts)))
            parts += [ids, values]
        firsts.append(start + sum(map(len, parts)))
        if duties & MASKS:
            parts.append(self._mask(sampling))
        known = 0 if join.history is None else len(join.history)
        self._known[join.row] = known
        scalars = _bits(
            (
                sampling.repetition_penalty,
                sampling.frequency_penalty,
                sampling.presence_penalty,
                sampling.typical_p,
                sampling.top_n_sigma,
                sampling.xtc_probability,
                sampling.xtc_threshold,
            )
        )
        record = np.array(
            [join.row, duties, *scalars, len(lists[0][0]), len(lists[1][0]), known, *firsts, 0], dtype=np.int32
        )
        assert len(record) == len(FIELDS)
        return record, parts

    def _seen(self, join: RowJoin) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """The different tokens of prompt and output, and how often the output has each."""
        if not join.sampling.counts_tokens:
            return _NO_WORDS, _NO_WORDS
        history = join.known()
        ids, where = np.unique(history, return_inverse=True)
        counts = np.bincount(where[join.prompt_tokens :], minlength=len(ids))
        return ids.astype(np.int32), counts.astype(np.int32)

    def _mask(self, sampling: RowSampling) -> NDArray[np.int32]:
        legal = np.full(-(-self._vocabulary // 32) * 32, sampling.allowed is None)
        if sampling.allowed is not None:
            legal[list(sampling.allowed)] = True
        legal[list(sampling.banned)] = False
        return np.packbits(legal, bitorder="little").view(np.int32)

    def _make_room(self, biases: int) -> None:
        if self.rows is None:
            self.rows = make_row_adjustments(
                self._num_rows, self._vocabulary, self._device, biases=max(_BIASES, biases), seen=self._most_seen
            )
            stride = -(-self._vocabulary // 16) * 16
            self.logits = torch.zeros((self._num_rows, stride), dtype=torch.float32, device=self._device)
            self.kept = self._like.new_zeros(self._num_rows, self._vocabulary)
        elif biases > self.rows.biased.shape[1]:
            room = self.rows.biased.shape[1]
            grown = [each.new_zeros(self._num_rows, 2 * biases) for each in (self.rows.biased, self.rows.biases)]
            grown[0][:, :room] = self.rows.biased
            grown[1][:, :room] = self.rows.biases
            self.rows = replace(self.rows, biased=grown[0], biases=grown[1])


_NO_WORDS = np.zeros(0, np.int32)


def _bits(values: Iterable[float]) -> NDArray[np.int32]:
    """Of float32 numbers."""
    return np.array(list(values), np.float32).view(np.int32)
