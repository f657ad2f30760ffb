"""Faults planted in the kernel for Hopper GPUs; test_skinny_linear.py compares it with the reference, and elsewhere
tests/engine/execution/test_start_up_kernels.py compiles it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from asyncllm.kernels import skinny_linear, specialized_linear
from asyncllm.kernels.language import GLUON_AVAILABLE
from asyncllm.kernels.specialized_linear import can_specialize
from tests.kernels.mutants import mutant
from tests.kernels.test_skinny_linear import PARTS, TILINGS, Case, check, check_parts

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
GATED, ADDED, SPLIT = TILINGS["specialized, all of it"], TILINGS["specialized, added"], PARTS["specialized, two groups"]


def test_what_it_takes(device: torch.device) -> None:
    x = torch.zeros(4, 72, dtype=torch.bfloat16, device=device)
    assert can_specialize(x) == (HOPPER and GLUON_AVAILABLE and device.type == "cuda")
    assert not can_specialize(x.float())
    assert not can_specialize(x[:, 1:])
    assert not can_specialize(x[:, :70])


@pytest.mark.skipif(not (HOPPER and GLUON_AVAILABLE), reason="the kernel is for Hopper GPUs")
@pytest.mark.full
@pytest.mark.parametrize(
    ("right", "wrong", "case"),
    [
        ("piece // HALVES * LINES", "0 * LINES", GATED),
        ("piece % HALVES * outputs", "0 * outputs", GATED),
        ("total_below += gl.load(bias + outputs + line", "total_below += gl.load(bias + line", GATED),
        ("first_line += WHICH * LINES", "first_line += 0", GATED),
        ("tile % row_tiles * ROWS", "0 * row_tiles", GATED),
        ("begin + turn * WIDTH], full", "begin + STAGES * WIDTH], full", ADDED),
        ("total += gl.load(target", "total -= gl.load(target", ADDED),
        ("row = first_row + gl.arange", "row = gl.arange", ADDED),
        ("begin = part * share", "begin = 0", SPLIT),
        ("output += part.to", "output += 0 * part.to", SPLIT),
        ("biased & (part == 0)", "biased", SPLIT),
    ],
)
def test_planted_fault_is_caught(right: str, wrong: str, case: Case, tmp_path: Path, device: torch.device) -> None:
    test = check_parts if case is SPLIT else check
    mutated = mutant(specialized_linear, tmp_path, right, wrong, user=skinny_linear)
    with mutated as module, pytest.raises(AssertionError):
        test(module, case, device, torch.bfloat16)
