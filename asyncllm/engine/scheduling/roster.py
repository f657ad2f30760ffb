"""Roster: every request from `add` until its last block is back.

```
WAITING → RUNNING → LAST → ENDED → gone          ENDED and PREEMPTED requests keep their blocks until no
   ↑  ↑      ↓   ↑            ↑                   launched step has them in it; from every phase a request
   │  └─ PREEMPTED            └── from anywhere   may end. A FOLLOWING one runs, or waits like any other,
   └─ FOLLOWING ─┘                                once the prompt that it shares is computed
```
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import KeysView

from asyncllm.engine.scheduling.kv_cache import KvCache
from asyncllm.engine.scheduling.ordered_queue import OrderedQueue
from asyncllm.engine.scheduling.reports import Ended
from asyncllm.engine.scheduling.request import Order, Phase, Request
from asyncllm.engine.scheduling.row_table import RowTable
from asyncllm.engine.scheduling.step_draft import LaunchedStep
from asyncllm.results import FinishReason


class Roster:
    """Moves requests through their phases. `in_flight` is the scheduler's own queue of launched steps."""

    def __init__(self, rows: RowTable, cache: KvCache, in_flight: deque[LaunchedStep]) -> None:
        self._rows = rows
        self._cache = cache
        self._in_flight = in_flight
        self._requests: dict[int, Request] = {}
        self._waiting: OrderedQueue[Order, Request] = OrderedQueue()
        self._waiting_tokens = 0  # of their prompts
        self._deadlines: OrderedQueue[tuple[float, int], Request] = OrderedQueue()
        self._following: dict[int, Request] = {}
        self._draining: list[Request] = []  # ENDED or PREEMPTED, and in a launched step
        self._stop_ids: Counter[int] = Counter()  # of all live requests
        self._ended: list[Ended] = []
        self._released: list[int] = []
        self.preemptions = 0

    def live(self, request: int) -> Request | None:
        """The request of this id; None where it has ended or never was."""
        state = self._requests.get(request)
        return None if state is None or state.phase is Phase.ENDED else state

    @property
    def first_waiting(self) -> Request | None:
        """The next request to admit."""
        return self._waiting.first

    @property
    def num_queued(self) -> int:
        """Requests that could be admitted now, were there rows and blocks for all."""
        return len(self._waiting)

    def waiting_tokens(self, rows: int) -> int:
        """About how many prompt tokens so many rows would get if they went to waiting requests."""
        return self._waiting_tokens * min(rows, len(self._waiting)) // max(1, len(self._waiting))

    @property
    def next_deadline(self) -> float | None:
        """The earliest deadline of a live request."""
        first = self._deadlines.first_key
        return None if first is None else first[0]

    @property
    def stop_ids(self) -> KeysView[int]:
        """The stop ids of all live requests."""
        return self._stop_ids.keys()

    @property
    def num_waiting(self) -> int:
        """Live requests that are queued, or will be, or follow one that is not through with its prompt."""
        preempted = sum(request.phase is Phase.PREEMPTED for request in self._draining)
        return len(self._waiting) + len(self._following) + preempted

    @property
    def num_running(self) -> int:
        """Live requests that are not waiting."""
        ended = sum(request.phase is Phase.ENDED for request in self._draining)
        return len(self._requests) - self.num_waiting - ended

    def take_ended(self) -> list[Ended]:
        """How requests ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def take_released(self) -> list[int]:
        """Requests whose blocks came back since the last call."""
        released, self._released = self._released, []
        return released

    def add(self, request: Request) -> None:
        """Queue a new request, or have it follow the one whose choice it is, if that one has not begun."""
        if request.id in self._requests:
            raise ValueError(f"request {request.id} is there already")
        self._requests[request.id] = request
        leader = None if request.spec.fork_of is None else self.live(request.spec.fork_of)
        if leader is not None and not leader.output and leader.phase is Phase.WAITING:
            request.phase = Phase.FOLLOWING
            self._following[request.id] = request
            leader.followers.append(request)
        else:
            self._enqueue(request)
        for token_id in request.spec.stop_token_ids:
            self._stop_ids[token_id] += 1
        if request.spec.deadline is not None:
            self._deadlines.add((request.spec.deadline, request.id), request)

    def _enqueue(self, request: Request) -> None:
        self._waiting.add(request.order, request)
        self._waiting_tokens += len(request.spec.token_ids)

    def _dequeue(self, request: Request) -> None:
        self._waiting.remove(request.order)
        self._waiting_tokens -= len(request.spec.token_ids)

    def take_followers(self, leader: Request) -> list[Request]:
        """Who follows the leader does so no longer: each of them is to be forked or queued."""
        followers, leader.followers = leader.followers, []
        live = [request for request in followers if request.phase is Phase.FOLLOWING]
        for request in live:
            del self._following[request.id]
        return live

    def fork(self, request: Request, leader: Request, position: int) -> int:
        """Give the follower a row at this position, with what the leader has computed."""
        request.phase = Phase.RUNNING
        request.forked_at = position
        request.computed = leader.applied
        return self._rows.take(request, position)

    def queue(self, request: Request) -> None:
        """A follower waits on its own."""
        request.phase = Phase.WAITING
        self._enqueue(request)

    def admit(self, request: Request, position: int) -> int:
        """Give the request a row that begins at `position`, from waiting to running."""
        self._dequeue(request)
        request.phase = Phase.RUNNING
        request.computed = position
        return self._rows.take(request, position)

    def expire(self, now: float) -> None:
        """End the requests whose deadline has come."""
        while (first := self._deadlines.first_key) is not None and first[0] <= now:
            self.end(self._requests[first[1]], FinishReason.DEADLINE)

    def preempt(self, request: Request) -> None:
        """Take row and blocks from a running request; it goes on later from its known tokens."""
        request.preemptions += 1
        self.preemptions += 1
        self._rows.vacate(request)
        request.phase = Phase.PREEMPTED
        self._draining.append(request)
        self.drain()

    def end(self, request: Request, reason: FinishReason | None, stop_token_id: int | None = None) -> None:
        """End a live request. `reason` is None where its step failed: then `take_ended` does not tell of it."""
        if request.phase is Phase.WAITING:
            self._dequeue(request)
        if request.phase is Phase.FOLLOWING:
            del self._following[request.id]
        if request.followers:
            for follower in self.take_followers(request):
                self.queue(follower)
        if request.row is not None:
            self._rows.vacate(request)
        if request.spec.deadline is not None:
            self._deadlines.remove((request.spec.deadline, request.id))
        for token_id in request.spec.stop_token_ids:
            self._stop_ids[token_id] -= 1
            if not self._stop_ids[token_id]:
                del self._stop_ids[token_id]
        if reason is not None:
            self._ended.append(
                Ended(
                    request=request.id,
                    reason=reason,
                    stop_token_id=stop_token_id,
                    cached_tokens=request.cached_tokens,
                    preemptions=request.preemptions,
                    first_scheduled=request.first_scheduled,
                )
            )
        if request.phase is not Phase.PREEMPTED:  # else it drains already
            self._draining.append(request)
        request.phase = Phase.ENDED
        for step in self._in_flight:
            step.has_ended = True

    def drain(self) -> None:
        """Take the blocks of ended and preempted requests that no launched step has in it; queue the latter again."""
        draining = self._draining
        if not draining:
            return
        oldest = self._in_flight[0].step if self._in_flight else None
        self._draining = [r for r in draining if oldest is not None and r.last_step >= oldest]
        for request in draining:
            if oldest is not None and request.last_step >= oldest:
                continue
            self._cache.close(request)
            if request.phase is Phase.PREEMPTED:
                request.computed = 0
                request.caught_up = False
                request.phase = Phase.WAITING
                self._enqueue(request)
            else:
                del self._requests[request.id]
                self._released.append(request.id)

    def coming_blocks(self) -> int:
        """Blocks that come back when the steps in flight are applied, at the least."""
        last = [r for step in self._in_flight for r in step.finals if r.phase is Phase.LAST]
        return self._cache.sole_blocks([*last, *self._draining])

    def check_integrity(self) -> None:
        """Raise AssertionError where phases, queue and blocks contradict each other."""
        self._waiting.check_integrity()
        self._deadlines.check_integrity()
        waiting, draining, deadlines = set(), set(), set()
        following: set[int] = set()
        stop_ids: Counter[int] = Counter()
        for request in self._requests.values():
            phase, spec = request.phase, request.spec
            if phase is Phase.WAITING or phase is Phase.FOLLOWING:
                assert not any(request.tables), f"request {request.id} waits with blocks"
            if phase is Phase.WAITING:
                waiting.add(request.id)
            following.update(follower.id for follower in request.followers if follower.phase is Phase.FOLLOWING)
            if phase is Phase.PREEMPTED or phase is Phase.ENDED:
                draining.add(request.id)
            if phase is not Phase.ENDED:
                if spec.stop_token_ids:
                    stop_ids.update(spec.stop_token_ids)
                if spec.deadline is not None:
                    deadlines.add(request.id)
            has_row = request.row is not None
            assert phase is Phase.LAST or has_row is (phase is Phase.RUNNING), f"request {request.id}: {phase}"
            assert request.known <= request.limit, f"request {request.id} passed its limit"
        assert self._following.keys() == following, "who follows is not who should"
        assert {request.id for request in self._waiting} == waiting, "the queue differs from who waits"
        assert sorted(request.id for request in self._draining) == sorted(draining), "who drains is not who should"
        assert {request.id for request in self._deadlines} == deadlines, "a deadline is lost, or outlived its request"
        assert self._stop_ids == stop_ids, "stop ids miscounted"
        self._cache.check_integrity(self._requests.values(), [s for step in self._in_flight for s in step.sources])
