from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from asyncllm.kernels import attention_plan, paged_attention
from tests.kernels.mutants import mutant
from tests.kernels.paged_case import Case, Modules, Prefix, check, make_step, tilings

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
    Case(dim=32, block_size=32, narrow=True, tilings=tilings(32, descriptors=True)),
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
    check(CASES[number], device, [torch.float32, torch.float16][number % 2])


@pytest.mark.full
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_type(case: Case, device: torch.device, dtype: torch.dtype) -> None:
    check(case, device, dtype)


@pytest.mark.full
@pytest.mark.parametrize("case", MORE, ids=str)
def test_more_shapes(case: Case, device: torch.device, dtype: torch.dtype) -> None:
    check(case, device, dtype)


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
    check(case, device, torch.float32, seed=seed)


def test_one_plan_serves_any_mix(device: torch.device) -> None:
    """As in a CUDA graph: the same launches, other sizes in device memory."""
    shape = attention_plan.AttentionShape(2, 1, 32, 16, None)
    plan = attention_plan.make_attention_plan(
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
        sequences = attention_plan.Sequences(starts, lengths, rows, step.num_sequences)
        attention_plan.plan_attention(plan, sequences, tokens=64)
        actual = paged_attention.paged_attention(query, step.cache, step.block_table, plan, scale=0.2)
        expected = paged_attention.paged_attention_reference(
            query, step.cache, step.block_table, shape, sequences, scale=0.2
        )
        torch.testing.assert_close(actual[: step.tokens], expected[: step.tokens], rtol=1e-5, atol=1e-5)


@pytest.mark.full
def test_plan_stays_in_its_memory(device: torch.device) -> None:
    """The worst steps that fit: units, and parts of split tiles, for which memory was set aside."""
    shape = attention_plan.AttentionShape(8, 2, 16, 16, None)
    small, large = tilings(16, share=5, least_blocks=1)
    mixes = [((9000, 1), (3, 1)), ((40, 40), (4000, 5)), tuple((500 + i, 5) for i in range(6)), ((64, 64),)]
    few_of_many = ((9000, 4), (9000, 4), (9000, 4), (300, 240))
    for mix, most in [*((mix, 8) for mix in mixes), (few_of_many, 256)]:
        tokens = sum(queries for _, queries in mix)
        plan = attention_plan.make_attention_plan(
            shape,
            torch.float32,
            device,
            max_tokens=tokens,
            max_sequences=most,
            tilings=(small, large),
            least_shared=None,
        )
        lengths, queries = torch.tensor(mix, dtype=torch.int32, device=device).T
        starts = torch.nn.functional.pad(queries.cumsum(0), (1, 0)).int()
        count = torch.tensor([len(mix)], dtype=torch.int32, device=device)
        starts, lengths = (torch.nn.functional.pad(x, (0, most - len(mix))) for x in (starts, lengths))
        sequences = attention_plan.Sequences(starts, lengths, torch.zeros_like(lengths), count)
        attention_plan.plan_attention(plan, sequences, tokens=tokens)
        for tiling, units, used in zip(
            (small, large), (plan.small_units, plan.large_units), plan.totals.tolist(), strict=True
        ):
            assert used <= len(units)
            fields = units[:used].tolist()
            heights = [unit[2] if tiling is small else tiling.rows for unit in fields]
            lines = [
                line
                for unit, height in zip(fields, heights, strict=True)
                if unit[7] > 1
                for line in range(unit[8] + unit[9] * unit[10], unit[8] + unit[9] * unit[10] + height)
            ]
            assert sorted(lines) == list(range(len(lines)))
            assert len(lines) * shape.kv_heads * shape.head_dim <= len(plan.partial)
            assert all(unit[14] * shape.kv_heads < len(plan.arrivals) for unit in fields)
        blocks = sum(unit[6] - unit[5] for unit in plan.small_units[: plan.totals[0]].tolist())
        assert blocks == sum(-(-length // 16) for length, each in mix if each * 4 <= 16)


FAULTS = [
    ("key > position - WINDOW", "key >= position - WINDOW"),
    ("visible = key <= position", "visible = key < position + 2"),
    ("tl.minimum(block + 1, block_end - 1) // cut", "tl.maximum(block, 0) // cut"),
    ("tl.maximum(tl.minimum(block, block_end - 1), 0)", "tl.maximum(block_end - 1, 0)"),
    ("block % cut * KEYS", "block % cut * 0"),
    ("(first_position + 1) // KEYS", "(first_position + KEYS) // KEYS"),
    ("tl.cdiv(tl.maximum(last_position - WINDOW + 1, 0), KEYS)", "tl.maximum(last_position - WINDOW, 0) // KEYS"),
    ("known = (part < splits + shared_parts)", "known = (part < splits - 1)"),
    ("arrived == splits + shared_parts - 1", "arrived == splits + shared_parts"),
    ("tl.fma(its_weight, factor, weight * decay)", "tl.fma(its_weight, 1.0, weight * decay)"),
    ("tl.fma(its_weight, factor, weight * decay)", "tl.fma(its_weight, factor, weight)"),
    ("summed * decay[:, None])", "summed)"),
    ("KEYS - key_end, 0)", "KEYS - key_end + 1, 0)"),
    ("keys - surplus >= block * KEYS", "keys >= surplus"),
    ("inside -= surplus", "inside -= surplus // 2"),
    ("block_end = tl.cdiv(before + last_row // GROUP + 1, KEYS)", "block_end = tl.cdiv(before + 1, KEYS)"),
    ("block_start + part * size", "block_start + part * (size + 1)"),
    ("before = my_context - my_packed // GROUP", "before = my_context - my_packed // GROUP - 1"),
    ("token = start + row // GROUP", "token = start + row // (GROUP + 1)"),
    ("q_head = head * GROUP + row % GROUP", "q_head = head + row % GROUP * KV_HEADS"),
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
    check(case, device, torch.float32)


@pytest.mark.parametrize(("right", "wrong"), FAULTS)
def test_planted_fault_is_caught(right: str, wrong: str, tmp_path: Path, device: torch.device) -> None:
    case = WINDOWED if "WINDOW" in right else LONG if "decay" in right else PLAIN
    check_fault(right, wrong, case, tmp_path, device)


SHARING = Case(
    q_heads=2,
    kv_heads=1,
    dim=16,
    sequences=((70, 1), (40, 10), (62, 1), (50, 1), (90, 1), (60, 1), (33, 1), (145, 1), (81, 1), (58, 1)),
    prefixes=(Prefix((0, 2, 4, 1, 8, 9), 2), Prefix((0, 2, 4, 8), 4), Prefix((3, 5), 2)),
    tilings=tilings(16, rows=16, share=3, least_blocks=1),
    least_shared=32,
)
# more sequences than a shared tile has room for; three query heads a KV head; a prefix of several parts
CROWDED = Case(
    q_heads=3,
    kv_heads=1,
    dim=16,
    sequences=tuple((100 + 7 * i, 1) for i in range(14)),
    prefixes=(Prefix(tuple(range(1, 14)), 5),),
    tilings=tilings(16, rows=16, share=7, least_blocks=1),
    least_shared=16,
    sinks=True,
)
BACKWARDS = replace(CROWDED, backwards=True)
# long prefixes of short sequences: the programs of the shared keys end last, on a GPU too, and merge
HEADED = replace(
    BACKWARDS,
    sequences=tuple((500 + 3 * i, 1) for i in range(14)),
    prefixes=(Prefix(tuple(range(1, 14)), 30),),
    tilings=tilings(16, rows=16, share=30, least_blocks=1),
)
# short prefixes of long sequences: the programs of their own keys end last, on a GPU too, and merge
TAILED = replace(
    SHARING,
    sequences=tuple((900 + 20 * i, 1) for i in range(4)),
    prefixes=(Prefix((0, 1, 2, 3), 2),),
)


@pytest.mark.parametrize(
    "case", [SHARING, CROWDED, BACKWARDS, HEADED, TAILED], ids=["sharing", "crowded", "backwards", "headed", "tailed"]
)
def test_common_prefixes_are_attended_once(case: Case, device: torch.device) -> None:
    check(case, device, torch.float32)


def test_whoever_merges_gives_the_same_bits(device: torch.device) -> None:
    """The last program of each sequence's own keys, or that of the keys it shares."""
    assert torch.equal(check(CROWDED, device, torch.float32), check(BACKWARDS, device, torch.float32))


def test_steps_of_many_tokens_have_a_small_tiling_of_their_own(device: torch.device) -> None:
    case = Case(
        dim=128,
        block_size=64,
        sequences=((130, 1), (64, 60), (200, 1), (150, 1), (70, 1), (1, 1)),
        prefixes=(Prefix((0, 2, 3), 2),),
        least_shared=64,
    )
    check(case, device, torch.float16)
    shape = attention_plan.AttentionShape(case.q_heads, case.kv_heads, case.dim, case.block_size, None)
    plan = attention_plan.make_attention_plan(shape, torch.float16, device, max_tokens=256, max_sequences=8)
    few, many = plan.small_of(63), plan.small_of(64)
    assert (few.keys, few.warps, many.keys, many.warps) == (64, 4, 64, 2)
    assert few.rows == many.rows
    exact = attention_plan.make_attention_plan(shape, torch.float32, device, max_tokens=256, max_sequences=8)
    assert exact.small_of(64) is exact.small
    same = attention_plan.make_attention_plan(
        shape, torch.float16, device, max_tokens=256, max_sequences=8, deterministic=True
    )
    assert same.small_of(64).rows == 0


@pytest.mark.parametrize("count", [1, 2, 5, 7, 12, 15, 16])
def test_parts_of_few_long_rows_all_run_at_once(count: int, device: torch.device) -> None:
    """With the tilings of an H200: two programs on each of 132 multiprocessors, for 8 heads; from 16 rows on, more."""
    shape = attention_plan.AttentionShape(16, 8, 128, 64, None)
    both = attention_plan.default_tilings(shape, torch.float16, multiprocessors=132, descriptors=True)
    plan = attention_plan.make_attention_plan(
        shape, torch.float16, device, max_tokens=count, max_sequences=32, tilings=both
    )
    numbers = torch.arange(count + 1, dtype=torch.int32, device=device)
    lengths = torch.full_like(numbers, 20_000)
    sequences = attention_plan.Sequences(numbers, lengths, numbers, torch.full_like(numbers[:1], count))
    attention_plan.plan_attention(plan, sequences, tokens=count)
    assert (16 < int(plan.totals[0]) <= 32) == (count < 16)


def shared_prefixes(
    tables: list[list[int]], lengths: list[int], device: torch.device, *, queries: list[int] | None = None
) -> list[int]:
    """How many blocks of 16 tokens of each sequence are attended in shared tiles, where two or more are worth it."""
    count, queries = len(lengths), queries or [1] * len(lengths)
    shape = attention_plan.AttentionShape(2, 1, 16, 16, None)
    plan = attention_plan.make_attention_plan(
        shape, torch.float32, device, max_tokens=sum(queries), max_sequences=count + 1, least_shared=32,
        tilings=tilings(16),
    )  # fmt: skip
    starts, lens, table = (
        torch.tensor(each, dtype=torch.int32, device=device)
        for each in ([0, *torch.tensor(queries).cumsum(0).tolist(), 0], [*lengths, 0], tables)
    )
    rows = torch.arange(count + 1, dtype=torch.int32, device=device)
    sequences = attention_plan.Sequences(starts, lens, rows, torch.full_like(rows[:1], count))
    attention_plan.plan_attention(plan, sequences, tokens=sum(queries), block_table=table)
    read = [0] * count
    for unit in plan.small_units[: plan.totals[0]].tolist():
        if unit[15]:
            for member in plan.members[unit[1] : unit[1] + unit[2] // 2].tolist():
                read[member[3]] += unit[6] - unit[5]
    return read


def test_what_is_shared(device: torch.device) -> None:
    """The first two blocks decide who may share; then the length that saves most."""
    assert shared_prefixes([[1, 2, 3, 4], [1, 2, 3, 5], [9, 8, 7, 6]], [60, 60, 60], device) == [3, 3, 0]
    # not the block that a sequence writes to, even where it is the same
    assert shared_prefixes([[1, 2, 3, 4], [1, 2, 3, 4]], [64, 50], device) == [3, 3]
    assert shared_prefixes([[1, 2, 3, 4], [1, 2, 3, 4]], [64, 33], device) == [2, 2]
    assert shared_prefixes([[1, 2, 3, 4], [1, 2, 3, 4]], [64, 32], device) == [0, 0]
    # a block in common is not a prefix in common
    assert shared_prefixes([[1, 2, 3, 4], [5, 2, 3, 6]], [60, 60], device) == [0, 0]
    assert shared_prefixes([[1, 2, 3, 4], [1, 5, 3, 6]], [60, 60], device) == [0, 0]
    # two share four blocks, three more only two: 4 · 2 blocks are more than 1 · 4; and the other way round
    many = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 2, 7, 0, 0], [1, 2, 8, 0, 0], [1, 2, 9, 0, 0]]
    assert shared_prefixes(many, [80] * 5, device) == [2] * 5
    assert shared_prefixes(many[:3], [80, 80, 45], device) == [4, 4, 0]
    # several tokens of one sequence see different keys
    assert shared_prefixes([[1, 2, 3]] * 3, [40] * 3, device, queries=[1, 2, 1]) == [2, 0, 2]
    groups = [[1, 2, 3], [4, 5, 6], [1, 2, 7], [4, 5, 8], [4, 5, 9], [1, 2, 10]]
    assert shared_prefixes(groups, [48] * 6, device) == [2] * 6


@pytest.mark.full
@pytest.mark.parametrize("seed", range(4))
def test_shared_plan_stays_in_its_memory(seed: int, device: torch.device) -> None:
    """With the tilings of an H200: all of each sequence's blocks, once, and a line of its own for every part."""
    generator = torch.Generator().manual_seed(seed)
    count, blocks, group = [12, 64, 100, 64][seed], 40, [1, 4, 2, 16][seed]
    shape = attention_plan.AttentionShape(8 * group, 8, 128, 64, None)
    both = attention_plan.default_tilings(shape, torch.float16, multiprocessors=132, descriptors=True)
    plan = attention_plan.make_attention_plan(
        shape, torch.float16, device, max_tokens=count, max_sequences=count, tilings=both
    )
    lengths = torch.randint(1, 64 * blocks, (count,), generator=generator)
    table = torch.arange(1, count * blocks + 1).view(count, blocks)
    half = count // 2
    table[:half, :23] = table[0, :23]
    table[half:, :5] = table[half, :5]
    lengths[:3] = lengths[half : half + 3] = 64 * blocks - 1
    starts, lengths, rows, table = (
        x.to(device, torch.int32) for x in (torch.arange(count + 1), lengths, torch.arange(count), table)
    )
    sequences = attention_plan.Sequences(starts, lengths, rows, torch.full_like(rows[:1], count))
    attention_plan.plan_attention(plan, sequences, tokens=count, block_table=table)
    keys = plan.small_of(count).keys
    assert int(plan.totals[0]) <= plan.units(plan.small_of(count), count) <= len(plan.small_units)
    seen: list[set[int]] = [set() for _ in range(count)]
    lines: list[int] = []
    for unit in plan.small_units[: int(plan.totals[0])].tolist():
        part, height = set(range(unit[5], unit[6])), unit[2]
        whose = [unit[1]]
        if unit[15]:
            whose = [member[3] for member in plan.members[unit[1] : unit[1] + height // group].tolist()]
            first = unit[12] + unit[9] * height
        else:
            first = unit[8] + unit[9] * unit[10]
        if unit[15] or unit[7] + unit[11] > 1:
            lines += range(first, first + height)
        for sequence in whose:
            assert not seen[sequence] & part
            seen[sequence] |= part
    assert [len(each) for each in seen] == [-(-length // keys) for length in lengths.tolist()]
    assert any(unit[15] for unit in plan.small_units[: int(plan.totals[0])].tolist())
    assert len(set(lines)) == len(lines)
    assert (max(lines) + 1) * shape.kv_heads * 128 <= len(plan.partial)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(8))
def test_random_prefixes(seed: int, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(100 + seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=generator))

    count = draw(2, 20)
    prefixes = tuple(
        Prefix(tuple(sorted({draw(0, count - 1) for _ in range(draw(2, count))})), blocks) for blocks in (2, 4)
    )
    case = Case(
        q_heads=(group := draw(1, 5)) * 2,
        dim=16,
        sequences=tuple((draw(65, 200), 1 if draw(0, 5) else draw(1, 12)) for _ in range(count)),
        prefixes=prefixes,
        tilings=tilings([16, 32][draw(0, 1)], share=draw(2, 12), least_blocks=draw(1, 2)),
        sinks=bool(draw(0, 1)),
        least_shared=[16, 32, 64][group % 3],
    )
    check(case, device, torch.float32, seed=seed)


SHARING_FAULTS = [
    ("shared_line = tile_line + mate * GROUP", "shared_line = tile_line"),
    ("whole = (contexts - 1) // BLOCK_SIZE", "whole = (contexts + 14) // BLOCK_SIZE"),
    ("splits, shared_line + line, packed, shared_parts", "splits, shared_line + line % GROUP, packed, shared_parts"),
    ("is_last = (mate < mates) & (arrived == missing)", "is_last = (mate < mates - 1) & (arrived == missing)"),
    ("block_start = tl.zeros_like(block_end) + my_shared", "block_start = tl.zeros_like(block_end)"),
    ("tl.where(ours == theirs, common, i)", "tl.where(ours == theirs, common, i + 1)"),
    ("(common >= length), length, 0)", "(common > 0), length, 0)"),
    ("tile_place = my_place - mate", "tile_place = my_place - my_rank"),
    ("before = (leader[:, None] < leaders[None, :]) | (", "before = (leader[:, None] > leaders[None, :]) & ("),
    ("shared_line + (part - splits)", "shared_line + part"),
    ("(mate[None, :] == line[:, None] // GROUP)", "(mate[None, :] <= line[:, None] // GROUP)"),
    ("tl.load(member + 1, mask=ready, other=0) + line % GROUP", "tl.load(member + 1, mask=ready, other=0)"),
    ("(start + row // GROUP) * MEMBER_FIELDS", "(start + row // (GROUP + 1)) * MEMBER_FIELDS"),
]  # fmt: skip


MORE_SHARING_FAULTS = [pytest.param(*fault, marks=pytest.mark.full) for fault in SHARING_FAULTS[4:]]


@pytest.mark.parametrize(("right", "wrong"), [*SHARING_FAULTS[:4], *MORE_SHARING_FAULTS])
def test_planted_fault_of_sharing_is_caught(right: str, wrong: str, tmp_path: Path, device: torch.device) -> None:
    case = SHARING
    if any(word in right for word in ("is_last", "+ line, packed", "mate[None", "mask=ready")):
        case = HEADED
    elif "mate * GROUP" in right:
        case = TAILED
    elif "tile_" in right or "splits" in right:
        case = CROWDED
    check_fault(right, wrong, case, tmp_path, device)


def check_fault(right: str, wrong: str, case: Case, folder: Path, device: torch.device) -> None:
    """Whichever module has it."""
    assert attention_plan.__file__ is not None
    planned = right in Path(attention_plan.__file__).read_text()
    with mutant(attention_plan if planned else paged_attention, folder, right, wrong) as module:
        modules = Modules(plan=module) if planned else Modules(attention=module)
        with pytest.raises(AssertionError):
            check(case, device, torch.float32, modules=modules)
