"""Kernels run compiled where there is a GPU, and on CPU tensors in the process that `test_interpreter` starts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from asyncllm.kernels.language import TRITON_AVAILABLE

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Triton reads the variable when kernels are imported, so one process can only run them in one way."""
    if not collection_path.name.startswith("test_"):
        return None
    if collection_path.parent.name == "cpu":  # no Triton
        return True if INTERPRETED else None
    if collection_path.name == "test_interpreter.py":
        return True if INTERPRETED or not TRITON_AVAILABLE else None
    if collection_path.name == "test_language.py":
        return True if INTERPRETED else None
    return None if INTERPRETED or torch.cuda.is_available() else True


@pytest.fixture
def device() -> torch.device:
    return torch.device("cpu" if INTERPRETED else "cuda")


# the interpreter computes with numpy, which has no bfloat16
DTYPES = [torch.float32, torch.float16] if INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    kind: torch.dtype = request.param
    return kind
