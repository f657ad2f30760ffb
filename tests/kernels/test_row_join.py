from __future__ import annotations

from pathlib import Path

import pytest
import torch

from asyncllm.kernels import row_join
from asyncllm.kernels.row_join import RECORD_WORDS, join_rows, join_rows_reference
from tests.kernels.mutants import mutant

ROWS, MOST = 7, 200


def state(device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    settings = torch.full((8, ROWS), -1, dtype=torch.int32, device=device)
    seeds = torch.full((ROWS,), -1, dtype=torch.int64, device=device)
    return settings, seeds, torch.full((ROWS, MOST), -1, dtype=torch.int32, device=device)


def joins(counts: list[int], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Records of rows 6, 5, …, each with so many suppressed ids."""
    records = torch.randint(-(2**31), 2**31, (len(counts), RECORD_WORDS), dtype=torch.int32)
    for i, count in enumerate(counts):
        records[i, 7], records[i, 10], records[i, 11] = count, ROWS - 1 - i, sum(counts[:i])
    return records.to(device), torch.arange(sum(counts) + 1, dtype=torch.int32, device=device)


@pytest.mark.parametrize("counts", [[], [0], [3, 0, 1], [128, 129, MOST]])
def test_equals_reference(counts: list[int], device: torch.device) -> None:
    mine, theirs = state(device), state(device)
    records, ids = joins(counts, device)
    join_rows(*mine, records, ids)
    join_rows_reference(*theirs, records, ids)
    assert all(map(torch.equal, mine, theirs))
    assert (mine[0][:, 0] == -1).all()


@pytest.mark.parametrize(
    ("right", "wrong"), [("fields * rows + row", "fields * rows + row + 1"), ("first + places", "places")]
)
def test_planted_fault_is_found(right: str, wrong: str, tmp_path: Path, device: torch.device) -> None:
    mine, theirs = state(device), state(device)
    records, ids = joins([3, 2], device)
    join_rows_reference(*theirs, records, ids)
    with mutant(row_join, tmp_path, right, wrong) as faulty:
        faulty.join_rows(*mine, records, ids)
    assert not all(map(torch.equal, mine, theirs))
