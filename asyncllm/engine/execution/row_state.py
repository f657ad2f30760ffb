"""What the device keeps of each running request between steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from asyncllm.engine.execution.sampler import SampledRows
from asyncllm.engine.plan import NULL_BLOCK, Int32Array, RowJoin, TableEdits

Int64Array = NDArray[np.int64]


class RowState:
    """Arrays with one entry per row. For the CPU, so in main memory."""

    def __init__(self, num_rows: int, num_groups: int, row_blocks: int) -> None:
        """`row_blocks`: entries of a block table, enough for the longest request."""
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
        self.reads_logits = np.zeros(num_rows, np.bool_)
        self.kept: dict[int, Tensor] = {}  # by row: [vocabulary] float32 logits that wait for the host
        self._suppressed: list[Int64Array] = [np.zeros(0, np.int64)] * num_rows

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
        self.reads_logits[row] = sampling.reads_logits
        self.kept.pop(row, None)

    def edit_tables(self, edits: TableEdits) -> None:
        """Set block-table entries."""
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
        )

    def _suppressions(self, rows: Int32Array | Int64Array, positions: Int64Array) -> Sequence[tuple[int, Int64Array]]:
        early = np.flatnonzero(self._suppress_before[rows] > positions)
        return [(int(index), self._suppressed[rows[index]]) for index in early]
