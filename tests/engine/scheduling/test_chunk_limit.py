from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncllm.engine.execution.graph_sizes import first_graph_sizes, graph_sizes
from asyncllm.engine.scheduling.chunk_limit import TAKING_STEPS, ChunkLimit, step_size, tokens_worth_a_step

COUNT = st.integers(0, 20_000)
ROWS = st.integers(1, 1024)
FULL = 512


@given(st.integers(1, 100_000))
def test_sizes_are_rounded_up_by_less_than_half(tokens: int) -> None:
    assert tokens <= step_size(tokens) < 1.5 * tokens


@given(st.integers(1, 20_000), st.integers(0, 300), st.integers(1, 2048))
def test_a_step_is_split_only_where_that_saves_tokens(tokens: int, others: int, spare: int) -> None:
    found = tokens_worth_a_step(tokens, others, spare)
    assert 1 <= found <= tokens
    if found < tokens:
        assert step_size(found) == found
        assert step_size(tokens) >= found + (tokens - found + others) * 9 // 8 + spare
        assert step_size(found + 1) == step_size(tokens)


def test_a_step_that_would_be_filled_up_by_half_is_split() -> None:
    assert tokens_worth_a_step(4096, 0, 256) == 4096
    assert tokens_worth_a_step(4097, 0, 256) == 4096
    assert tokens_worth_a_step(5000, 64, 256) == 4096
    assert tokens_worth_a_step(5900, 64, 256) == 5900
    assert tokens_worth_a_step(6200, 64, 256) == 6144
    assert tokens_worth_a_step(300, 0, 256) == 300


@pytest.mark.parametrize("rows", [1, 8, 31, 63, 64, 65, 100, 127, 128, 200, 255, 256])
@pytest.mark.parametrize("small", [256, 512, 1024])
def test_steps_have_sizes_that_get_a_graph_at_the_start(rows: int, small: int) -> None:
    room = ChunkLimit(small, FULL).tokens(4000, 1, rows)
    assert room is not None
    assert rows + room in first_graph_sizes(8192, chunks=True)
    assert rows + room in graph_sizes(8192)


@given(COUNT, COUNT)
def test_nobody_is_held_up_where_nobody_decodes(waiting: int, requests: int) -> None:
    assert ChunkLimit(1, FULL).tokens(waiting, requests, 0) is None


@given(st.integers(1, 512), COUNT, ROWS, ROWS)
def test_never_less_than_the_small_chunk_and_never_much_more_than_the_share(
    small: int, waiting: int, requests: int, decoding: int
) -> None:
    most = ChunkLimit(small, FULL).tokens(waiting, requests, decoding)
    share = waiting * requests / (requests + decoding)
    assert most is not None
    assert most >= max(small, share)
    assert most + decoding < 1.5 * (decoding + max(small, share + 1))


@given(st.integers(1, 64), st.integers(1, 5000), ROWS, ROWS)
def test_what_waits_is_computed_in_pieces_of_one_size(small: int, waiting: int, requests: int, decoding: int) -> None:
    limit, sizes, at_first = ChunkLimit(small, FULL), [], waiting
    while waiting:
        most = limit.tokens(waiting, min(requests, waiting), decoding)
        assert most is not None
        sizes.append(min(most, waiting))
        limit.took(sizes[-1])
        waiting -= sizes[-1]
    assert set(sizes[:-1]) <= {sizes[0]}
    assert sum(sizes) == at_first
    assert limit.tokens(0, 0, decoding) == step_size(decoding + small) - decoding


@given(st.lists(st.tuples(COUNT, ROWS, ROWS), max_size=20), ROWS)
def test_nothing_is_left_of_a_burst_once_nothing_waits(steps: list[tuple[int, int, int]], decoding: int) -> None:
    limit = ChunkLimit(16, FULL)
    for waiting, requests, rows in steps:
        limit.tokens(waiting, requests, rows)
    limit.tokens(0, 0, decoding)
    assert limit.tokens(0, 0, decoding) == ChunkLimit(16, FULL).tokens(0, 0, decoding)


def test_more_that_comes_makes_pieces_larger_and_less_does_not_make_them_smaller() -> None:
    limit = ChunkLimit(16, FULL)
    assert limit.tokens(1000, 10, 0) is None
    limit.took(600)
    assert limit.tokens(400, 4, 6) == step_size(6 + 1000) - 6
    assert limit.tokens(100_000, 100, 100) == step_size(100 + 50_000) - 100


@given(st.integers(1, 4096), COUNT, COUNT, st.integers(0, 1024), st.floats(1e-3, 10))
def test_in_a_backlog_a_step_is_full_and_no_larger_than_takes_the_free_rows(
    full: int, waiting: int, requests: int, decoding: int, behind: float
) -> None:
    small = full // 4 or 1
    most = ChunkLimit(small, full).tokens(waiting, requests, decoding, behind)
    assert most is not None
    assert most + decoding >= max(full, decoding + small)
    share = waiting * requests / max(1, requests + decoding)
    even = waiting / max(1, TAKING_STEPS * min(1, behind))
    assert most + decoding < 1.5 * max(full, decoding + small, decoding + min(share, even) + 1)


@given(COUNT, ROWS, ROWS)
def test_who_is_hardly_behind_changes_nothing_but_that_steps_are_full(
    waiting: int, requests: int, decoding: int
) -> None:
    none, hardly = (ChunkLimit(1, 1).tokens(waiting, requests, decoding, behind) for behind in (0.0, 1e-3))
    assert none == hardly


def test_a_burst_behind_a_backlog_begins_anew() -> None:
    limit = ChunkLimit(16, 64)
    limit.tokens(8192, 64, 0)
    assert limit.tokens(8192, 64, 0, behind=4.0) == 8192 // TAKING_STEPS
    limit.took(512)
    assert limit.tokens(100, 10, 90) == step_size(90 + 16) - 90
