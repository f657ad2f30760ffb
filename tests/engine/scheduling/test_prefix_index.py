from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncllm.engine.plan import NULL_BLOCK, CacheGroup
from asyncllm.engine.scheduling.prefix_index import NoPrefixIndex, PrefixIndex, block_hash, root_hash
from asyncllm.engine.scheduling.request import Request
from tests.engine.scheduling.specs import FULL, make_request

SIZE = 2


@st.composite
def indexed_requests(draw: st.DrawFn) -> tuple[PrefixIndex, Request, dict[tuple[int, int], int]]:
    """An index that holds any of a request's blocks, by (group, block index), in any of its groups."""
    windows = draw(st.lists(st.sampled_from((None, 1, 2, 3, 4, 7)), min_size=1, max_size=3))
    groups = tuple(CacheGroup(window) for window in windows)
    known = draw(st.integers(1, 12))
    request = make_request(range(known), len(groups))
    index = PrefixIndex(SIZE, groups)
    index.hash_blocks(request, known // SIZE)
    places = [(g, i) for g in range(len(groups)) for i in range(known // SIZE)]
    holes = draw(st.sets(st.sampled_from(places), max_size=3)) if places else set()
    blocks = {place: block for block, place in enumerate(places, 1) if place not in holes}
    for (g, i), block in blocks.items():
        assert index.enter(g, request.hashes[i], block)
    index.check_integrity()
    return index, request, blocks


def readable(blocks: dict[tuple[int, int], int], groups: list[CacheGroup], positions: int) -> bool:
    """Whether every position that computing from `positions` on reads has its block, and the last one in any case."""
    return all(
        (g, position // SIZE) in blocks
        for g, group in enumerate(groups)
        for position in range(positions)
        if group.window is None or position > positions - group.window or position == positions - 1
    )


@given(case=indexed_requests(), unreadable=st.sets(st.integers(1, 36), max_size=2))
def test_longest_hit_is_the_longest(
    case: tuple[PrefixIndex, Request, dict[tuple[int, int], int]], unreadable: set[int]
) -> None:
    index, request, blocks = case
    groups = list(index._groups)
    hit = index.longest_hit(request, unreadable)
    possible = [0]
    for end in range(1, request.known // SIZE + 1):
        positions = min(end * SIZE, request.known - 1)
        to_copy = [blocks.get((g, end - 1)) for g in range(len(groups))] if positions < end * SIZE else []
        if readable(blocks, groups, positions) and not unreadable.intersection(b for b in to_copy if b):
            possible.append(positions)
    assert hit.positions == max(possible)
    assert hit.positions < request.known
    length = -(-hit.positions // SIZE)
    for g, table in enumerate(hit.tables):
        assert len(table) == length
        for i, block in enumerate(table):
            assert block in (blocks.get((g, i)), NULL_BLOCK)
    taken = {(g, i): b for g, table in enumerate(hit.tables) for i, b in enumerate(table) if b != NULL_BLOCK}
    assert hit.positions == 0 or readable(taken, groups, hit.positions)


def test_same_content_stays_in_the_first_block() -> None:
    index = PrefixIndex(SIZE, (FULL,))
    assert index.enter(0, b"x", 1)
    assert not index.enter(0, b"x", 2)
    index.forget(2)
    assert 1 in index
    index.forget(1)
    assert len(index) == 0
    assert index.enter(0, b"x", 2)


def test_no_prefix_index_finds_nothing() -> None:
    index = NoPrefixIndex(SIZE, (FULL,))
    request = make_request(range(8))
    index.hash_blocks(request, 4)
    assert request.hashes == []
    assert index.longest_hit(request, ()).positions == 0


def test_hashes_are_chained_and_grow_with_what_is_known() -> None:
    index = PrefixIndex(SIZE, (FULL,))
    request = make_request([1, 2, 3])
    index.hash_blocks(request, 1)
    request.output.extend([4, 5])
    index.hash_blocks(request, 2)
    first = block_hash(root_hash({}), request.tokens(0, 2).tobytes())
    assert request.hashes == [first, block_hash(first, request.tokens(2, 4).tobytes())]
    assert len({*request.hashes, block_hash(root_hash({}), request.tokens(2, 4).tobytes())}) == 3


@given(
    one=st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=3),
    other=st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=3),
)
def test_extras_are_told_apart(one: dict[str, str], other: dict[str, str]) -> None:
    assert (root_hash(one) == root_hash(other)) == (one == other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"salt": "S"}, {"adapter": "S"}),
        ({"salt": "x"}, {"salt": "y"}),
        ({"salt": ""}, {}),
        ({"salt": "a", "adapter": "b"}, {"salt": "b", "adapter": "a"}),
        ({"a": "bc"}, {"ab": "c"}),
    ],
)
def test_a_salt_is_no_adapter(one: dict[str, str], other: dict[str, str]) -> None:
    assert root_hash(one) != root_hash(other)


def test_lone_surrogate_in_a_salt() -> None:
    assert root_hash({"salt": "\ud800"}) != root_hash({"salt": "?"})
