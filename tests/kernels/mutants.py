"""Copies of kernel modules with a planted fault, to show that a test would catch it."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType

import torch


@contextmanager
def mutant(
    module: ModuleType, folder: Path, right: str, wrong: str, user: ModuleType | None = None
) -> Iterator[ModuleType]:
    """The module with `right`, which its source has once, replaced by `wrong`; or a copy of `user`, which imports from
    the module, that imports from that copy instead. Memory that torch hands out meanwhile holds no number, where it
    could hold the right results of the run before: a fault that leaves some unwritten is seen."""
    source = source_of(module)
    assert source.count(right) == 1, f"{source.count(right)} times in the source: {right}"
    with ExitStack() as copies:
        copy = copies.enter_context(copied(module, folder, source.replace(right, wrong)))
        if user is not None:
            source = source_of(user)
            assert f"from {module.__name__} import" in source
            source = source.replace(f"from {module.__name__} import", f"from {copy.__name__} import")
            copy = copies.enter_context(copied(user, folder, source))
        with unwritten_memory_filled():
            yield copy


@contextmanager
def unwritten_memory_filled() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of operators without a deterministic form: the filling alone is wanted
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)


def source_of(module: ModuleType) -> str:
    assert module.__file__ is not None
    return Path(module.__file__).read_text()


@contextmanager
def copied(module: ModuleType, folder: Path, source: str) -> Iterator[ModuleType]:
    name = f"mutant_of_{module.__name__.rpartition('.')[2]}"
    path = folder / f"{name}.py"
    path.write_text(source)
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
