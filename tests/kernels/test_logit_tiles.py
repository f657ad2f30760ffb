from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch

from asyncllm.kernels import logit_tiles
from asyncllm.kernels.sampled_rows import AdjustedLogits, LogitRows
from asyncllm.kernels.sampling import make_sampling_workspace
from tests.kernels.mutants import mutant
from tests.kernels.sampled_cases import VOCABULARY, Setting, make_logits, make_settings

SETTINGS = [
    Setting(temperature=0.0),
    Setting(temperature=0.7, suppress_before=9, suppressed=(3, 300, 1299)),
    Setting(suppress_before=5, suppressed=(4,)),
    Setting(temperature=1.5, suppress_before=9, suppressed=(7,)),
]


def check(module: ModuleType, dtype: torch.dtype, device: torch.device, vocabulary: int = 10_000) -> None:
    """Maxima and sums of four rows, one of which has adjusted logits; what is broken, in all places of a group; what is
    banned is overwritten. The vocabulary has whole groups of tiles, and a part of one."""
    rows = [3, 0, 4, 1]
    settings = make_settings(SETTINGS, rows, device)
    where = LogitRows(
        rows=torch.tensor([*rows, 2], dtype=torch.int32, device=device),
        positions=torch.tensor([8, 8, 8, 8, 8], dtype=torch.int32, device=device),
        num_rows=torch.tensor([4], dtype=torch.int32, device=device),
        vocabulary=vocabulary,
    )
    logits = make_logits(5, dtype, seed=5, vocabulary=vocabulary).to(device)
    logits[0, 256:512] = torch.nan
    logits[1, 700::1000] = torch.nan
    logits[3, [800, 1290]] = torch.inf
    logits[3, 512:768] = -torch.inf
    adjusted = AdjustedLogits(
        torch.tensor([0, 1, 0, 0, 0], dtype=torch.int32, device=device), logits.float().flip(1).contiguous()
    )
    for others in (None, adjusted):
        results = []
        for function in (module.sum_tiles, module.sum_tiles_reference):
            mine, workspace = logits.clone(), make_sampling_workspace(5, vocabulary, device)
            workspace.maxima.fill_(7.0)
            workspace.sums.fill_(7.0)
            function(mine, where, settings, workspace, others)
            results.append((mine, workspace.maxima, workspace.sums))
        torch.testing.assert_close(results[0][0], results[1][0], rtol=0, atol=0, equal_nan=True)
        assert torch.equal(results[0][1], results[1][1])
        torch.testing.assert_close(results[0][2], results[1][2], rtol=1e-5, atol=0)
        assert results[0][1][0, 1] == -torch.inf
        assert bool((results[0][1][4] == 7.0).all())
        assert bool((results[0][0][1, [3, 300, 1299]] == -torch.inf).all())
        # bans of a row with adjusted logits are in these
        assert torch.equal(results[0][0][3], logits[3]) == (others is not None)


def test_maxima_and_sums(dtype: torch.dtype, device: torch.device) -> None:
    check(logit_tiles, dtype, device)


def test_less_than_a_group(dtype: torch.dtype, device: torch.device) -> None:
    check(logit_tiles, dtype, device, VOCABULARY)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("(banned // TILE >= first)", "(banned // TILE > first)"),
        ("(is_adjusted == 0) & (position", "(position"),
        ("tl.where(temperature > 0.0, temperature, 1.0)\n    size", "1.0\n    size"),
        ("if is_broken | (part", "if (part"),
        ("lines % AT_ONCE * TILE + lines // AT_ONCE * LINE", "lines * LINE"),
        ("first_own = tl.where(is_adjusted == 0", "first_own = tl.where(is_adjusted != 0"),
    ],
)
def test_planted_fault_is_caught(right: str, wrong: str, tmp_path: Path, device: torch.device) -> None:
    with mutant(logit_tiles, tmp_path, right, wrong) as module, pytest.raises(AssertionError):
        check(module, torch.float32, device)
