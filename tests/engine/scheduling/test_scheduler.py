from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from asyncllm.engine.plan import NO_TOKEN, CacheGroup, StepPlan, StepResult
from asyncllm.engine.scheduling.scheduler import Ended, Scheduler, StepTokens
from asyncllm.errors import ContextLengthError, RequestError
from asyncllm.results import FinishReason
from tests.engine.scheduling.specs import FULL, make_config, make_spec

RUN_AHEAD = pytest.mark.parametrize("run_ahead", [0, 1, 2])


class Hand:
    """A scheduler driven by hand: each request's tokens are 100, 101, …, unless the test says otherwise."""

    def __init__(self, **changes: Any) -> None:
        self.scheduler = Scheduler(make_config(**changes))
        self.in_flight: deque[StepPlan] = deque()
        self.rows: dict[int, int] = {}
        self.maps: dict[int, list[int]] = {}  # step -> requests, in the order of the result
        self.output: dict[int, list[int]] = {}
        self.sampled: Counter[int] = Counter()
        self.ended: dict[int, Ended] = {}
        self.released: list[int] = []

    def add(self, request: int, tokens: Sequence[int] = (1, 2, 3), **changes: Any) -> None:
        self.scheduler.add(make_spec(request, tokens, **changes))
        self.output[request] = []

    def launch(self, now: float = 0.0) -> StepPlan | None:
        plan = self.scheduler.schedule(now)
        if plan is not None:
            self.rows.update((join.row, join.request) for join in plan.joins)
            rows = [*plan.decode_rows.tolist(), *(chunk.row for chunk in plan.chunks if chunk.samples)]
            self.maps[plan.step] = [self.rows[row] for row in rows]
            self.sampled.update(self.maps[plan.step])
            self.in_flight.append(plan)
        self.check()
        return plan

    def must_launch(self, now: float = 0.0) -> StepPlan:
        plan = self.launch(now)
        assert plan is not None
        return plan

    def complete(self, **tokens: int) -> StepTokens:
        """The oldest step completes; `r3=7` makes 7 the token of request 3."""
        plan = self.in_flight.popleft()
        values = [tokens.get(f"r{request}", 100 + len(self.output[request])) for request in self.maps[plan.step]]
        done = self.scheduler.apply(StepResult(plan.step, np.array(values, np.int32)))
        for request, token_id in zip(done.requests, done.token_ids, strict=True):
            self.output[request].append(token_id)
        self.check()
        return done

    def run(self, steps: int = 1000) -> None:
        """Launch as far ahead as it goes, complete the oldest; until nothing is left to do."""
        for _ in range(steps):
            while self.launch() is not None:
                pass
            if not self.in_flight:
                return
            self.complete()

    def finish_one(self, request: int) -> None:
        self.scheduler.finish(request, FinishReason.ABORT)
        self.check()

    def check(self) -> None:
        self.scheduler.check_integrity()
        self.ended.update((ended.request, ended) for ended in self.scheduler.take_ended())
        self.released += self.scheduler.take_released()

    def reasons(self) -> dict[int, str]:
        return {request: str(ended.reason) for request, ended in self.ended.items()}


def chunks(plan: StepPlan) -> list[tuple[int, int, int, bool]]:
    return [(chunk.row, chunk.start, len(chunk.token_ids), chunk.samples) for chunk in plan.chunks]


# --- admission ---


def test_longer_than_the_pool_is_refused_and_blocks_nobody() -> None:
    """G20: 8 blocks of 16, context 512."""
    hand = Hand(block_size=16, num_blocks=8, max_model_len=512, max_batched_tokens=512)
    with pytest.raises(ContextLengthError, match=r"200 tokens.*pool.*128.*num_blocks"):
        hand.add(0, range(200))
    hand.add(1, range(10))
    hand.run()
    assert hand.reasons() == {1: "length"}


