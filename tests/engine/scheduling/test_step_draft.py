from __future__ import annotations

import pickle
from dataclasses import fields
from typing import Any

import numpy as np

from asyncllm.engine.plan import Chunk, RowJoin, StepPlan, StepResult
from asyncllm.engine.scheduling.row_table import SteadyRows
from asyncllm.engine.scheduling.step_draft import BlockCopy, StepDraft
from tests.engine.scheduling.specs import GREEDY, make_request


def equal(one: Any, other: Any) -> bool:
    """Deep equality of plain data with arrays in it."""
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and bool((one == other).all())
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    if hasattr(one, "__dataclass_fields__"):
        return type(one) is type(other) and all(
            equal(getattr(one, field.name), getattr(other, field.name)) for field in fields(one)
        )
    return bool(one == other)


def make_draft() -> tuple[StepDraft, SteadyRows]:
    requests = [make_request(request=i) for i in range(4)]
    for row, request in enumerate(requests):
        request.row = row
    draft = StepDraft(step=5, now=0.0, budget=10)
    draft.joins.append(RowJoin(2, 2, GREEDY))
    draft.edit(0, requests[2], 0, (7,))
    draft.edit(1, requests[3], 4, (8,))
    draft.copies.append(BlockCopy(3, 4))
    for row, samples in ((2, False), (3, True)):
        draft.chunks.append(Chunk(row, 0, np.array([1, 2], np.int32), samples))
        draft.chunk_requests.append(requests[row])
    return draft, SteadyRows.of(requests[:2])


def test_plan_holds_what_was_drafted() -> None:
    draft, steady = make_draft()
    plan = draft.plan(steady, changed=True)
    assert (plan.tables.groups.tolist(), plan.tables.rows.tolist()) == ([0, 1], [2, 3])
    assert (plan.tables.indices.tolist(), plan.tables.blocks.tolist()) == ([0, 4], [7, 8])
    assert plan.copies.tolist() == [[3, 4]]
    assert (plan.num_sampled, plan.num_tokens) == (3, 6)
    assert draft.launched(steady).row_map.ids == (0, 1, 3)
    assert draft.launched(steady).sources == [3]


def test_plan_and_result_go_through_bytes() -> None:
    draft, steady = make_draft()
    for plan in (draft.plan(steady, changed=True), StepDraft(step=6, now=0.0, budget=0).plan(steady, changed=False)):
        copy: StepPlan = pickle.loads(pickle.dumps(plan))
        assert copy is not plan
        assert equal(copy, plan)
    result = StepResult(5, np.array([9, 8, 7], np.int32))
    assert equal(pickle.loads(pickle.dumps(result)), result)
