from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncllm.engine.plan import NULL_BLOCK, CacheGroup
from asyncllm.engine.scheduling.block_pool import BlockPool
from asyncllm.engine.scheduling.prefix_index import PrefixIndex


def make_pool(num_blocks: int) -> tuple[BlockPool, PrefixIndex]:
    index = PrefixIndex(4, (CacheGroup(),))
    return BlockPool(num_blocks, index), index


@given(num_blocks=st.integers(1, 6), events=st.lists(st.tuples(st.sampled_from("asre"), st.integers(0, 99))))
def test_counts_holders_and_keeps_what_is_cached(num_blocks: int, events: list[tuple[str, int]]) -> None:
    pool, index = make_pool(num_blocks)
    held: Counter[int] = Counter()
    cached: list[int] = []  # longest ago first
    for serial, (event, which) in enumerate(events):
        if event == "a" and pool.available:
            block = pool.allocate()
            assert 1 <= block <= num_blocks
            assert not held[block]
            if block in cached:
                assert len(held) + len(cached) == num_blocks, "a cached block was given up while another was free"
                assert block == cached.pop(0), "not the one given back longest ago"
                assert block not in index
            held[block] = 1
        elif event == "s" and (choices := [*held, *cached]):
            block = choices[which % len(choices)]
            pool.share(block)
            if block in cached:
                cached.remove(block)
                assert block in index
            held[block] += 1
        elif event == "r" and held:
            block = sorted(held)[which % len(held)]
            pool.release(block)
            held[block] -= 1
            if not held[block]:
                del held[block]
                if block in index:
                    cached.append(block)
        elif event == "e" and (unknown := [block for block in sorted(held) if block not in index]):
            index.enter(0, serial.to_bytes(4, "little"), unknown[which % len(unknown)])
        pool.check_integrity(held)
        index.check_integrity()
        assert (pool.used, pool.cached, pool.available) == (len(held), len(cached), num_blocks - len(held))
        assert all(pool.holders(block) == held[block] for block in range(1, num_blocks + 1))
        states = [min(held[b] + 1, 3) if held[b] else int(b in cached) for b in range(1, num_blocks + 1)]
        assert list(pool.states()) == states


@pytest.mark.parametrize("count", [0, 1, 3, 4, 6])
def test_many_at_once_are_those_of_one_by_one(count: int) -> None:
    one, many = (make_pool(6) for _ in range(2))
    for pool, index in (one, many):
        held = [pool.allocate() for _ in range(3)]
        for block in held[:2]:
            index.enter(0, bytes([block]), block)
        pool.release_some(held)
    blocks = many[0].allocate_some(count)
    assert blocks == [one[0].allocate() for _ in range(count)]
    many[0].check_integrity(dict.fromkeys(blocks, 1))
    many[1].check_integrity()


def test_null_block_is_never_given_out() -> None:
    pool, _ = make_pool(3)
    assert NULL_BLOCK not in {pool.allocate() for _ in range(3)}
    assert pool.available == 0


def test_double_release_is_caught() -> None:
    pool, _ = make_pool(2)
    block = pool.allocate()
    pool.release(block)
    with pytest.raises(AssertionError, match="once too often"):
        pool.release(block)


@pytest.mark.parametrize("wrong", [{}, {1: 2}, {1: 1, 2: 1}])
def test_integrity_check_sees_miscounted_holders(wrong: dict[int, int]) -> None:
    pool, _ = make_pool(2)
    pool.allocate()
    with pytest.raises(AssertionError, match="holders"):
        pool.check_integrity(wrong)