@pytest.mark.parametrize("changes", [{"max_model_len": 32}, {"num_blocks": 8}], ids=["context", "pool"])
def test_prompt_must_leave_room_for_one_token(changes: dict[str, int]) -> None:
    hand = Hand(**changes)
    with pytest.raises(RequestError, match="at least one more"):
        hand.scheduler.check_admissible(32)
    hand.scheduler.check_admissible(31)
    hand.add(0, range(31))
    hand.run()
    assert hand.output[0] == [100]
    assert hand.reasons() == {0: "length"}


def test_id_is_taken_once() -> None:
    hand = Hand()
    hand.add(0)
    with pytest.raises(ValueError, match="there already"):
        hand.add(0)


def test_first_in_the_queue_is_never_passed_over() -> None:
    hand = Hand(num_blocks=8, max_num_seqs=8)
    hand.add(0, range(16), max_tokens=12)
    hand.must_launch()
    hand.add(1, range(100, 120))  # 5 blocks: has to wait
    hand.add(2, [9])
    for _ in range(4):
        hand.launch()
        hand.complete()
    assert hand.scheduler.counts().running == 1
    hand.run()
    assert hand.ended[1].first_scheduled is not None
    assert list(hand.ended) == [0, 1, 2]


def test_admission_leaves_a_block_for_every_running_row() -> None:
    hand = Hand(num_blocks=6)
    for request in range(3):
        hand.add(request, range(10 * request, 10 * request + 4), max_tokens=2)
    plan = hand.must_launch()
    assert len(plan.joins) == 3  # 1, then 1 + 1 to spare, then 1 + 2
    hand = Hand(num_blocks=4)
    for request in range(3):
        hand.add(request, range(10 * request, 10 * request + 4), max_tokens=2)
    assert len(hand.must_launch().joins) == 2


def test_order_is_level_then_deadline_then_arrival() -> None:
    hand = Hand(max_num_seqs=1)
    hand.add(0, priority=1, arrival=0.0)
    hand.add(1, arrival=2.0)
    hand.add(2, arrival=1.0)
    hand.add(3, arrival=3.0, deadline=1e9)
    hand.add(4, priority=-1, arrival=9.0)
    hand.add(5, priority=-1, arrival=30.0)  # one level more important, but three levels later
    hand.run()
    assert list(hand.ended) == [4, 3, 2, 1, 0, 5]


# --- the token rule ---


def test_chunks_take_what_the_budget_leaves() -> None:
    hand = Hand(max_batched_tokens=4, run_ahead=0)
    hand.add(0, range(10), max_tokens=9)
    hand.add(1, range(50, 53))
    seen = []
    for _ in range(4):
        plan = hand.must_launch()
        seen.append((plan.decode_rows.tolist(), chunks(plan)))
        hand.complete()
    assert seen == [
        ([], [(0, 0, 4, False)]),
        ([], [(0, 4, 4, False)]),
        ([], [(0, 8, 2, True), (1, 0, 2, False)]),
        ([0], [(1, 2, 1, True)]),
    ]


def test_prefill_goes_on_among_decoders() -> None:
    """There are no more rows than positions in a step, so a chunk has a position left, whoever keeps coming."""
    hand = Hand(max_num_seqs=8, max_batched_tokens=4, max_model_len=200, num_blocks=100)
    for request in range(3):
        hand.add(request, [request], max_tokens=150, priority=-5)
    for _ in range(5):
        hand.launch()
        hand.complete()
    hand.add(9, range(100, 120), max_tokens=1)
    hand.launch()
    hand.complete()
    for steps in range(25):
        hand.add(1000 + steps, [5], priority=-9)
        hand.launch()
        hand.complete()
    assert 9 in hand.ended


def mixed(hand: Hand, steps: int) -> list[tuple[int, int]]:
    """Decoding rows and known tokens of each of so many steps."""
    seen = []
    for _ in range(steps):
        plan = hand.must_launch()
        seen.append((len(plan.decode_rows), sum(len(chunk.token_ids) for chunk in plan.chunks)))
        hand.complete()
    return seen


