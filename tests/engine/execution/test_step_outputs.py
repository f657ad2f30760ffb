from __future__ import annotations

import numpy as np

from asyncllm.engine.execution.step_outputs import lay_out_outputs
from asyncllm.engine.plan import Chunk, Fork, LateSamples, StepPlan, TableEdits


def chunk(row: int, *, samples: bool = False, keeps: bool = False) -> Chunk:
    return Chunk(row, 0, np.array([1, 2], np.int32), samples, keeps)


def test_every_row_has_its_place() -> None:
    none = np.zeros(0, np.int32)
    plan = StepPlan(
        step=0,
        joins=(),
        tables=TableEdits(none, none, none, none),
        copies=np.zeros((0, 2), np.int32),
        chunks=(chunk(5, samples=True), chunk(6), chunk(7, keeps=True), chunk(8, samples=True)),
        decode_rows=np.array([2, 1], np.int32),
        decode_changed=True,
        late=LateSamples(np.array([4, 3, 0], np.int32), 2, None, (None, None, None)),
        forks=(Fork(0, 9), Fork(2, 10), Fork(0, 11)),
    )
    outputs = lay_out_outputs(plan)
    assert outputs.rows.tolist() == [2, 1, 5, 8, 9, 11]
    assert outputs.places.tolist() == [0, 1, 4, 6, 4, 4]
    assert outputs.kept == ((4, 2), (3, 3), (7, 5), (10, 5))
    assert plan.num_sampled == 6
    assert plan.num_tokens == 2 + 2 + 8
