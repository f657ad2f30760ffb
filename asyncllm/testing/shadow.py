"""The shadow device: stands for a model in tests, and finds every fault of the plans that it is given.

It keeps no keys and values. Each slot of its cache holds which position of which cache group was written there, and
a hash of the whole token history up to it. A planned row must read exactly its own history, so every mistake in
block tables, shared blocks, positions, copies or completions raises `ShadowFault` in the step that makes it. The
token that a row samples is a function of its history (`shadow_token`), so whatever is not caught at once changes
what comes out, and `reference_output` says what should.

Results are taken when the test says so (`complete`), up to `run_ahead` steps late: a fake that answered at once would
hide every fault of running ahead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from asyncllm.engine.plan import (
    NULL_BLOCK,
    Adjustment,
    CacheGroup,
    Float32Array,
    Fork,
    LateSamples,
    LateTokens,
    RowJoin,
    StepPlan,
    StepResult,
)
from asyncllm.engine.scheduling.scheduler_config import SchedulerConfig
from asyncllm.testing.shadow_tokens import extend_history, late_token, shadow_logits, shadow_token

Int64Array = NDArray[np.int64]

EMPTY = -1
POISON = -2
"""What a slot holds that was never written, and one that a failed step may have written."""


class ShadowFault(AssertionError):
    """A plan that would have computed something wrong on a real device."""


@dataclass(slots=True)
class _Row:
    """What the device keeps of a row."""

    join: RowJoin
    incarnation: int  # counts joins over all rows: two stays of one request are two
    tables: Int64Array  # [groups, blocks]
    mapped: Int64Array  # [groups, blocks] the step that set the entry
    histories: Int64Array  # [capacity] hash of the history up to and with each position
    started: bool = False  # has a part in a step already
    position: int = 0  # the next one to compute
    last_token: int | None = None  # sampled, not yet computed
    keeps: bool = False  # the logits of its last position, for a late sample


@dataclass(slots=True)
class _Work:
    """What a row does in a step: compute these tokens from position `start` on."""

    row: _Row
    start: int
    token_ids: list[int]
    samples: bool = False
    keeps: bool = False

    @property
    def end(self) -> int:
        """The position after the last."""
        return self.start + len(self.token_ids)


@dataclass(slots=True)
class _Launched:
    """A step that has not completed."""

    step: int
    token_ids: list[int] = field(default_factory=list)
    late: LateTokens | None = None  # not handed out yet
    logits: list[Float32Array] = field(default_factory=list)
    users: dict[int, set[int]] = field(default_factory=dict)  # block -> incarnations that read or write it
    written: list[int] = field(default_factory=list)  # blocks
    rows: list[int] = field(default_factory=list)
    edited: list[int] = field(default_factory=list)  # rows with new entries in their block tables


class ShadowDevice:
    """Executes plans in launch order; `complete` hands out the oldest result, `fail` loses launched steps."""

    def __init__(self, config: SchedulerConfig, vocab_size: int) -> None:
        self.config = config
        self.vocab_size = vocab_size
        shape = (config.num_blocks + 1, config.block_size)
        self._places: Int64Array = np.full(shape, EMPTY, np.int64)  # position * number of groups + group
        self._histories: Int64Array = np.zeros(shape, np.int64)
        self._token_ids: Int64Array = np.zeros(shape, np.int64)
        self._written: Int64Array = np.full(shape, -1, np.int64)  # by which step
        self._writers: Int64Array = np.full(shape, -1, np.int64)  # by which incarnation
        self._rows: dict[int, _Row] = {}
        self._launched: deque[_Launched] = deque()
        self._incarnations = 0
        self._next_step = 0
        self._decode_rows: list[int] | None = None  # of the last plan; None where it was lost

    @property
    def in_flight(self) -> int:
        """Steps launched and not completed."""
        return len(self._launched)

    def blocks_in_flight(self) -> set[int]:
        """Blocks that a launched step, not complete, reads or writes: none of them may be free."""
        return {block for launched in self._launched for block in launched.users}

    def holds(self, block: int, group: int, last_position: int, history: int) -> bool:
        """Whether the last slot of `block` holds this position of this history, in this cache group."""
        place = last_position * len(self.config.groups) + group
        return bool(self._places[block, -1] == place and self._histories[block, -1] == history)

    def launch(self, plan: StepPlan) -> None:
        """Execute a plan; raises `ShadowFault` where it is wrong."""
        _require(plan.step == self._next_step, f"step {plan.step} launched where {self._next_step} was due")
        _require(len(self._launched) <= self.config.run_ahead, f"step {plan.step} runs too far ahead")
        _require(plan.num_tokens > 0 or plan.late is not None, f"step {plan.step} does nothing")
        _require(plan.num_tokens <= self.config.max_batched_tokens, f"step {plan.step} overruns its budget")
        self._next_step += 1
        for join in plan.joins:
            self._join(join)
        self._edit_tables(plan)
        for source, destination in plan.copies.tolist():
            self._copy(source, destination, plan.step)
        launched = _Launched(plan.step, edited=plan.tables.rows.tolist(), written=plan.copies[:, 1].tolist())
        if plan.late is not None:
            launched.late = LateTokens(plan.step, np.array(list(self._sample_late(plan.late, plan.step)), np.int32))
        works: list[_Work] = []
        for work in self._works(plan, launched):  # in order: a chunk may read what an earlier one of its step writes
            self._note_blocks(work, launched)
            self._write(work, plan.step)
            self._check_reads(work, plan.step)
            works.append(work)
        for fork in plan.forks:
            self._fork(fork, plan)
        for work in works:  # nor may a later one have written over it
            self._check_reads(work, plan.step)
            self._check_kind(work, plan.step)
            if work.samples:
                launched.token_ids.append(self._sample(work.row))
            work.row.keeps = work.keeps
            if work.keeps and work.row.join.sampling.reads_logits:
                launched.logits.append(self._logits(work.row))
        self._sample_forks(plan, launched)
        self._launched.append(launched)

    def complete_late(self) -> LateTokens | None:
        """The late tokens of the oldest launched step, once; None where it has none."""
        late, self._launched[0].late = self._launched[0].late, None
        return late

    def complete(self) -> StepResult:
        """The result of the oldest launched step."""
        launched = self._launched.popleft()
        assert launched.late is None, "the late tokens come before the result"
        logits = np.stack(launched.logits) if launched.logits else None
        return StepResult(launched.step, np.array(launched.token_ids, dtype=np.int32), logits=logits)

    def fail(self, step: int) -> None:
        """This launched step and all later ones fail: what they wrote is garbage, their rows are of no use."""
        while self._launched and self._launched[-1].step >= step:
            launched = self._launched.pop()
            lost = np.array(sorted(set(launched.written)), dtype=np.int64)
            self._places[lost] = np.where(self._written[lost] >= step, POISON, self._places[lost])
            for row in (*launched.rows, *launched.edited):
                self._rows.pop(row, None)
        self._decode_rows = None

    # --- what a step does, in its order ---

    def _join(self, join: RowJoin) -> None:
        _require(0 <= join.row < self.config.max_num_seqs, f"request {join.request} joins row {join.row}")
        shape = (len(self.config.groups), -(-self.config.max_model_len // self.config.block_size))
        self._incarnations += 1
        self._rows[join.row] = _Row(
            join=join,
            incarnation=self._incarnations,
            tables=np.full(shape, NULL_BLOCK, np.int64),
            mapped=np.full(shape, -1, np.int64),
            histories=np.zeros(64, np.int64),
        )

    def _edit_tables(self, plan: StepPlan) -> None:
        edits = plan.tables
        seen: set[tuple[int, ...]] = set()
        for entry in np.stack((edits.groups, edits.rows, edits.indices, edits.blocks), axis=1).tolist():
            group, row, index, block = entry
            _require(row in self._rows, f"step {plan.step} edits row {row}, which nobody has")
            _require(1 <= block <= self.config.num_blocks, f"step {plan.step} hands out block {block}")
            _require((group, row, index) not in seen, f"step {plan.step} edits a table entry twice")
            seen.add((group, row, index))
            self._rows[row].tables[group, index] = block
            self._rows[row].mapped[group, index] = plan.step

    def _copy(self, source: int, destination: int, step: int) -> None:
        for launched in self._launched:
            _require(destination not in launched.users, f"step {step} copies to block {destination}, which is in use")
        self._places[destination] = self._places[source]
        self._histories[destination] = self._histories[source]
        self._token_ids[destination] = self._token_ids[source]
        self._written[destination] = step
        self._writers[destination] = -1

    def _works(self, plan: StepPlan, launched: _Launched) -> Iterator[_Work]:
        """The rows' work, in the order in which they sample; the history of each is extended when its turn comes."""
        decode_rows = plan.decode_rows.tolist()
        if not plan.decode_changed:
            _require(decode_rows == self._decode_rows, f"step {plan.step} changes its decode rows without saying so")
        self._decode_rows = decode_rows
        late_rows = [] if plan.late is None else plan.late.rows.tolist()
        launched.rows = [*decode_rows, *late_rows, *(chunk.row for chunk in plan.chunks)]
        _require(len(launched.rows) == len(set(launched.rows)), f"step {plan.step} has a row twice")
        for index in launched.rows:
            _require(index in self._rows, f"step {plan.step} computes row {index}, which nobody has")
        for index in decode_rows:
            row = self._rows[index]
            if row.last_token is None:
                raise ShadowFault(f"step {plan.step}: row {index} has no sampled token to go on from")
            yield self._work(row, row.position, [row.last_token], samples=True)
        for index in late_rows[: 0 if plan.late is None else plan.late.decoding]:
            row = self._rows[index]
            assert row.last_token is not None
            yield self._work(row, row.position, [row.last_token], keeps=True)
        for chunk in plan.chunks:
            row = self._rows[chunk.row]
            if not row.started:
                self._adopt(row, chunk.start, plan.step)
            due = row.position
            _require(chunk.start == due, f"step {plan.step}: row {chunk.row} starts at {chunk.start}, not {due}")
            yield self._work(row, chunk.start, chunk.token_ids.tolist(), chunk.samples, chunk.keeps)

    def _adopt(self, row: _Row, position: int, step: int) -> None:
        """A row begins at `position`: what is cached of its history is what its blocks hold."""
        request, size = row.join.request, self.config.block_size
        row.started = True
        row.position = position
        self._reserve(row, position)
        for g, group in enumerate(self.config.groups):
            first = max(0, min(_first_read(group, position), position - 1))  # for a window of 1 too: the history so far
            positions = np.arange(first, position)
            blocks, slots = row.tables[g, positions // size], positions % size
            right = self._places[blocks, slots] == positions * len(self.config.groups) + g
            _require(bool(right.all()), f"step {step}: the cached prefix of request {request} is not there")
            histories, token_ids = self._histories[blocks, slots].tolist(), self._token_ids[blocks, slots].tolist()
            for before, after, token_id in zip(histories, histories[1:], token_ids[1:], strict=False):
                chained = extend_history(before, token_id) == after
                _require(chained, f"step {step}: the cached prefix of request {request} is of two histories")
            mixed = row.histories[position - 1] not in (0, histories[-1]) if histories else False
            _require(not mixed, f"step {step}: the cached prefix of request {request} differs between groups")
            row.histories[first:position] = histories

    def _reserve(self, row: _Row, positions: int) -> None:
        if positions > len(row.histories):
            more = np.zeros(max(positions - len(row.histories), len(row.histories)), np.int64)
            row.histories = np.concatenate((row.histories, more))

    def _work(self, row: _Row, start: int, token_ids: list[int], samples: bool = False, keeps: bool = False) -> _Work:
        end = start + len(token_ids)
        request = row.join.request
        _require(start < end <= self.config.max_model_len, f"request {request} computes {start} to {end}")
        self._reserve(row, end)
        history = int(row.histories[start - 1]) if start else 0
        for position, token_id in enumerate(token_ids, start):
            history = extend_history(history, token_id)
            row.histories[position] = history
        row.position = end
        row.last_token = None
        row.keeps = False
        return _Work(row, start, token_ids, samples, keeps)

    def _fork(self, fork: Fork, plan: StepPlan) -> None:
        """A row begins where a chunk ends, with its history. What its blocks hold is looked at when it reads them."""
        chunk = plan.chunks[fork.chunk]
        _require(chunk.samples or chunk.keeps, f"step {plan.step} forks from a chunk that has no logits")
        row, source = self._rows.get(fork.row), self._rows[chunk.row]
        if row is None or row.started:
            raise ShadowFault(f"step {plan.step} forks row {fork.row}, which did not join in it")
        self._reserve(row, source.position)
        row.started = True
        row.position = source.position
        row.histories[: row.position] = source.histories[: row.position]

    def _sample_forks(self, plan: StepPlan, launched: _Launched) -> None:
        for fork in plan.forks:
            row = self._rows[fork.row]
            launched.rows.append(fork.row)
            row.keeps = row.join.sampling.late
            _require(row.keeps == plan.chunks[fork.chunk].keeps, f"step {plan.step} forks a row of another kind")
            if not row.keeps:
                launched.token_ids.append(self._sample(row))
            elif row.join.sampling.reads_logits:
                launched.logits.append(self._logits(row))

    def _check_kind(self, work: _Work, step: int) -> None:
        late, request = work.row.join.sampling.late, work.row.join.request
        _require(not (work.samples and late), f"step {step} samples request {request}, which is late, on its own")
        _require(not (work.keeps and not late), f"step {step} keeps logits of request {request}, which is not late")

    def _sample(self, row: _Row) -> int:
        history = int(row.histories[row.position - 1])
        row.last_token = shadow_token(history, row.position, row.join.sampling, self.vocab_size)
        return row.last_token

    def _logits(self, row: _Row) -> Float32Array:
        history = int(row.histories[row.position - 1])
        return shadow_logits(history, row.position, row.join.sampling, self.vocab_size)

    def _sample_late(self, late: LateSamples, step: int) -> Iterator[int]:
        _require(late.decoding <= len(late.rows) == len(late.biases), f"step {step}: its late samples do not fit")
        _require(late.masks is None or len(late.masks) == len(late.rows), f"step {step}: a late row has no mask")
        for i, index in enumerate(late.rows.tolist()):
            row = self._rows.get(index)
            if row is None or not row.keeps:
                raise ShadowFault(f"step {step}: no logits are kept for row {index}")
            mask = None if late.masks is None else late.masks[i]
            row.last_token = late_token(self._logits(row), Adjustment(mask, late.biases[i]))
            row.keeps = False
            yield row.last_token

    # --- the cache ---

    def _note_blocks(self, work: _Work, launched: _Launched) -> None:
        """Note the blocks that the work reads and writes; nobody else's launched step may use what it writes."""
        row, size = work.row, self.config.block_size
        for group, table in zip(self.config.groups, row.tables, strict=True):
            blocks = table[_first_read(group, work.start) // size : (work.end - 1) // size + 1].tolist()
            for block in blocks:
                launched.users.setdefault(block, set()).add(row.incarnation)
            for block in blocks[work.start // size - _first_read(group, work.start) // size :]:
                launched.written.append(block)
                for earlier in self._launched:
                    others = earlier.users.get(block, set()) - {row.incarnation}
                    _require(
                        not others,
                        f"step {launched.step} writes block {block} for request {row.join.request} while step "
                        f"{earlier.step}, not complete, uses it for another",
                    )

    def _write(self, work: _Work, step: int) -> None:
        row = work.row
        positions = np.arange(work.start, work.end)
        slots = positions % self.config.block_size
        for g, table in enumerate(row.tables):
            blocks = table[positions // self.config.block_size]
            _require(bool((blocks != NULL_BLOCK).all()), f"request {row.join.request} writes into the null block")
            self._places[blocks, slots] = positions * len(self.config.groups) + g
            self._histories[blocks, slots] = row.histories[work.start : work.end]
            self._token_ids[blocks, slots] = work.token_ids
            self._written[blocks, slots] = step
            self._writers[blocks, slots] = row.incarnation

    def _check_reads(self, work: _Work, step: int) -> None:
        """What the work attends to, itself included, is the row's history; nobody else wrote there meanwhile."""
        row = work.row
        for g, group in enumerate(self.config.groups):
            positions = np.arange(_first_read(group, work.start), work.end)
            indices, slots = positions // self.config.block_size, positions % self.config.block_size
            blocks = row.tables[g, indices]
            right = self._places[blocks, slots] == positions * len(self.config.groups) + g
            right &= self._histories[blocks, slots] == row.histories[positions]
            right &= blocks != NULL_BLOCK
            if not right.all():
                at = int(np.argmin(right))
                found = int(self._places[blocks[at], slots[at]])
                raise ShadowFault(
                    f"step {step}: request {row.join.request} reads position {positions[at]} of group {g} in block "
                    f"{blocks[at]}, which holds {_describe(found, len(self.config.groups))}"
                )
            own = self._writers[blocks, slots] == row.incarnation
            if not (own | (self._written[blocks, slots] <= row.mapped[g, indices])).all():
                raise ShadowFault(f"step {step}: a block of request {row.join.request}, shared, was written by another")


def _first_read(group: CacheGroup, position: int) -> int:
    """The first position that a query at `position` attends to."""
    return 0 if group.window is None else max(0, position - group.window + 1)


def _describe(place: int, num_groups: int) -> str:
    if place < 0:
        return "nothing" if place == EMPTY else "what a failed step left"
    return f"position {place // num_groups} of group {place % num_groups}, of this or another history"


def _require(condition: bool, fault: str) -> None:
    if not condition:
        raise ShadowFault(fault)