SIZES = {
    "max_batched_tokens": 128,
    "mixed_chunk_tokens": 8,
    "full_step_tokens": 32,
    "max_model_len": 400,
    "num_blocks": 800,
    "run_ahead": 0,
}


def test_a_prompt_that_comes_alone_is_computed_in_small_chunks() -> None:
    hand = Hand(max_num_seqs=16, **SIZES)
    for request in range(8):
        hand.add(request, [request], max_tokens=60)
    hand.launch()
    hand.complete()
    hand.add(8, range(100, 150), max_tokens=60)
    assert mixed(hand, 8) == [(8, 8)] * 6 + [(8, 2), (9, 0)]


def test_a_burst_ends_in_chunks_as_large_as_it_began() -> None:
    hand = Hand(max_num_seqs=16, **SIZES)
    for request in range(16):
        hand.add(request, range(32 * request, 32 * request + 32), max_tokens=60)
    assert mixed(hand, 5) == [(0, 128), (4, 124), (7, 121), (11, 117), (15, 22)]


def test_where_requests_wait_for_rows_these_are_taken_little_by_little() -> None:
    """Rows that end one after another are taken one after another: prompts are computed beside decoding rows, in steps
    of one size, instead of in waves."""
    hand = Hand(max_num_seqs=16, **SIZES)
    for request in range(160):
        hand.add(request, range(32 * request, 32 * request + 16), max_tokens=8)
    steps = mixed(hand, 90)
    assert {decoding + chunks for decoding, chunks in steps} == {32}
    assert all(decoding >= 8 for decoding, _ in steps[12:])


@pytest.mark.parametrize(("filled", "chunks"), [(False, [80, 0]), (True, [64, 16])])
def test_a_step_that_a_device_would_fill_up_is_split(filled: bool, chunks: list[int]) -> None:
    hand = Hand(max_num_seqs=16, **SIZES, filled_steps=filled)
    hand.add(0, range(80), max_tokens=60)
    assert [count for _, count in mixed(hand, 2)] == chunks


def test_a_step_is_split_by_what_caches_turn_out_to_have() -> None:
    """Prompts of 768 tokens in all would fill the step, but share so many that 288 are left: 96 less than its size."""
    hand = Hand(max_num_seqs=16, **{**SIZES, "max_batched_tokens": 512}, filled_steps=True)
    for request in range(16):
        first = 100 * (request + 1)
        hand.add(request, [*range(32), *range(first, first + 16)], max_tokens=60)
    assert mixed(hand, 2) == [(0, 256), (14, 32)]


def test_a_cached_beginning_is_not_waited_for() -> None:
    hand = Hand(max_num_seqs=16, **SIZES)
    for request in range(16):
        hand.add(request, [*range(64), 100 + request], max_tokens=150)
    hand.run(10)
    hand.finish_one(3)
    hand.add(16, [*range(64), *range(200, 212)], max_tokens=60)
    assert mixed(hand, 2) == [(15, 9), (15, 3)]


@RUN_AHEAD
def test_never_more_steps_in_flight_than_run_ahead_and_one(run_ahead: int) -> None:
    hand = Hand(run_ahead=run_ahead)
    hand.add(0, max_tokens=20)
    for _ in range(run_ahead + 1):
        assert hand.launch() is not None
    assert hand.launch() is None
    hand.complete()
    assert hand.launch() is not None
    assert hand.launch() is None


