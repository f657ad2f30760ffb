"""Tests that need an NVIDIA GPU; on other machines there are none of them."""

from __future__ import annotations

from pathlib import Path

import torch


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """The files are there, but hold nothing that could run."""
    return None if torch.cuda.is_available() else True
