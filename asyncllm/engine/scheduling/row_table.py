"""RowTable: which request has which row, how far each row is planned, and which rows go on in which way.

A *steady* row goes on by one position a step: its next token is, or will be, on the device. Every other row is
*lagging*: the host knows tokens that it has yet to compute, or the row is a late one. Steady rows cost nothing by
themselves: their counts are arrays, and a row is looked at only when its position reaches the one noted for it (its
blocks are full, or its last token is due).

A late row is *kept* from when a step leaves it logits to sample from, and *ready* once the host has said its word too.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from asyncllm.engine.plan import Int32Array
from asyncllm.engine.scheduling.request import Request


@dataclass(frozen=True, slots=True)
class RowMap:
    """Whose token is whose, in the order of a result, with what `apply` needs of each."""

    requests: tuple[Request, ...]
    ids: tuple[int, ...]
    outputs: tuple[list[int], ...]  # the requests' own lists, to which their tokens are appended

    @classmethod
    def of(cls, requests: Iterable[Request]) -> RowMap:
        """The map of these requests, in this order."""
        requests = tuple(requests)
        return cls(requests, tuple([r.id for r in requests]), tuple([r.output for r in requests]))

    def __add__(self, other: RowMap) -> RowMap:
        return RowMap(self.requests + other.requests, self.ids + other.ids, self.outputs + other.outputs)


@dataclass(frozen=True, slots=True)
class SteadyRows:
    """The steady rows, made once and shared by all plans while they stay the same."""

    map: RowMap
    rows: Int32Array  # [d] read-only
    index: NDArray[np.intp]  # [d] the same, in the type that numpy indexes with fastest

    @classmethod
    def of(cls, requests: Iterable[Request]) -> SteadyRows:
        """The steady rows of these requests, in this order."""
        row_map = RowMap.of(requests)
        index = np.array([request.row for request in row_map.requests], dtype=np.intp)
        rows = index.astype(np.int32)
        rows.flags.writeable = False
        return cls(row_map, rows, index)


class RowTable:
    """Rows 0 to `num_rows` - 1. The lowest free row is taken first."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self._free = list(range(num_rows))  # a heap
        self._holders: dict[int, Request] = {}  # by row
        self._lagging: dict[int, Request] = {}  # by request id
        self._steady: dict[int, Request] = {}  # by request id, in the order in which they became steady
        self._kept: dict[int, Request] = {}  # by request id, of the lagging ones
        self._ready: dict[int, Request] = {}  # of the kept ones
        self._snapshot: SteadyRows | None = None  # of the steady rows; None when out of date
        self._positions = np.zeros(num_rows, np.int64)  # the next position to plan
        self._attention = np.zeros(num_rows, np.int64)  # the position at which a steady row must be looked at
        self._quiet = 0  # for so many more steps no steady row must be looked at, or more
        self._last_step = -1  # the last planned step: all steady rows had a part in it

    @property
    def free(self) -> int:
        """Rows that nobody has."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Rows that a request has."""
        return len(self._holders)

    @property
    def num_steady(self) -> int:
        """How many rows are steady."""
        return len(self._steady)

    def holders(self) -> Collection[Request]:
        """The requests that have a row."""
        return self._holders.values()

    @property
    def num_kept(self) -> int:
        """How many late rows have logits to sample from."""
        return len(self._kept)

    @property
    def num_ready(self) -> int:
        """How many late rows can be sampled in the next plan."""
        return len(self._ready)

    def is_ready(self, request: Request) -> bool:
        """Whether the late row of this request can be sampled in the next plan."""
        return request.id in self._ready

    def lagging(self) -> Collection[Request]:
        """The requests whose row is not steady."""
        return self._lagging.values()

    def steady(self) -> SteadyRows:
        """The steady rows; the same object as long as they stay the same."""
        if self._snapshot is None:
            self._snapshot = SteadyRows.of(self._steady.values())
        return self._snapshot

    def is_steady(self, request: Request) -> bool:
        """Whether the request's row is steady."""
        return request.id in self._steady

    def due(self) -> list[Request]:
        """The steady rows that must be looked at before the next plan."""
        if self._quiet > 0:
            return []
        steady = self.steady()
        if not steady.map.ids:
            return []
        left = self._attention[steady.index] - self._positions[steady.index]
        self._quiet = int(left.min())
        return [steady.map.requests[i] for i in np.flatnonzero(left <= 0).tolist()]

    def position(self, request: Request) -> int:
        """The next position to plan of a request that has a row."""
        return int(self._positions[request.row])

    def take(self, request: Request, position: int) -> int:
        """Give the request a free row, lagging, which begins at `position`."""
        row = heapq.heappop(self._free)
        self._holders[row] = request
        self._lagging[request.id] = request
        self._positions[row] = position
        request.row = row
        return row

    def vacate(self, request: Request) -> None:
        """Take the request's row from it. A later plan may give it to another, whatever is in flight."""
        assert request.row is not None
        self.leave_steady(request)
        self.lose_logits(request)
        del self._lagging[request.id]
        del self._holders[request.row]
        heapq.heappush(self._free, request.row)
        request.row = None

    def enter_steady(self, request: Request) -> None:
        """From the next plan on, the row goes on by one position a step."""
        del self._lagging[request.id]
        self._steady[request.id] = request
        self._snapshot = None
        self._quiet = 0

    def leave_steady(self, request: Request) -> None:
        """From the next plan on, the row lags. Nothing happens where it does already."""
        if self._steady.pop(request.id, None) is not None:
            request.last_step = self._last_step
            self._lagging[request.id] = request
            self._snapshot = None

    def use_logits(self, request: Request) -> None:
        """The next plan samples a ready row from its logits, and leaves it others."""
        del self._ready[request.id]

    def keep_logits(self, request: Request) -> None:
        """The last plan leaves the late row logits to sample from."""
        self._kept[request.id] = request
        self.look_ready(request)

    def look_ready(self, request: Request) -> None:
        """The late row is ready if it is kept and the host has said its word."""
        if request.adjustment is not None and request.id in self._kept:
            self._ready[request.id] = request

    def lose_logits(self, request: Request) -> None:
        """The row's logits are used, or of no use any more. Nothing happens where it has none."""
        self._kept.pop(request.id, None)
        self._ready.pop(request.id, None)

    def watch(self, request: Request, position: int) -> None:
        """Look at this steady row when it is about to compute `position`."""
        self._attention[request.row] = position
        self._quiet = 0

    def advance_to(self, request: Request, position: int, step: int) -> None:
        """A chunk up to before `position` is planned in this step."""
        self._positions[request.row] = position
        request.last_step = step

    def advance(self, steady: SteadyRows, step: int) -> None:
        """This step is planned, and computes one position of each steady row."""
        self._positions[steady.index] += 1
        self._quiet -= 1
        self._last_step = step

    def check_integrity(self) -> None:
        """Raise AssertionError where rows and holders contradict each other."""
        assert sorted([*self._free, *self._holders]) == list(range(self.num_rows)), "a row is lost or has two places"
        assert all(request.row == row for row, request in self._holders.items()), "a holder has another row"
        kinds = [*self._lagging, *self._steady]
        assert sorted(kinds) == sorted(request.id for request in self._holders.values()), "neither steady nor lagging"
        assert self._kept.keys() <= self._lagging.keys(), "logits are kept for a row that is not there"
        ready = [request.id for request in self._kept.values() if request.adjustment is not None]
        assert sorted(ready) == sorted(self._ready), "the ready rows are out of date"
        for request in self._kept.values():
            assert request.late, f"request {request.id} keeps logits and is not late"
            assert self.position(request) == request.known + request.coming, f"request {request.id} keeps old logits"
        for request in self._steady.values():
            left = int(self._attention[request.row]) - self.position(request)
            assert left >= self._quiet or self._quiet <= 0, f"request {request.id} must be looked at before it will be"
        assert self._snapshot is None or self._snapshot.map.ids == tuple(self._steady), (
            "the steady rows are out of date"
        )