@RUN_AHEAD
@pytest.mark.parametrize(
    ("changes", "request_changes", "tokens"),
    [
        ({}, {"max_tokens": 1}, 1),
        ({}, {"max_tokens": 2}, 2),
        ({}, {"max_tokens": 7}, 7),
        ({"max_model_len": 12}, {"max_tokens": 99}, 9),
        ({"num_blocks": 3}, {"max_tokens": 99}, 9),
    ],
    ids=["one token", "two tokens", "max_tokens", "context", "pool"],
)
def test_foreseen_ending_gets_no_surplus_step(
    run_ahead: int, changes: dict[str, int], request_changes: dict[str, int], tokens: int
) -> None:
    hand = Hand(run_ahead=run_ahead, **changes)
    hand.add(0, (1, 2, 3), **request_changes)
    hand.run()
    assert hand.output[0] == [100 + i for i in range(tokens)]
    assert hand.sampled[0] == tokens
    assert hand.reasons() == {0: "length"}
    assert hand.scheduler.counts().tokens_computed == 3 + tokens - 1


@RUN_AHEAD
def test_surplus_after_a_stop_id_is_dropped(run_ahead: int) -> None:
    hand = Hand(run_ahead=run_ahead)
    hand.add(0, stop_token_ids=frozenset((7,)), max_tokens=20)
    hand.add(1, (5, 6), max_tokens=20)
    for _ in range(run_ahead + 1):
        hand.launch()
    assert hand.complete(r0=7, r1=7).token_ids == [7, 7]
    assert hand.reasons() == {0: "stop"}  # 7 ends only the request that asked for it
    assert hand.ended[0].stop_token_id == 7
    hand.run()
    assert hand.output[0] == [7]
    assert len(hand.output[1]) == 20
    assert hand.sampled[0] == 1 + run_ahead


def test_stop_id_counts_only_after_min_tokens() -> None:
    hand = Hand(run_ahead=0)
    hand.add(0, stop_token_ids=frozenset((7,)), min_tokens=2, max_tokens=20)
    for _ in range(3):
        hand.launch()
        hand.complete(r0=7)
    assert hand.output[0] == [7, 7, 7]
    assert hand.reasons() == {0: "stop"}


def test_steady_steps_change_nothing_and_reuse_everything() -> None:
    hand = Hand(block_size=32)
    for request in range(3):
        hand.add(request, max_tokens=20)
    hand.launch()
    first = hand.must_launch()
    requests = hand.complete().requests
    assert first.decode_changed
    for _ in range(5):
        plan = hand.must_launch()
        assert plan.decode_rows is first.decode_rows
        assert not plan.decode_changed
        assert not plan.joins
        assert not len(plan.tables.rows)
        done = hand.complete()
        assert list(done.requests) == [0, 1, 2]
        requests = done.requests
    hand.launch()
    assert hand.complete().requests is requests


def test_result_of_another_step_is_refused() -> None:
    hand = Hand()
    hand.add(0, max_tokens=20)
    hand.launch()
    hand.launch()
    with pytest.raises(ValueError, match="not the oldest"):
        hand.scheduler.apply(StepResult(1, np.array([1], np.int32)))


def test_result_of_another_size_is_refused() -> None:
    hand = Hand()
    hand.add(0)
    hand.launch()
    with pytest.raises(ValueError, match="its result has 2"):
        hand.scheduler.apply(StepResult(0, np.array([1, 2], np.int32)))


# --- endings ---


def test_deadline_ends_running_and_waiting() -> None:
    hand = Hand(max_num_seqs=1)
    hand.add(0, deadline=5.0, max_tokens=50)
    hand.add(1, deadline=4.0, priority=1)
    hand.add(2, deadline=9.0, priority=1)
    assert hand.scheduler.next_deadline() == 4.0
    hand.launch(3.9)
    assert hand.ended == {}
    hand.launch(4.0)
    assert hand.reasons() == {1: "deadline"}
    assert hand.scheduler.next_deadline() == 5.0
    assert hand.launch(100.0) is None  # too many steps are in flight; deadlines are kept all the same
    assert hand.reasons() == {0: "deadline", 1: "deadline", 2: "deadline"}
    assert hand.scheduler.next_deadline() is None
    assert (hand.ended[0].first_scheduled, hand.ended[1].first_scheduled) == (3.9, None)
    assert hand.complete().token_ids == []


