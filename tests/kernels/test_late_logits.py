from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch

from asyncllm.kernels import late_logits
from asyncllm.kernels.sampled_rows import ADJUSTS, COUNTS, LATE, LogitRows
from tests.kernels.mutants import mutant

ROWS = 7


def check_kept(module: ModuleType, vocabulary: int, count: int, device: torch.device, dtype: torch.dtype) -> None:
    """Those alone, of those that count, and nothing beyond the vocabulary."""
    generator = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn((5, vocabulary + 9), generator=generator).to(dtype).to(device)
    rows = torch.tensor([6, 0, 3, 5, 1], dtype=torch.int32, device=device)
    duties = torch.tensor([LATE | ADJUSTS, LATE, 0, ADJUSTS | COUNTS, 0, LATE | COUNTS, LATE], dtype=torch.int32)
    results = []
    for function in (module.keep_logits, module.keep_logits_reference):
        kept = torch.full((ROWS, vocabulary + 3), 7.0, dtype=dtype, device=device)
        number = torch.tensor([count], dtype=torch.int32, device=device)
        function(kept, logits, LogitRows(rows, rows, number, vocabulary), duties.to(device))
        results.append(kept)
    assert torch.equal(*results)
    written = [row for row in range(ROWS) if bool((results[0][row, :vocabulary] != 7.0).any())]
    assert written == {0: [], 3: [0, 6], 4: [0, 5, 6]}[count]
    assert bool((results[0][:, vocabulary:] == 7.0).all())


@pytest.mark.parametrize("vocabulary", [5, 4096, 4999])
@pytest.mark.parametrize("count", [0, 3, 4])
def test_late_rows_are_kept(vocabulary: int, count: int, device: torch.device, dtype: torch.dtype) -> None:
    check_kept(late_logits, vocabulary, count, device, dtype)


def check_banned(module: ModuleType, vocabulary: int, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    words = -(-vocabulary // 32)
    masks = torch.randint(-(2**31), 2**31, (3, words), generator=generator, dtype=torch.int64).int()
    masks[1] = -1  # all are legal
    masks[2, :] = 0
    last = (vocabulary - 1) % 32
    masks[2, -1] = 1 << last if last < 31 else -(2**31)
    logits = torch.randn((4, vocabulary + 5), generator=generator).to(device)
    results = []
    for function in (module.mask_logits, module.mask_logits_reference):
        mine = logits.clone()
        function(mine, masks.to(device), vocabulary=vocabulary)
        results.append(mine)
    assert torch.equal(*results)
    assert torch.equal(results[0][1], logits[1])
    assert torch.equal(results[0][3], logits[3])  # beyond the masks
    assert torch.isfinite(results[0][2, :vocabulary]).nonzero().flatten().tolist() == [vocabulary - 1]
    assert torch.equal(results[0][:, vocabulary:], logits[:, vocabulary:])


@pytest.mark.parametrize("vocabulary", [31, 32, 4096, 4999])
def test_masks_ban(vocabulary: int, device: torch.device) -> None:
    check_banned(late_logits, vocabulary, device)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("kept + row.to(tl.int64)", "kept + index.to(tl.int64)"),
        ("logits + index.to(tl.int64) * LOGITS_STRIDE + ids", "logits + index.to(tl.int64) * VOCABULARY + ids"),
        ("if index >= tl.load(num_rows)", "if index > tl.load(num_rows)"),
        ("KEPT_STRIDE + ids, x, mask=ids < VOCABULARY", "KEPT_STRIDE + ids, x, mask=ids <= VOCABULARY"),
        ("(tl.load(duties + row) & _LATE) == 0", "tl.load(duties + row) == 0"),
    ],
)
def test_planted_fault_in_keeping_is_caught(right: str, wrong: str, tmp_path: Path, device: torch.device) -> None:
    with mutant(late_logits, tmp_path, right, wrong) as module, pytest.raises(AssertionError):
        check_kept(module, 4999, 4, device, torch.float32)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("masks + index * WORDS + ids // 32", "masks + index * WORDS + ids // 31"),
        ("masks + index * WORDS", "masks + index * (WORDS - 1)"),
        ("(word >> (ids % 32))", "(word >> (ids % 31))"),
        ("logits + index * STRIDE", "logits + index * VOCABULARY"),
        ("banned & (ids < VOCABULARY)", "banned & (ids < VOCABULARY - 1)"),
    ],
)
def test_planted_fault_in_banning_is_caught(right: str, wrong: str, tmp_path: Path, device: torch.device) -> None:
    with mutant(late_logits, tmp_path, right, wrong) as module, pytest.raises(AssertionError):
        check_banned(module, 4999, device)
