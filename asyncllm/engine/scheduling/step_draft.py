"""A step while it is being planned, and what is kept of it until its result is applied."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from asyncllm.engine.plan import Chunk, Int32Array, RowJoin, StepPlan, TableEdits
from asyncllm.engine.scheduling.request import Request
from asyncllm.engine.scheduling.row_table import RowMap, SteadyRows

NO_EDITS = TableEdits(*(np.zeros(0, np.int32) for _ in range(4)))
NO_COPIES: Int32Array = np.zeros((0, 2), np.int32)


class TableEdit(NamedTuple):
    """One new entry of a block table."""

    group: int
    row: int
    entry: int  # which one, counted from the request's first block
    block: int


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
    has_ended: bool = False  # a request of it may have ended since, which makes its token surplus


@dataclass(slots=True)
class StepDraft:
    """Collects what a step will do."""

    step: int
    budget: int  # positions that chunks may still take
    joins: list[RowJoin] = field(default_factory=list)
    edits: list[TableEdit] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    chunk_requests: list[Request] = field(default_factory=list)
    entered: set[int] = field(default_factory=set)
    finals: list[Request] = field(default_factory=list)
    borders: list[Request] = field(default_factory=list)  # steady rows that begin a block: the one before is full

    def edit(self, group: int, request: Request, index: int, block: int) -> None:
        """Note a new entry in the block table of a request's row."""
        assert request.row is not None
        self.edits.append(TableEdit(group, request.row, index, block))

    def plan(self, steady: SteadyRows, changed: bool) -> StepPlan:
        """The finished plan."""
        tables, copies = NO_EDITS, NO_COPIES
        if self.edits:
            tables = TableEdits(*np.ascontiguousarray(np.array(self.edits, np.int32).T))
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
        )

    def launched(self, steady: SteadyRows) -> LaunchedStep:
        """What `apply` and `fail` will need of it."""
        row_map = steady.map
        if self.chunks:
            zipped = zip(self.chunks, self.chunk_requests, strict=True)
            row_map += RowMap.of([request for chunk, request in zipped if chunk.samples])
        return LaunchedStep(
            step=self.step,
            row_map=row_map,
            chunks=self.chunks,
            chunk_requests=self.chunk_requests,
            entered=self.entered,
            sources=[copy.source for copy in self.copies],
            finals=self.finals,
            borders=self.borders,
        )