@RUN_AHEAD
def test_blocks_of_the_aborted_come_back_with_the_last_step(run_ahead: int) -> None:
    hand = Hand(run_ahead=run_ahead)
    hand.add(0, max_tokens=30)
    for _ in range(run_ahead + 1):
        hand.launch()
    hand.scheduler.finish(0, FinishReason.ABORT)
    hand.scheduler.finish(0, FinishReason.STOP)
    hand.scheduler.finish(77, FinishReason.ABORT)
    hand.check()
    assert hand.reasons() == {0: "abort"}
    for left in range(run_ahead + 1, 0, -1):
        assert hand.released == []
        assert hand.scheduler.counts().blocks_used > 0
        assert len(hand.in_flight) == left
        assert hand.complete().token_ids == []
    assert hand.released == [0]
    assert hand.scheduler.counts().blocks_used == 0


def test_row_of_the_ended_is_free_at_once() -> None:
    hand = Hand(max_num_seqs=1)
    hand.add(0, max_tokens=30)
    hand.add(1, (8, 9))
    hand.launch()
    hand.scheduler.finish(0, FinishReason.ABORT)
    plan = hand.must_launch()
    assert [(join.row, join.request) for join in plan.joins] == [(0, 1)]
    assert hand.complete().requests == ()  # what row 0 sampled then was request 0's
    assert hand.complete().requests == (1,)


def test_abort_of_the_waiting_releases_at_once() -> None:
    hand = Hand()
    hand.add(0)
    hand.scheduler.finish(0, FinishReason.ABORT)
    hand.check()
    assert hand.released == [0]
    assert hand.launch() is None


def test_failed_steps_take_their_requests_along() -> None:
    hand = Hand(run_ahead=2)
    hand.add(0, range(8), max_tokens=30)
    hand.launch()
    hand.add(1, range(20, 28), max_tokens=30)
    hand.launch()
    hand.scheduler.finish(0, FinishReason.ABORT)
    plan = hand.must_launch()
    assert hand.scheduler.fail(plan.step - 1) == [1]
    assert hand.scheduler.counts().steps_in_flight == 1
    hand.check()
    assert hand.released == []  # one step is still in flight
    assert hand.reasons() == {0: "abort"}
    for _ in range(2):
        hand.in_flight.pop()
    hand.complete()
    assert sorted(hand.released) == [0, 1]
    hand.add(2, range(20, 28))
    plan = hand.must_launch()
    assert chunks(plan)[0][1] == 0, "what a failed step was to compute must not be found"
    assert plan.decode_changed


# --- blocks ---


@RUN_AHEAD
def test_least_important_is_preempted_and_goes_on_where_it_was(run_ahead: int) -> None:
    hand = Hand(run_ahead=run_ahead, num_blocks=8)
    hand.add(0, range(8), max_tokens=16, arrival=0.0)
    hand.add(1, range(50, 58), max_tokens=16, arrival=1.0)
    hand.run()
    assert [hand.ended[request].preemptions for request in (0, 1)] == [0, 1]
    assert hand.scheduler.counts().preemptions == 1
    for request in (0, 1):
        assert hand.output[request] == [100 + i for i in range(16)]
        assert hand.sampled[request] == 16, "a delivered token was sampled again"
    assert hand.scheduler.counts().blocks_used == 0


def test_priority_decides_who_is_preempted() -> None:
    hand = Hand(num_blocks=8)
    hand.add(0, range(8), max_tokens=16, arrival=0.0, priority=1)
    hand.add(1, range(50, 58), max_tokens=16, arrival=1.0, priority=0)
    hand.run()
    assert [hand.ended[request].preemptions for request in (0, 1)] == [1, 0]


