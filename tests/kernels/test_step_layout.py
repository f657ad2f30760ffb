from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncllm.kernels import step_layout
from asyncllm.kernels.row_join import JOIN_SETTINGS, RECORD_WORDS
from asyncllm.kernels.step_layout import NUM_TOKENS, StepWords, lay_out_step, make_step_arrays
from tests.kernels.mutants import mutant

WORDS = StepWords(rows=40, edits=1100, tokens=3000)
GROUPS, BLOCKS, TURN = 2, 30, 2


def make_step(
    decode: list[int], chunks: list[tuple[int, int, int, bool]], edits: int, joins: Sequence[int] = ()
) -> torch.Tensor:
    """A ring whose line `TURN` holds a step; chunks are (row, start, count, samples), and joins rows."""
    ring = torch.full((4, WORDS.size), -7, dtype=torch.int32)
    step = ring[TURN]
    counts = [count for _, _, count, _ in chunks]
    sampling = [samples for *_, samples in chunks]
    tokens, samples = len(decode) + sum(counts), len(decode) + sum(sampling)
    header = [len(decode), len(chunks), tokens, samples, edits, tokens + 5, min(samples + 3, WORDS.rows), len(joins)]
    step[: len(header)] = torch.tensor(header)
    records = step[WORDS.joins :][: WORDS.rows * RECORD_WORDS].view(-1, RECORD_WORDS)
    for record, row in zip(records, joins, strict=False):
        record[:] = torch.randint(-(2**31), 2**31, (RECORD_WORDS,))
        record[7], record[10] = 0, row
    step[WORDS.decode_rows :][: len(decode)] = torch.tensor(decode)
    for i, (row, start, _, samples_) in enumerate(chunks):
        step[WORDS.chunk_rows + i], step[WORDS.chunk_starts + i] = row, start
        step[WORDS.chunk_samples + i] = int(samples_)
        step[WORDS.chunk_places + i] = len(decode) + sum(sampling[:i])
    firsts = [len(decode) + sum(counts[:i]) for i in range(len(chunks) + 1)]
    step[WORDS.chunk_firsts :][: len(firsts)] = torch.tensor(firsts)
    entries = torch.randperm(GROUPS * WORDS.rows * BLOCKS)[:edits]
    step[WORDS.edit_entries :][:edits] = entries.int()
    step[WORDS.edit_blocks :][:edits] = torch.arange(500, 500 + edits)
    step[WORDS.chunk_tokens :][: sum(counts)] = torch.arange(1000, 1000 + sum(counts))
    return ring


def everything(module: Any, ring: torch.Tensor, device: torch.device, *, reference: bool) -> list[torch.Tensor]:
    """All that a step changes."""
    arrays = make_step_arrays(WORDS, WORDS.rows + WORDS.tokens + 8, device)
    tables = torch.zeros((GROUPS, WORDS.rows, BLOCKS), dtype=torch.int32, device=device)
    positions = torch.arange(100, 100 + WORDS.rows, dtype=torch.int32, device=device)
    last_tokens = torch.arange(200, 200 + WORDS.rows, dtype=torch.int32, device=device)
    turn = torch.tensor([TURN], dtype=torch.int32, device=device)
    settings = torch.full((len(JOIN_SETTINGS), WORDS.rows), -1, dtype=torch.int32, device=device)
    seeds = torch.full((WORDS.rows,), -1, dtype=torch.int64, device=device)
    state = {"tables": tables, "next_positions": positions, "last_tokens": last_tokens}
    state |= {"settings": settings, "seeds": seeds}
    for array in _tensors(arrays):
        array.fill_(-3)
    if reference:
        module.lay_out_step_reference(ring, turn, WORDS, arrays, **state)
    else:
        # as many programs for chunks as a step has tokens, where these are few
        chunks = min(WORDS.rows, max(1, int(ring[TURN, NUM_TOKENS])))
        module.lay_out_step(ring.to(device), turn, WORDS, arrays, **state, chunks=chunks)
    return [*_tensors(arrays), *state.values()]


def _tensors(arrays: step_layout.StepArrays) -> list[torch.Tensor]:
    values = [getattr(arrays, field.name) for field in dataclasses.fields(arrays)]
    values += [getattr(arrays.sequences, field.name) for field in dataclasses.fields(arrays.sequences)]
    return [value for value in values if isinstance(value, torch.Tensor)]


STEPS = {
    "decode": ([3, 0, 39, 7], [], 0),
    "chunks": ([], [(5, 0, 1, True), (6, 64, 1500, False), (0, 7, 1025, True)], 1100),
    "mixed": ([9, 2], [(5, 0, 1, False), (6, 64, 30, True)], 3),
    "every row": (list(range(40)), [], 40),
    "one": ([], [(39, 0, 1, True)], 1),
    "joins": ([9], [(5, 0, 3, True), (6, 0, 30, False)], 3, [6, 5]),
    "further choices join": ([], [(5, 0, 2, True)], 3, [5, 1, 39, 0, 7]),
}


@pytest.mark.parametrize("name", STEPS)
def test_equals_reference(name: str, device: torch.device) -> None:
    torch.manual_seed(0)
    ring = make_step(*STEPS[name])
    mine = everything(step_layout, ring, device, reference=False)
    theirs = everything(step_layout, ring, device, reference=True)
    for i, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        assert torch.equal(a, b), i


def test_needs_no_chunk_programs_without_chunks(device: torch.device) -> None:
    ring = make_step(*STEPS["decode"])
    arrays = make_step_arrays(WORDS, 64, device)
    lay_out_step(
        ring.to(device),
        torch.tensor([TURN], dtype=torch.int32, device=device),
        WORDS,
        arrays,
        tables=torch.zeros((GROUPS, WORDS.rows, BLOCKS), dtype=torch.int32, device=device),
        next_positions=torch.zeros(WORDS.rows, dtype=torch.int32, device=device),
        last_tokens=torch.zeros(WORDS.rows, dtype=torch.int32, device=device),
        settings=torch.zeros((len(JOIN_SETTINGS), WORDS.rows), dtype=torch.int32, device=device),
        seeds=torch.zeros(WORDS.rows, dtype=torch.int64, device=device),
        chunks=0,
    )
    assert arrays.rows[:4].tolist() == [3, 0, 39, 7]


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("at_chunk_tokens + begin - decoding + i", "at_chunk_tokens + begin + i"),
        ("tl.store(sampled + place, begin + count - 1)", "tl.store(sampled + place, begin + count)"),
        ("store(next_positions + row, position + 1, mask", "store(next_positions + row, position, mask"),
        ("tl.store(tables + entry,", "tl.store(tables + entry + 1,"),
        ("tl.load(turn) * line_size", "tl.load(turn) * 0"),
        ("range(tokens, size, BLOCK)", "range(size, size, BLOCK)"),
        ("at_joins + join * RECORD", "at_joins + chunk * RECORD"),
        ("tl.num_programs(0) - 2):", "tl.num_programs(0)):"),
    ],
)
def test_planted_fault_is_found(right: str, wrong: str, tmp_path: Path, device: torch.device) -> None:
    torch.manual_seed(0)
    ring = make_step(*STEPS["mixed"], joins=list(range(WORDS.rows)))
    ring[0] = 0
    theirs = everything(step_layout, ring, device, reference=True)
    with mutant(step_layout, tmp_path, right, wrong) as faulty:
        mine = everything(faulty, ring, device, reference=False)
    assert not all(map(torch.equal, mine, theirs))
