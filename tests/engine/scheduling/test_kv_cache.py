from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncllm.engine.plan import NULL_BLOCK, CacheGroup
from asyncllm.engine.scheduling.kv_cache import KvCache, most_blocks, most_positions
from asyncllm.engine.scheduling.prefix_index import first_block_read
from asyncllm.engine.scheduling.request import Request
from asyncllm.engine.scheduling.step_draft import StepDraft
from tests.engine.scheduling.specs import FULL, make_request

GROUPS = st.lists(st.builds(CacheGroup, st.sampled_from((None, 1, 2, 3, 5, 9))), min_size=1, max_size=3).map(tuple)


def blocks_one_by_one(groups: tuple[CacheGroup, ...], size: int, positions: int) -> int:
    """By brute force: the blocks that computing each position reads and writes, at the worst position."""
    return max(
        (sum(p // size - first_block_read(group, p, size) + 1 for group in groups) for p in range(positions)), default=0
    )


@given(groups=GROUPS, size=st.integers(2, 5), positions=st.integers(0, 40))
def test_most_blocks_is_an_upper_bound_that_is_reached(
    groups: tuple[CacheGroup, ...], size: int, positions: int
) -> None:
    whole = -(-positions // size) * size
    needed = blocks_one_by_one(groups, size, positions)
    assert needed <= most_blocks(groups, size, positions)
    if whole > 2 * size + max((group.window or 0 for group in groups), default=0):
        assert most_blocks(groups, size, whole) == blocks_one_by_one(groups, size, whole)


@given(groups=GROUPS, size=st.integers(2, 5), num_blocks=st.integers(1, 30), limit=st.integers(1, 60))
def test_most_positions_is_the_most(groups: tuple[CacheGroup, ...], size: int, num_blocks: int, limit: int) -> None:
    positions = most_positions(groups, size, num_blocks, limit)
    assert positions <= limit
    assert most_blocks(groups, size, positions) <= num_blocks
    assert positions == limit or most_blocks(groups, size, positions + 1) > num_blocks


class Owner:
    """Requests with rows over one cache, and the draft that their changes go to."""

    def __init__(self, *groups: CacheGroup, num_blocks: int = 12) -> None:
        self.groups = groups
        self.cache = KvCache(groups, 4, num_blocks, prefix_caching=True)
        self.draft = StepDraft(step=0, now=0.0, budget=0)
        self.requests: list[Request] = []

    def open(self, tokens: range) -> Request:
        request = make_request(tokens, len(self.groups))
        request.row = len(self.requests)
        self.requests.append(request)
        hit = self.cache.index.longest_hit(request, ())
        self.cache.open(request, hit, self.draft)
        request.computed = hit.positions
        return request

    def compute(self, request: Request, positions: int) -> None:
        self.cache.grow(request, positions, self.draft)
        request.computed = positions
        self.cache.remember(request, positions)
        self.check()

    def check(self) -> None:
        self.cache.check_integrity(self.requests, [copy.source for copy in self.draft.copies])


def test_hit_that_ends_inside_a_block_is_copied() -> None:
    owner = Owner(FULL)
    first = owner.open(range(8))
    owner.compute(first, 8)
    second = owner.open(range(8))
    assert second.computed == 7
    assert second.tables[0][0] == first.tables[0][0]
    copy = owner.draft.copies[0]
    assert (copy.source, copy.destination) == (first.tables[0][1], second.tables[0][1])
    assert owner.cache.pool.holders(copy.source) == 2, "the source must be held until the copy is made"
    owner.check()


def test_last_holder_writes_in_place() -> None:
    owner = Owner(FULL)
    first = owner.open(range(8))
    owner.compute(first, 8)
    table = list(first.tables[0])
    owner.cache.close(first)
    assert owner.cache.pool.cached == 2
    second = owner.open(range(8))
    assert second.computed == 7
    assert second.tables[0] == table
    assert owner.draft.copies == []
    assert table[1] not in owner.cache.index, "a block that is written must not be found"
    owner.check()
    owner.compute(second, 8)
    assert table[1] in owner.cache.index


def test_window_gives_back_by_applied_positions() -> None:
    owner = Owner(FULL, CacheGroup(5))
    request = owner.open(range(20))
    owner.cache.grow(request, 20, owner.draft)
    request.computed = 11  # planned to 20, applied to 11: position 11 reads from 7 on
    owner.cache.give_back(request)
    owner.check()
    assert NULL_BLOCK not in request.tables[0]
    assert [block == NULL_BLOCK for block in request.tables[1]] == [True, False, False, False, False]
    assert owner.cache.pool.cached == 1  # what fell out is found by the next with this prefix
    request.computed = 20
    owner.cache.give_back(request)
    owner.check()
    assert [block == NULL_BLOCK for block in request.tables[1]] == [True] * 4 + [False]


def test_hit_of_a_window_leaves_out_what_is_never_read() -> None:
    owner = Owner(FULL, CacheGroup(5))
    owner.compute(owner.open(range(17)), 16)
    second = owner.open(range(17))
    assert second.computed == 16
    assert NULL_BLOCK not in second.tables[0]
    assert second.tables[1][:3] == [NULL_BLOCK] * 3
    assert second.tables[1][3] == owner.requests[0].tables[1][3]
    owner.check()


def test_end_of_a_prefix_is_given_up_first() -> None:
    owner = Owner(FULL, num_blocks=3)
    request = owner.open(range(12))
    owner.compute(request, 12)
    table = list(request.tables[0])
    owner.cache.close(request)
    assert [owner.cache.pool.allocate() for _ in range(3)] == table[::-1]


def test_integrity_check_sees_a_leaked_block() -> None:
    owner = Owner(FULL)
    owner.compute(owner.open(range(8)), 8)
    owner.requests[0].tables[0].pop()
    with pytest.raises(AssertionError, match="holders"):
        owner.check()