def test_preempted_finds_its_own_prefix() -> None:
    hand = Hand(num_blocks=8, max_num_seqs=2)
    hand.add(0, range(8), max_tokens=12)
    hand.add(1, range(50, 58), max_tokens=16, arrival=1.0)
    hand.run()
    computed = hand.scheduler.counts().tokens_computed
    assert hand.ended[1].preemptions == 1
    assert computed < (8 + 11) + (8 + 15) + 8, "the preempted request computed everything again"


def test_nobody_is_preempted_while_blocks_are_coming_back() -> None:
    hand = Hand(num_blocks=6)
    hand.add(0, range(8), max_tokens=20)
    hand.add(1, range(50, 57), max_tokens=30, arrival=1.0)
    hand.add(2, range(80, 84), max_tokens=3, arrival=2.0)
    hand.run()
    assert hand.output[2] == [100, 101, 102]
    assert hand.ended[2].preemptions == 0


def test_outgrowing_the_pool_ends_at_capacity_only_alone() -> None:
    hand = Hand(num_blocks=6)
    hand.add(0, range(8), max_tokens=99)
    hand.add(1, range(50, 58), max_tokens=99, arrival=1.0)
    hand.run()
    assert hand.reasons() == {0: "length", 1: "length"}
    assert [len(hand.output[request]) for request in (0, 1)] == [24 - 8, 24 - 8]


@pytest.mark.parametrize("groups", [(CacheGroup(6),), (FULL, CacheGroup(6))], ids=["window", "full and window"])
@RUN_AHEAD
def test_window_runs_in_a_pool_that_just_holds_it(groups: tuple[CacheGroup, ...], run_ahead: int) -> None:
    full = 10 if FULL in groups else 0
    hand = Hand(groups=groups, num_blocks=full + 3, max_model_len=40, run_ahead=run_ahead)
    hand.add(0, range(20), max_tokens=99)
    hand.run()
    assert len(hand.output[0]) == 20
    assert hand.scheduler.counts().preemptions == 0


# --- tokens that could not be sampled ---


@pytest.mark.parametrize("step", [0, 1, 3, 6])
@RUN_AHEAD
def test_who_has_no_token_ends_alone(step: int, run_ahead: int) -> None:
    """In its first step, when a block was just filled, in its last one; what is on its way for it is dropped."""
    hand = Hand(run_ahead=run_ahead)
    for request in range(3):
        hand.add(request, (7, 8, request), max_tokens=7)
    for done in range(step + 1):
        while len(hand.in_flight) <= run_ahead and hand.launch() is not None:
            pass
        tokens = hand.complete(**({"r1": NO_TOKEN} if done == step else {}))
        assert list(tokens.unsampled) == ([1] if done == step else [])
    hand.run()
    assert [len(hand.output[request]) for request in range(3)] == [7, step, 7]
    assert sorted(hand.ended) == [0, 2]
    assert sorted(hand.released) == [0, 1, 2]
    assert hand.scheduler.counts().blocks_used == 0


@RUN_AHEAD
def test_blocks_of_who_has_no_token_are_nobody_elses(run_ahead: int) -> None:
    """They may hold no numbers. Those that it shares stay with their holders, and are computed by who comes next."""
    hand = Hand(run_ahead=run_ahead)
    hand.add(0, range(12), max_tokens=20)
    hand.must_launch()
    hand.complete()
    hand.add(1, [*range(12), 50, 51, 52, 53, 54])
    while True:
        while hand.launch() is not None:
            pass
        if hand.complete(r1=NO_TOKEN).unsampled:
            break
    hand.add(2, [*range(12), 50, 51, 52, 53, 54])
    hand.run()
    assert hand.ended[2].cached_tokens == 0
    assert hand.output[2] == [100 + i for i in range(8)]
    hand.add(3, [*range(12), 50, 51, 52, 53, 54])
    hand.run()
    assert hand.ended[3].cached_tokens == 16


