from __future__ import annotations

import numpy as np
import pytest

from asyncllm.engine.scheduling.request import Request
from asyncllm.engine.scheduling.row_table import RowTable
from tests.engine.scheduling.specs import make_request


def make_rows(count: int) -> tuple[RowTable, list[Request]]:
    rows = RowTable(4)
    requests = [make_request(request=i) for i in range(count)]
    for request in requests:
        rows.take(request, 3)
    return rows, requests


def test_lowest_free_row_is_taken() -> None:
    rows, requests = make_rows(3)
    assert [request.row for request in requests] == [0, 1, 2]
    rows.vacate(requests[1])
    rows.vacate(requests[0])
    assert rows.take(make_request(request=7), 0) == 0
    assert (rows.free, rows.used) == (2, 2)
    rows.check_integrity()


def test_steady_rows_stay_the_same_object_and_are_never_written() -> None:
    rows, requests = make_rows(3)
    for request in requests:
        rows.enter_steady(request)
        rows.watch(request, 100)
    steady = rows.steady()
    rows.advance(steady, step=0)
    assert rows.steady() is steady
    assert steady.map.ids == (0, 1, 2)
    with pytest.raises(ValueError, match="read-only"):
        steady.rows[0] = 9
    rows.leave_steady(requests[1])
    assert rows.steady() is not steady
    assert steady.rows.tolist() == [0, 1, 2]
    assert rows.steady().rows.tolist() == [0, 2]
    assert rows.steady().rows.dtype == np.int32
    rows.check_integrity()


def test_row_is_due_when_it_reaches_its_position() -> None:
    rows, requests = make_rows(3)
    for request, position in zip(requests, (5, 4, 5), strict=True):
        rows.enter_steady(request)
        rows.watch(request, position)
    assert rows.due() == []
    rows.advance(rows.steady(), step=0)
    assert rows.due() == [requests[1]]
    rows.advance(rows.steady(), step=1)
    assert rows.due() == requests
    assert rows.position(requests[0]) == 5


def test_leaving_tells_the_last_step() -> None:
    rows, requests = make_rows(2)
    rows.advance_to(requests[0], 4, step=3)
    rows.enter_steady(requests[1])
    rows.advance(rows.steady(), step=4)
    rows.vacate(requests[0])
    rows.vacate(requests[1])
    assert [request.last_step for request in requests] == [3, 4]
    assert not rows.holders()
    rows.check_integrity()
