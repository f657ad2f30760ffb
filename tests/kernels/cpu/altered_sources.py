from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from asyncllm.kernels.cpu import build
from asyncllm.kernels.cpu.build import Library, load_library


def altered(folder: Path, edits: Sequence[tuple[str, str, str]], compiler: str | None = None) -> Library:
    """Kernels compiled anew, in a folder, from edited sources: of a file, what is there and what comes instead."""
    source = Path(shutil.copytree(build.SOURCE, folder / "source"))
    for file, right, wrong in edits:
        text = (source / file).read_text(encoding="utf-8")
        assert text.count(right) == 1, right
        (source / file).write_text(text.replace(right, wrong), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "SOURCE", source)
        return load_library(folder / "kernels", compiler)