@pytest.mark.parametrize("seed", range(12))
def test_tokens_may_be_missing_at_any_moment(seed: int) -> None:
    """Among arrivals, aborts, preemptions and windows; everything comes back, and nobody has two ends."""
    draw = random.Random(seed)
    groups = draw.choice([(FULL,), (CacheGroup(6),), (FULL, CacheGroup(6))])
    sizes = {"num_blocks": draw.choice([20, 40]), "max_batched_tokens": draw.choice([4, 8, 64]), "max_model_len": 40}
    hand, count, unsampled = Hand(groups=groups, run_ahead=seed % 3, **sizes), 0, set[int]()
    for _ in range(120):
        if draw.random() < 0.3 and count < 14:
            tokens = [draw.randint(1, 3) for _ in range(draw.randint(1, 20))]
            hand.add(count, tokens, max_tokens=draw.randint(1, 12))
            count += 1
        while draw.random() < 0.8 and hand.launch() is not None:
            pass
        if hand.in_flight:
            sampled = hand.maps[hand.in_flight[0].step]
            done = hand.complete(**{f"r{request}": NO_TOKEN for request in sampled if draw.random() < 0.1})
            unsampled.update(done.unsampled)
            assert NO_TOKEN not in done.token_ids
        if draw.random() < 0.05 and count:
            hand.finish_one(draw.randrange(count))
    hand.run()
    assert sorted([*unsampled, *hand.ended]) == sorted(hand.released) == list(range(count))
    assert hand.scheduler.counts().blocks_used == 0


# --- prefix caching ---


@pytest.mark.parametrize("length", [31, 32, 33])
@RUN_AHEAD
def test_last_position_of_a_cached_prompt_is_computed(length: int, run_ahead: int) -> None:
    """G17: the same prompt three times, blocks of 16."""
    hand = Hand(block_size=16, run_ahead=run_ahead)
    for request in range(3):
        hand.add(request, range(length))
        hand.run()
    cached = [hand.ended[request].cached_tokens for request in range(3)]
    assert cached == [0, *{31: (16, 16), 32: (31, 31), 33: (32, 32)}[length]]
    assert hand.scheduler.counts().prompt_tokens_cached == sum(cached)
    assert hand.output[0] == hand.output[1] == hand.output[2]


def test_salt_keeps_prefixes_apart() -> None:
    """G19, the salt's part."""
    hand = Hand()
    for request, salt in enumerate((None, "x", "y", "x", None)):
        hand.add(request, range(10), cache_salt=salt)
        hand.run()
    assert [hand.ended[request].cached_tokens for request in range(5)] == [0, 0, 0, 8, 8]


def test_requests_of_one_step_share_their_prefix() -> None:
    hand = Hand(num_blocks=64)
    for request in range(4):
        hand.add(request, [*range(12), 50 + request])
    plan = hand.must_launch()
    assert chunks(plan) == [(0, 0, 13, True), (1, 12, 1, True), (2, 12, 1, True), (3, 12, 1, True)]
    assert not len(plan.copies)


def test_block_that_this_step_fills_is_not_copied() -> None:
    """Copies are made before the step writes, so the hit of an equal prompt ends at the block before."""
    hand = Hand()
    hand.add(0, range(8))
    hand.add(1, range(8))
    assert chunks(hand.must_launch()) == [(0, 0, 8, True), (1, 4, 4, True)]
    hand.add(2, range(8))
    plan = hand.must_launch()
    assert chunks(plan) == [(2, 7, 1, True)]
    assert len(plan.copies) == 1


def test_generated_blocks_are_found() -> None:
    hand = Hand()
    hand.add(0, (1, 2, 3), max_tokens=10)
    hand.run()
    hand.add(1, [1, 2, 3, *hand.output[0], 5])
    hand.run()
    assert hand.ended[1].cached_tokens == 12  # of 13, the last of which was sampled and never computed


def test_no_prefix_caching() -> None:
    hand = Hand(prefix_caching=False)
    for request in range(2):
        hand.add(request, range(10))
        hand.run()
    assert hand.ended[1].cached_tokens == 0
    assert hand.scheduler.counts().blocks_cached == 0
