from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from asyncllm.kernels import paged_attention
from tests.kernels.mutants import mutant
from tests.kernels.paged_case import Case, check, make_step, tilings

DECODE = ((1, 1), (16, 1), (130, 1), (47, 1))
# a tile of so many parts that they are merged a few at a time
LONG = Case(
    q_heads=16, kv_heads=1, dim=128, sequences=((250, 1), (3, 1)), tilings=tilings(16, share=15, least_blocks=1)
)
CASES = [
    Case(tilings=tilings(16)),
    Case(dim=80, block_size=64, tilings=tilings(32, descriptors=True), sinks=True),
    Case(q_heads=7, kv_heads=1, dim=32, block_size=32, window=20, tilings=tilings(32, descriptors=True)),
    Case(q_heads=2, kv_heads=2, dim=16, block_size=16, window=33, soft_cap=3.0, sinks=True, tilings=tilings(32)),
    LONG,
    Case(q_heads=3, kv_heads=1, dim=96, block_size=128, soft_cap=20.0, sequences=DECODE, tilings=tilings(32, share=3)),
]
MORE = [
    Case(dim=dim, block_size=block_size, window=window, sequences=((300, 1), (77, 77), (200, 60), (129, 2)))
    for dim, block_size, window in [
        (64, 16, None), (80, 64, None), (96, 32, 100), (128, 64, None), (128, 128, 64), (128, 16, 1), (256, 64, 130),
    ]
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(CASES)))
def test_equals_reference(number: int, device: torch.device) -> None:
    check(paged_attention, CASES[number], device, [torch.float32, torch.float16][number % 2])


@pytest.mark.full
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_type(case: Case, device: torch.device, dtype: torch.dtype) -> None:
    check(paged_attention, case, device, dtype)


@pytest.mark.full
@pytest.mark.parametrize("case", MORE, ids=str)
def test_more_shapes(case: Case, device: torch.device, dtype: torch.dtype) -> None:
    check(paged_attention, case, device, dtype)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(10))
def test_random_steps(seed: int, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=generator))

    kv_heads, keys = draw(1, 3), [16, 32][draw(0, 1)]
    case = Case(
        q_heads=kv_heads * draw(1, 6),
        kv_heads=kv_heads,
        dim=8 * draw(2, 5),
        block_size=[16, 32, 64][draw(0, 2)],
        window=draw(1, 80) if draw(0, 1) else None,
        sinks=bool(draw(0, 1)),
        sequences=tuple((length, min(length, draw(1, 40))) for length in (draw(1, 150) for _ in range(5))),
        tilings=tilings(keys, share=draw(1, 9), least_blocks=draw(1, 3)),
    )
    check(paged_attention, case, device, torch.float32, seed=seed)


def test_one_plan_serves_any_mix(device: torch.device) -> None:
    """As in a CUDA graph: the same launches, other sizes in device memory."""
    shape = paged_attention.AttentionShape(2, 1, 32, 16, None)
    plan = paged_attention.make_attention_plan(
        shape, torch.float32, device, max_tokens=64, max_sequences=4, tilings=tilings(16, share=4)
    )
    for mix in [((40, 1), (90, 1)), ((50, 50),), ((1, 1), (60, 20), (33, 3))]:
        step = make_step(Case(q_heads=2, kv_heads=1, dim=32, sequences=mix), device, torch.float32)
        query = torch.zeros((64, 2, 32), device=device)
        query[: step.tokens] = step.query[: step.tokens]
        missing = max(0, 5 - len(step.rows))
        starts, lengths, rows = (
            torch.nn.functional.pad(x, (0, missing)) for x in (step.query_starts, step.context_lens, step.rows)
        )
        sequences = paged_attention.Sequences(starts, lengths, rows, step.num_sequences)
        paged_attention.plan_attention(plan, sequences, tokens=64)
        actual = paged_attention.paged_attention(query, step.cache, step.block_table, plan, scale=0.2)
        expected = paged_attention.paged_attention_reference(
            query, step.cache, step.block_table, shape, sequences, scale=0.2
        )
        torch.testing.assert_close(actual[: step.tokens], expected[: step.tokens], rtol=1e-5, atol=1e-5)


