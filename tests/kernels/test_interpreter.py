"""Runs the kernels' tests in a process of their own, under Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent


def run_interpreted(marks: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", marks, str(FOLDER)]
    # as on a GPU, operations on infinities that a mask throws away again are no fault
    command += ["-W", "ignore::RuntimeWarning", "-p", "no:cacheprovider"]
    result = subprocess.run(
        command,
        cwd=FOLDER.parent.parent,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-10_000:] + result.stderr[-2_000:]


def test_kernels_under_the_interpreter() -> None:
    run_interpreted("not full")


@pytest.mark.full
def test_more_shapes_under_the_interpreter() -> None:
    run_interpreted("full")
