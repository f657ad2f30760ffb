"""A step while it is being planned, and what is kept of it until its result is applied."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from asyncllm.engine.plan import Adjustment, Chunk, Fork, Int32Array, LateSamples, RowJoin, StepPlan, TableEdits
from asyncllm.engine.scheduling.request import Request
from asyncllm.engine.scheduling.row_table import RowMap, SteadyRows

NO_EDITS = TableEdits(*(np.zeros(0, np.int32) for _ in range(4)))
ALL_LEGAL = np.uint32(0xFFFFFFFF)
NO_COPIES: Int32Array = np.zeros((0, 2), np.int32)


class LateSample(NamedTuple):
    """A late row that is sampled."""

    request: Request
    row: int
    adjustment: Adjustment
    end: int  # the position after the one that it computes as well, or its position where it computes none


class BlockCopy(NamedTuple):
    """A block copied for one who is about to write into it."""

    source: int
    destination: int


@dataclass(slots=True)
class LaunchedStep:
    """A step whose result is not applied yet."""

    step: int
    row_map: RowMap  # its own: rows may have new owners when the result comes
    chunks: list[Chunk]
    chunk_requests: list[Request]  # whose chunks they are
    entered: set[int]  # blocks that it fills and that are in the prefix index already
    sources: list[int]  # blocks held until their copies are made
    finals: list[Request]  # it samples their last tokens
    borders: list[Request]
    forks: list[Request]
    copied: list[Request]  # forked before: it fills blocks of theirs, and may compute nothing for them
    late: list[LateSample]  # in the order of the plan's rows
    late_decoding: int  # the first so many compute a position as well
    late_applied: bool  # the late tokens are in, or there are none
    has_ended: bool = False  # a request of it may have ended since, which makes its token surplus


@dataclass(slots=True)
class StepDraft:
    """Collects what a step will do."""

    step: int
    now: float
    budget: int  # positions that chunks may still take
    computed: int = 0  # positions that they take
    joins: list[RowJoin] = field(default_factory=list)
    edit_groups: list[int] = field(default_factory=list)  # one for each new entry of a block table, and so the others
    edit_rows: list[int] = field(default_factory=list)
    edit_indices: list[int] = field(default_factory=list)  # counted from the request's first block
    edit_blocks: list[int] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    copied: list[Request] = field(default_factory=list)  # forked before, whose blocks copies fill
    chunks: list[Chunk] = field(default_factory=list)
    chunk_requests: list[Request] = field(default_factory=list)
    forks: list[Fork] = field(default_factory=list)
    fork_requests: list[Request] = field(default_factory=list)  # whose forks they are
    entered: set[int] = field(default_factory=set)
    finals: list[Request] = field(default_factory=list)
    late: list[LateSample] = field(default_factory=list)  # that compute their new token as well
    late_finals: list[LateSample] = field(default_factory=list)  # that do not: it is their last one
    borders: list[Request] = field(default_factory=list)  # steady rows that begin a block: the one before is full

    def edit(self, group: int, request: Request, index: int, blocks: Sequence[int]) -> None:
        """Note new entries in the block table of a request's row, from `index` on."""
        assert request.row is not None
        count = len(blocks)
        self.edit_groups += [group] * count
        self.edit_rows += [request.row] * count
        self.edit_indices += range(index, index + count)
        self.edit_blocks += blocks

    @property
    def empty(self) -> bool:
        """Whether nothing is done for any row that is not steady."""
        return not self.chunks and not self.late and not self.late_finals

    def plan(self, steady: SteadyRows, changed: bool) -> StepPlan:
        """The finished plan."""
        tables, copies = NO_EDITS, NO_COPIES
        if self.edit_blocks:
            tables = TableEdits(
                groups=np.array(self.edit_groups, np.int32),
                rows=np.array(self.edit_rows, np.int32),
                indices=np.array(self.edit_indices, np.int32),
                blocks=np.array(self.edit_blocks, np.int32),
            )
        if self.copies:
            copies = np.array(self.copies, np.int32)
        return StepPlan(
            step=self.step,
            joins=tuple(self.joins),
            tables=tables,
            copies=copies,
            chunks=tuple(self.chunks),
            decode_rows=steady.rows,
            decode_changed=changed,
            late=self._late_samples(),
            forks=tuple(self.forks),
        )

    def _late_samples(self) -> LateSamples | None:
        samples = [*self.late, *self.late_finals]
        if not samples:
            return None
        adjustments = [sample.adjustment for sample in samples]
        given = [a.mask for a in adjustments if a.mask is not None]
        masks = None
        if len(given) == len(samples):
            masks = np.concatenate(given).reshape(len(samples), -1)
        elif given:
            masks = np.full((len(samples), len(given[0])), ALL_LEGAL, np.uint32)
            masks[[a.mask is not None for a in adjustments]] = given
        return LateSamples(
            rows=np.array([sample.row for sample in samples], np.int32),
            decoding=len(self.late),
            masks=masks,
            biases=tuple(a.bias for a in adjustments),
        )

    def launched(self, steady: SteadyRows) -> LaunchedStep:
        """What `apply` and `fail` will need of it."""
        row_map = steady.map
        if self.chunks:
            zipped = zip(self.chunks, self.chunk_requests, strict=True)
            sampling = [request for chunk, request in zipped if chunk.samples]
            row_map += RowMap.of([*sampling, *(request for request in self.fork_requests if not request.late)])
        return LaunchedStep(
            step=self.step,
            row_map=row_map,
            chunks=self.chunks,
            chunk_requests=self.chunk_requests,
            entered=self.entered,
            sources=[copy.source for copy in self.copies],
            finals=self.finals,
            borders=self.borders,
            forks=self.fork_requests,
            copied=self.copied,
            late=[*self.late, *self.late_finals],
            late_decoding=len(self.late),
            late_applied=not self.late and not self.late_finals,
        )