def test_plan_stays_in_its_memory(device: torch.device) -> None:
    """The worst steps that fit: units, and parts of split tiles, for which memory was set aside."""
    shape = paged_attention.AttentionShape(8, 2, 16, 16, None)
    small, large = tilings(16, share=5, least_blocks=1)
    mixes = [((9000, 1), (3, 1)), ((40, 40), (4000, 5)), tuple((500 + i, 5) for i in range(6)), ((64, 64),)]
    for mix in mixes:
        tokens = sum(queries for _, queries in mix)
        plan = paged_attention.make_attention_plan(
            shape, torch.float32, device, max_tokens=tokens, max_sequences=8, tilings=(small, large)
        )
        lengths, queries = torch.tensor(mix, dtype=torch.int32, device=device).T
        starts = torch.nn.functional.pad(queries.cumsum(0), (1, 0)).int()
        count = torch.tensor([len(mix)], dtype=torch.int32, device=device)
        starts, lengths = (torch.nn.functional.pad(x, (0, 8 - len(mix))) for x in (starts, lengths))
        sequences = paged_attention.Sequences(starts, lengths, torch.zeros_like(lengths), count)
        paged_attention.plan_attention(plan, sequences, tokens=tokens)
        for tiling, units, used in zip(
            (small, large), (plan.small_units, plan.large_units), plan.totals.tolist(), strict=True
        ):
            assert used <= len(units)
            fields = units[:used].tolist()
            slots = [(unit[8] + unit[9]) for unit in fields if unit[7] > 1]
            assert sorted(slots) == list(range(len(slots)))
            assert len(slots) <= 2 * tiling.most_parts
        blocks = sum(unit[6] - unit[5] for unit in plan.small_units[: plan.totals[0]].tolist())
        assert blocks == sum(-(-length // 16) for length, each in mix if each * 4 <= 16)


FAULTS = [
    ("keys[None, :] > positions[:, None] - WINDOW", "keys[None, :] >= positions[:, None] - WINDOW"),
    ("keys[None, :] <= positions[:, None]", "keys[None, :] < positions[:, None] + 2"),
    ("tl.minimum(block + 1, block_end - 1) // cut", "tl.maximum(block, 0) // cut"),
    ("block % cut * KEYS", "block % cut * 0"),
    ("(first_position + 1) // KEYS", "(first_position + KEYS) // KEYS"),
    ("tl.cdiv(tl.maximum(last_position - WINDOW + 1, 0), KEYS)", "tl.maximum(last_position - WINDOW, 0) // KEYS"),
    ("known = (parts < splits)[:, None]", "known = (parts < splits - 1)[:, None]"),
    ("arrived == splits - 1", "arrived == splits"),
    ("tl.sum(weights * factors, axis=0)", "tl.sum(weights, axis=0)"),
    ("weight = weight * decay + tl.sum(w", "weight += tl.sum(w"),
    ("block_end = tl.cdiv(before + last_row // GROUP + 1, KEYS)", "block_end = tl.cdiv(before + 1, KEYS)"),
    ("block_start + part * size", "block_start + part * (size + 1)"),
    ("before = my_context - my_packed // GROUP", "before = my_context - my_packed // GROUP - 1"),
    ("head * GROUP + row % GROUP) * DIM", "head + row % GROUP * KV_HEADS) * DIM"),
]  # fmt: skip


PLAIN = Case(
    dim=16,
    block_size=32,
    sequences=((120, 1), (25, 10), (60, 9)),
    tilings=tilings(16, rows=16, share=6, least_blocks=3, descriptors=True),
)
WINDOWED = replace(PLAIN, window=21)


@pytest.mark.parametrize("case", [PLAIN, WINDOWED, LONG], ids=["plain", "windowed", "long"])
def test_case_of_the_planted_faults(case: Case, device: torch.device) -> None:
    check(paged_attention, case, device, torch.float32)


@pytest.mark.parametrize(("right", "wrong"), FAULTS)
def test_planted_fault_is_caught(right: str, wrong: str, tmp_path: Path, device: torch.device) -> None:
    case = WINDOWED if "WINDOW" in right else LONG if "decay" in right else PLAIN
    with mutant(paged_attention, tmp_path, right, wrong) as module, pytest.raises(AssertionError):
        check(module, case, device, torch.float32)
