"""What the GPU keeps of each running request between steps: the same as `row_state` keeps for the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from asyncllm.engine.execution.device_adjustments import DeviceAdjustments
from asyncllm.engine.execution.device_scores import DeviceScores
from asyncllm.engine.execution.prompt_scores import PromptPart, prompt_part
from asyncllm.engine.execution.step_ring import host_words
from asyncllm.engine.plan import Chunk, Int32Array, LogprobsRequest, RowJoin
from asyncllm.kernels.row_join import JOIN_SETTINGS, RECORD_WORDS, join_rows
from asyncllm.kernels.sampled_rows import RowSettings

_SUPPRESSED = 64
"""Suppressed ids that a row has room for at first."""

_RECORD = np.dtype(
    [
        ("prompt_tokens", np.int32),
        ("temperature", np.float32),
        ("top_k", np.int32),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("choice", np.int32),
        ("suppress_before", np.int32),
        ("num_suppressed", np.int32),
        ("seed", np.uint64),
        ("row", np.int32),
        ("first_suppressed", np.int32),
        ("unused", np.int32, (4,)),
    ]
)
"""A record of `kernels/row_join.py`."""
assert _RECORD.itemsize == 4 * RECORD_WORDS
_NO_RECORDS = np.zeros((0, RECORD_WORDS), np.int32)
assert tuple(_RECORD.fields or ())[: len(JOIN_SETTINGS)] == JOIN_SETTINGS


@dataclass(frozen=True, slots=True)
class RowSizes:
    """How much room there is."""

    rows: int
    groups: int  # of the cache
    row_blocks: int  # entries of a block table, enough for the longest request
    vocabulary: int
    max_length: int  # tokens of the longest request
    steps: int  # lines of the step ring
    dtype: torch.dtype  # of logits


class DeviceRows:
    """Tensors with one entry per row. Their addresses stay, so that CUDA graphs can hold them; but see `join`."""

    def __init__(self, sizes: RowSizes, device: torch.device, *, processed_logprobs: bool = False) -> None:
        """`processed_logprobs`: log-probabilities are those of what is drawn from, not of the model's own logits."""
        num_rows, num_groups, row_blocks = sizes.rows, sizes.groups, sizes.row_blocks
        self.adjustments = DeviceAdjustments(
            num_rows,
            sizes.vocabulary,
            sizes.max_length,
            torch.empty(0, dtype=sizes.dtype, device=device),
            processed_logprobs=processed_logprobs,
        )
        self.scores = DeviceScores(num_rows, sizes.vocabulary, sizes.steps, device)
        self._told_prompts: dict[int, tuple[Int32Array, LogprobsRequest]] = {}  # by row

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.last_tokens = zeros(num_rows)
        self.next_positions = zeros(num_rows)
        self.tables = zeros(num_groups, num_rows, row_blocks)
        self.join_settings = zeros(len(JOIN_SETTINGS), num_rows)  # one line for each of them
        self._seeds = zeros(num_rows, dtype=torch.int64)
        self._suppressed = zeros(num_rows, _SUPPRESSED)
        self.prompt_tokens = self.join_settings[JOIN_SETTINGS.index("prompt_tokens")]
        self.settings = self._row_settings()

    def describe(self, joins: Sequence[RowJoin]) -> Int32Array | None:
        """Requests take rows by the step's own launches, which are given these records [n, RECORD_WORDS]. None where
        one of them has more than settings, or its row had: then `join` all of them."""
        if any(
            (join.sampling.suppressed and join.sampling.suppress_before > 0)
            or self.adjustments.is_concerned(join)
            or self.scores.is_concerned(join)
            for join in joins
        ):
            return None
        if not joins:
            return _NO_RECORDS
        self.adjustments.join(joins)
        self._note_prompts(joins)
        return _records(joins)[0]

    def join(self, joins: Sequence[RowJoin]) -> tuple[Tensor, ...]:
        """Requests take rows, by launches of their own. Keep what is returned until the device has passed this.

        Where a request has more suppressed ids, biases or named ids than a row has room for, the room grows: `settings`
        (or `adjustments.rows`, `scores.requests`) has a new tensor then, and graphs that hold the old one must not run
        any more.
        """
        records, suppressed = _records(joins)
        self._make_room(int(records[:, JOIN_SETTINGS.index("num_suppressed")].max(initial=0)))
        device = self._seeds.device
        words = host_words(records, device)
        suppressed_words = host_words(np.array(suppressed or [0], np.int32), device)
        join_rows(self.join_settings, self._seeds, self._suppressed, words, suppressed_words)
        self._note_prompts(joins)
        return words, suppressed_words, *self.adjustments.join(joins), *self.scores.join(joins)

    def _note_prompts(self, joins: Sequence[RowJoin]) -> None:
        for join in joins:
            told = join.sampling.prompt_logprobs
            self._told_prompts.pop(join.row, None)
            if told is not None:
                self._told_prompts[join.row] = (join.known()[: join.prompt_tokens], told)

    def prompt_parts(self, chunks: Sequence[Chunk]) -> Sequence[PromptPart]:
        """What the chunks tell of prompts of which log-probabilities are asked for."""
        if not self._told_prompts:
            return ()
        parts = [
            prompt_part(index, chunk, *self._told_prompts[chunk.row])
            for index, chunk in enumerate(chunks)
            if chunk.row in self._told_prompts
        ]
        return [part for part in parts if part is not None]

    def _make_room(self, most: int) -> None:
        rows, room = self._suppressed.shape
        if most > room:
            grown = self._suppressed.new_zeros(rows, 2 * most)
            grown[:, :room] = self._suppressed
            self._suppressed = grown
            self.settings = self._row_settings()

    def _row_settings(self) -> RowSettings:
        fields = dict(zip(JOIN_SETTINGS, self.join_settings, strict=True))
        return RowSettings(
            temperature=fields["temperature"].view(torch.float32),
            top_k=fields["top_k"],
            top_p=fields["top_p"].view(torch.float32),
            min_p=fields["min_p"].view(torch.float32),
            seed=self._seeds,
            choice=fields["choice"],
            suppress_before=fields["suppress_before"],
            num_suppressed=fields["num_suppressed"],
            suppressed=self._suppressed,
        )


def _records(joins: Sequence[RowJoin]) -> tuple[Int32Array, Sequence[int]]:
    """[n, RECORD_WORDS], and the suppressed ids of all records."""
    records = np.zeros(len(joins), _RECORD)
    suppressed: list[int] = []
    for i, join in enumerate(joins):
        sampling = join.sampling
        ids = sampling.suppressed if sampling.suppress_before > 0 else ()
        records[i] = (
            join.prompt_tokens,
            sampling.temperature,
            sampling.top_k,
            sampling.top_p,
            sampling.min_p,
            sampling.choice,
            sampling.suppress_before if ids else 0,
            len(ids),
            sampling.seed,
            join.row,
            len(suppressed),
            0,
        )
        suppressed += ids
    return records.view(np.int32).reshape(-1, RECORD_WORDS), suppressed
