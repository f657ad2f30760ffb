"""Copies of kernel modules with a planted fault, to show that a test would catch it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType


@contextmanager
def mutant(module: ModuleType, folder: Path, right: str, wrong: str) -> Iterator[ModuleType]:
    """The module with `right`, which its source has once, replaced by `wrong`."""
    assert module.__file__ is not None
    source = Path(module.__file__).read_text()
    assert source.count(right) == 1, f"{source.count(right)} times in the source: {right}"
    name = f"mutant_of_{module.__name__.rpartition('.')[2]}"
    path = folder / f"{name}.py"
    path.write_text(source.replace(right, wrong))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    copy = importlib.util.module_from_spec(spec)
    sys.modules[name] = copy  # where dataclasses look for annotations
    try:
        spec.loader.exec_module(copy)
        yield copy
    finally:
        del sys.modules[name]
