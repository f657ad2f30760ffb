"""Plans made by hand: rows get blocks as they grow, in a scattered order, and give none back."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from asyncllm.config import EngineConfig
from asyncllm.engine.execution.head_start import HeadStart
from asyncllm.engine.execution.loading import load_runner
from asyncllm.engine.execution.runner import ModelFacts, Runner
from asyncllm.engine.plan import Chunk, Int32Array, RowJoin, RowSampling, StepPlan, TableEdits
from asyncllm.weights.source import resolve_source

GREEDY = RowSampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens that a row computes in a step."""

    row: int
    start: int
    token_ids: Sequence[int]
    samples: bool = True


class PlanDriver:
    """A runner, and what is needed to write plans for it."""

    def __init__(self, runner: Runner, facts: ModelFacts) -> None:
        self.runner = runner
        self.facts = facts
        self._free = list(np.random.default_rng(0).permutation(facts.num_blocks) + 1)
        self._held: dict[int, int] = {}  # row: entries of its tables
        self._position: dict[int, int] = {}
        self._step = 0
        self._given: dict[tuple[int, int, int], int] = {}
        self.tables: dict[tuple[int, int, int], int] = {}  # (group, row, index): block

    @classmethod
    async def load(cls, path: Path, **overrides: object) -> Self:
        config = EngineConfig(num_blocks=256, max_num_seqs=16).override(**overrides)
        source = await asyncio.to_thread(resolve_source, str(path), config)
        return cls(*await load_runner(source, config, HeadStart()))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.runner.aclose()

    def plan(
        self,
        *,
        joins: Sequence[RowJoin] = (),
        pieces: Sequence[Piece] = (),
        decode: Sequence[int] = (),
        keep: Sequence[int] = (),
    ) -> StepPlan:
        """Rows that join start with no blocks, but for those of `keep`, which were given some."""
        edits: list[tuple[int, int, int, int]] = []
        for join in joins:
            if join.row in keep:
                edits += [(*key, block) for key, block in self.tables.items() if key[1] == join.row]
            else:
                self._held[join.row] = 0
            self._position[join.row] = 0
        ends = {piece.row: piece.start + len(piece.token_ids) for piece in pieces}
        ends.update({row: self._position[row] + 1 for row in decode})
        for row, end in ends.items():
            for index in range(self._held[row], -(-end // self.facts.block_size)):
                for group in range(len(self.facts.groups)):
                    block = self._given.pop((group, row, index), None) or int(self._free.pop())
                    edits.append((group, row, index, block))
                    self.tables[group, row, index] = block
            self._held[row] = max(self._held[row], -(-end // self.facts.block_size))
            self._position[row] = end
        groups, rows, indices, blocks = np.array(edits, np.int32).reshape(-1, 4).T
        plan = StepPlan(
            step=self._step,
            joins=tuple(joins),
            tables=TableEdits(groups, rows, indices, blocks),
            copies=np.zeros((0, 2), np.int32),
            chunks=tuple(
                Chunk(each.row, each.start, np.array(each.token_ids, np.int32), each.samples) for each in pieces
            ),
            decode_rows=np.array(decode, np.int32),
            decode_changed=True,
        )
        self._step += 1
        return plan

    def give(self, group: int, *, row: int, index: int, block: int) -> None:
        """Make this the row's block when it next grows there."""
        self._given[group, row, index] = block

    def share(self, *, source: int, target: int, positions: int) -> Int32Array:
        """Let `target` start with these positions of `source`; the copies of the blocks that are not full."""
        copies: list[tuple[int, int]] = []
        whole = positions // self.facts.block_size
        for group in range(len(self.facts.groups)):
            for index in range(whole):
                self.tables[group, target, index] = self.tables[group, source, index]
            if positions % self.facts.block_size:
                self.tables[group, target, whole] = int(self._free.pop())
                copies.append((self.tables[group, source, whole], self.tables[group, target, whole]))
        self._held[target] = -(-positions // self.facts.block_size)
        return np.array(copies, np.int32).reshape(-1, 2)

    def move(self, row: int, position: int) -> None:
        """The row goes on at this position, with the blocks that it has."""
        self._position[row] = position

    async def run(self, **parts: object) -> list[int]:
        plan = self.plan(**parts)  # type: ignore[arg-type]
        result = await self.runner.launch(plan).result
        assert result.step == plan.step
        return result.token_ids.tolist()

    async def generate(
        self,
        prompt: Sequence[int],
        count: int,
        *,
        row: int = 0,
        cuts: Sequence[int] = (),
        sampling: RowSampling = GREEDY,
    ) -> list[int]:
        """`count` tokens after a prompt that is computed in chunks that end at `cuts`, alone in the batch."""
        bounds = [0, *cuts, len(prompt)]
        joins = [RowJoin(row, row, sampling, len(prompt))]
        tokens: list[int] = []
        for start, stop in pairwise(bounds):
            last = stop == len(prompt)
            tokens += await self.run(joins=joins, pieces=[Piece(row, start, prompt[start:stop], last)])
            joins = []
        for _ in range(count - 1):
            tokens += await self.run(decode=[row])
        return tokens


def seeded(seed: int, **changes: object) -> RowSampling:
    """Sampling at temperature 1."""
    return replace(GREEDY, temperature=1.0, seed=seed, **changes)  # type: ignore[arg-type]
