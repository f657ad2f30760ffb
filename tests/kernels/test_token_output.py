from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch

from asyncllm.kernels import token_output
from tests.kernels.mutants import mutant


def check(module: ModuleType, count: int, turn: int, device: torch.device) -> None:
    token_ids = torch.arange(5, 705, dtype=torch.int32, device=device)
    number = torch.tensor([count], dtype=torch.int32, device=device)
    results = []
    for function in (module.put_out_tokens, module.put_out_tokens_reference):
        output = torch.full((3, 700), -1, dtype=torch.int32, device=device)
        at = torch.tensor([turn], dtype=torch.int32, device=device)
        function(output, at, token_ids, number)
        results.append((output, at))
    (mine, mine_at), (theirs, theirs_at) = results
    assert torch.equal(mine, theirs)
    assert torch.equal(mine_at, theirs_at)
    assert int(mine_at) == (turn + 1) % 3


@pytest.mark.parametrize("count", [0, 1, 256, 700])
@pytest.mark.parametrize("turn", [0, 2])
def test_equals_reference(count: int, turn: int, device: torch.device) -> None:
    check(token_output, count, turn, device)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("output + step * rows + i", "output + i"),
        ("i = first + tl.arange", "i = tl.arange"),
        ("mask=i < count)\n", "mask=i < count - 1)\n"),
        ("(step + 1) % STEPS", "step + 1"),
    ],
)
def test_planted_fault_is_caught(right: str, wrong: str, tmp_path: Path, device: torch.device) -> None:
    with mutant(token_output, tmp_path, right, wrong) as module, pytest.raises(AssertionError):
        check(module, 600, 2, device)
