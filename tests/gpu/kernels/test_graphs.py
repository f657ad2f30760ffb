"""Kernels replayed from CUDA graphs, on steps other than the one that was captured."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from asyncllm.kernels import attention_plan, paged_attention, sampling
from asyncllm.kernels.sampled_rows import LogitRows
from tests.kernels.paged_case import Case, Prefix, Step, make_step
from tests.kernels.sampled_cases import VOCABULARY, make_logits, make_settings
from tests.kernels.test_sampling import SETTINGS

DEVICE = torch.device("cuda")
TOKENS, SEQUENCES, BLOCKS, WIDTH = 160, 12, 128, 8
LATER = tuple((300 + 10 * i, 1) for i in range(12))
MIXES: list[tuple[tuple[tuple[int, int], ...], tuple[Prefix, ...]]] = [
    (((300, 1), (17, 1), (129, 1)), ()),
    (((128, 128),), ()),
    (((200, 100), (64, 1), (33, 33), (1, 1)), ()),
    (((500, 1),), ()),
    (tuple((10 * i + 1, 1) for i in range(12)), ()),
    (LATER, (Prefix((0, 2, 3, 5, 6, 7, 8, 9, 10, 11), 4), Prefix((9, 10), 5))),
    (LATER[:4], (Prefix((0, 3), 4), Prefix((1, 2), 4))),
]


@pytest.fixture(autouse=True)
def _nothing_waits_for_the_host() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("window", [None, 50])
def test_one_attention_graph_replays_any_mix(window: int | None) -> None:
    case = Case(dim=128, block_size=64, window=window)
    shape = attention_plan.AttentionShape(case.q_heads, case.kv_heads, case.dim, case.block_size, window)
    plan = attention_plan.make_attention_plan(shape, torch.bfloat16, DEVICE, max_tokens=TOKENS, max_sequences=SEQUENCES)
    query = torch.zeros((TOKENS, case.q_heads, case.dim), dtype=torch.bfloat16, device=DEVICE)
    cache = torch.zeros((2, BLOCKS, case.kv_heads, 64, case.dim), dtype=torch.bfloat16, device=DEVICE)
    table = torch.zeros((SEQUENCES + 4, WIDTH + 1), dtype=torch.int32, device=DEVICE)
    numbers = [torch.zeros(size, dtype=torch.int32, device=DEVICE) for size in (SEQUENCES + 1, SEQUENCES, SEQUENCES, 1)]
    sequences = attention_plan.Sequences(*numbers)

    def launch() -> torch.Tensor:
        attention_plan.plan_attention(plan, sequences, tokens=TOKENS, block_table=table)
        return paged_attention.paged_attention(query, cache, table, plan, scale=0.1)

    def load(step: Step) -> None:
        query[: len(step.query)].copy_(step.query)
        cache[:, : step.cache.shape[1]].copy_(step.cache)
        table[: step.block_table.shape[0], : step.block_table.shape[1]].copy_(step.block_table)
        for target, source in zip(
            numbers, (step.query_starts, step.context_lens, step.rows, step.num_sequences), strict=True
        ):
            count = min(len(target), len(source))
            target[:count].copy_(source[:count])

    load(make_step(Case(dim=128, block_size=64, window=window, sequences=((40, 1),)), DEVICE, torch.bfloat16))
    launch()  # compile
    graph = torch.cuda.CUDAGraph()
    torch.cuda.set_sync_debug_mode("error")
    with torch.cuda.graph(graph):
        output = launch()
    torch.cuda.set_sync_debug_mode("default")
    for seed, (mix, prefixes) in enumerate(MIXES):
        case = Case(dim=128, block_size=64, window=window, sequences=mix, prefixes=prefixes)
        step = make_step(case, DEVICE, torch.bfloat16, seed=seed)
        load(step)
        graph.replay()
        first = output[: step.tokens].clone()
        graph.replay()
        assert torch.equal(first, output[: step.tokens])
        expected = paged_attention.paged_attention_reference(query, cache, table, shape, sequences, scale=0.1)
        torch.testing.assert_close(first, expected[: step.tokens], rtol=2e-2, atol=2e-2)


def test_sampling_graph_waits_for_nothing() -> None:
    count = len(SETTINGS)
    logits = make_logits(count, torch.float32, seed=8).to(DEVICE)
    settings = make_settings(SETTINGS, list(range(count)), DEVICE)
    workspace = sampling.make_sampling_workspace(count, VOCABULARY, DEVICE)
    rows = torch.arange(count, dtype=torch.int32, device=DEVICE)
    positions, tokens = torch.zeros_like(rows), torch.zeros_like(rows)
    where = LogitRows(rows, positions, torch.tensor([count], dtype=torch.int32, device=DEVICE), VOCABULARY)

    def launch() -> None:
        sampling.sample(logits, where, settings, workspace, token_ids=tokens, row_token_ids=torch.empty_like(tokens))

    launch()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.set_sync_debug_mode("error")
    with torch.cuda.graph(graph):
        launch()
    torch.cuda.set_sync_debug_mode("default")
    for position in (1, 50):
        positions.fill_(position)
        graph.replay()
        expected = sampling.sample_reference(logits, where, settings)
        assert tokens.tolist() == expected.tolist()


@pytest.mark.parametrize("count", [40, 64])
def test_common_prefixes_of_many_rows(count: int) -> None:
    """Whichever program merges a row: those of its own keys end before those of the keys it shares, or after."""
    case = Case(
        q_heads=32,
        kv_heads=8,
        dim=128,
        block_size=64,
        sequences=tuple((1600 + 17 * i % 900, 1) for i in range(count)),
        prefixes=(Prefix(tuple(range(3, count)), 20), Prefix((0, 1), 6)),
    )
    step = make_step(case, DEVICE, torch.bfloat16)
    shape = attention_plan.AttentionShape(32, 8, 128, 64, None)
    sequences = attention_plan.Sequences(step.query_starts, step.context_lens, step.rows, step.num_sequences)
    plan = attention_plan.make_attention_plan(
        shape, torch.bfloat16, DEVICE, max_tokens=len(step.query), max_sequences=count
    )
    attention_plan.plan_attention(plan, sequences, tokens=len(step.query), block_table=step.block_table)
    units = plan.small_units[: int(plan.totals[0])]
    assert int(units[:, 15].sum()) >= 5
    expected = paged_attention.paged_attention_reference(
        step.query.float(), step.cache.float(), step.block_table, shape, sequences, scale=0.1
    )
    first = None
    for i in range(20):  # a race would show
        if i % 5 == 0:
            units.copy_(units.flip(0))
        output = paged_attention.paged_attention(
            step.query, step.cache, step.block_table, plan, scale=0.1, chunks=False
        )[: step.tokens]
        error = (output.float() - expected[: step.tokens]).norm() / expected[: step.tokens].norm()
        assert error < 8e-3
        first = output if first is None else first
        assert torch.equal(output, first)


@pytest.mark.parametrize("window", [None, 100])
def test_deterministic_attention_depends_on_the_row_alone(window: int | None) -> None:
    """Computed at once, in pieces and token by token, alone and beside others: the same bits."""
    shape = attention_plan.AttentionShape(8, 2, 128, 64, window)
    length, generator = 700, torch.Generator().manual_seed(0)
    query = torch.randn((length, 8, 128), generator=generator).to(DEVICE, torch.bfloat16)
    cache = torch.randn((2, 40, 2, 64, 128), generator=generator).to(DEVICE, torch.bfloat16)
    table = torch.stack([torch.randperm(39, generator=generator)[:13] + 1 for _ in range(6)]).to(DEVICE, torch.int32)
    plan = attention_plan.make_attention_plan(
        shape, torch.bfloat16, DEVICE, max_tokens=2000, max_sequences=8, deterministic=True
    )

    def attend(pieces: list[tuple[int, int, int]]) -> list[torch.Tensor]:
        """Each piece: its row, and its positions from where to where."""
        counts = [end - start for _, start, end in pieces]
        numbers = ([0, *torch.tensor(counts).cumsum(0).tolist()], [end for _, _, end in pieces], [p[0] for p in pieces])
        starts, ends, rows = (torch.tensor(each, dtype=torch.int32, device=DEVICE) for each in numbers)
        sequences = attention_plan.Sequences(starts, ends, rows, torch.full_like(rows[:1], len(pieces)))
        attention_plan.plan_attention(plan, sequences, tokens=sum(counts), block_table=table)
        queries = torch.cat([query[start:end] for _, start, end in pieces])
        chunks = any(count > 1 for count in counts)
        output = paged_attention.paged_attention(queries, cache, table, plan, scale=0.09, chunks=chunks)
        return list(output.split(counts))

    (whole,) = attend([(2, 0, length)])
    halves = [attend([(2, 0, 333), (4, 0, 650)])[0], attend([(1, 5, 6), (2, 333, length)])[1]]
    assert torch.equal(torch.cat(halves), whole)
    for position in (0, 1, 63, 64, 100, 332, 333, 500, 699):
        assert torch.equal(attend([(2, position, position + 1)])[0][0], whole[position])
        beside = attend([(0, 600, 601), (2, position, position + 1), (2, 640, 641), (5, 30, 31)])
        assert torch.equal(beside[1][0], whole[position])


@pytest.mark.parametrize("length", [5000, 33_000])
def test_long_contexts_are_split_and_merged(length: int) -> None:
    shape = attention_plan.AttentionShape(8, 2, 128, 64, None)
    step = make_step(
        Case(q_heads=8, dim=128, block_size=64, sequences=((length, 1), (length - 7, 40))), DEVICE, torch.bfloat16
    )
    sequences = attention_plan.Sequences(step.query_starts, step.context_lens, step.rows, step.num_sequences)
    plan = attention_plan.make_attention_plan(
        shape, torch.bfloat16, DEVICE, max_tokens=len(step.query), max_sequences=4
    )
    attention_plan.plan_attention(plan, sequences, tokens=len(step.query))
    parts = plan.small_units[: int(plan.totals[0]), 7]
    assert int(parts.max()) > 10
    for _ in range(20):  # a race would show
        output = paged_attention.paged_attention(step.query, step.cache, step.block_table, plan, scale=0.1)
        expected = paged_attention.paged_attention_reference(
            step.query.float(), step.cache.float(), step.block_table, shape, sequences, scale=0.1
        )
        error = (output[: step.tokens].float() - expected[: step.tokens]).norm() / expected[: step.tokens].norm()
        assert error < 8e-3
