"""The source tree keeps its own rules; and each rule can fail, on a small tree that breaks it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.import_ladder import (
    EXCEPTIONS,
    LADDER,
    LONGER,
    RULES,
    TORCH_FREE,
    TORCH_FREE_AT_IMPORT,
    imports_of,
    read_sources,
    unit_of,
)

ROOT = Path(__file__).parent.parent
SOURCES = read_sources(ROOT)
HEAVY = ("torch", "triton", "transformers")
# what a bare `import asyncllm` must leave out as well
NOT_YET = (*HEAVY, "numpy", "tokenizers", "huggingface_hub", "jinja2", "safetensors", "gguf", "asyncio", "anyio")


@pytest.mark.parametrize("rule", RULES)
def test_tree_keeps_rule(rule: str) -> None:
    assert RULES[rule](SOURCES) == []


def test_exceptions_are_used() -> None:
    modules = frozenset(source.name for source in SOURCES)
    seen = {(source.name, imported.name) for source in SOURCES for imported in imports_of(source, modules)}
    assert set(EXCEPTIONS) <= seen
    assert all((ROOT / path).exists() for path in LONGER)


def loaded_by(module: str) -> set[str]:
    """The names in sys.modules after a fresh interpreter has imported this one module."""
    code = f"import json, sys; import {module}; print(json.dumps(sorted(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(json.loads(run.stdout))


def test_package_import_is_light() -> None:
    assert loaded_by("asyncllm").isdisjoint(NOT_YET)


def test_torch_free_modules_load_no_torch() -> None:
    names = [source.name for source in SOURCES if source.unit in TORCH_FREE_AT_IMPORT and source.unit != "__main__"]
    together = loaded_by(", ".join(names))
    if not together.isdisjoint(HEAVY):  # find out which, one interpreter each
        assert [name for name in names if not loaded_by(name).isdisjoint(HEAVY)] == []
    assert together.isdisjoint(HEAVY)


def test_heavy_import_would_be_seen() -> None:
    assert not loaded_by("triton").isdisjoint(HEAVY)


def planted(tmp_path: Path, files: dict[str, str]) -> list[str]:
    """What the rules say of a package that holds these files."""
    for name, text in files.items():
        path = tmp_path / "asyncllm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return [violation for rule in RULES.values() for violation in rule(read_sources(tmp_path))]


DOC = '"""Doc."""\n'

BROKEN = {
    "upwards": ({"params.py": DOC + "from asyncllm.config import Any"}, "params.py:2: imports asyncllm.config"),
    "upwards, relative": ({"params.py": DOC + "from .config import EngineConfig"}, "which is not below it"),
    "upwards, in a function": (
        {"weights/gguf.py": DOC + "def f():\n    import asyncllm.models.llama"},
        "gguf.py:3: imports asyncllm.models.llama, which is not below it",
    ),
    "upwards, by name": (
        {"results.py": DOC + "import importlib\nimportlib.import_module('asyncllm.config')"},
        "results.py:3: imports asyncllm.config",
    ),
    "upwards, for types": (
        {"errors.py": DOC + "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from asyncllm import results"},
        "errors.py:4: imports asyncllm",
    ),
    "the package from inside": ({"engine/core.py": DOC + "from asyncllm import AsyncEngine"}, "which is not below it"),
    "siblings": (
        {"engine/scheduling/scheduler.py": DOC + "from asyncllm.engine.execution import runner"},
        "scheduler.py:2: imports asyncllm.engine.execution, which is not below it",
    ),
    "no row": ({"utils.py": DOC}, "utils.py: has no row in the ladder"),
    "no row, in engine": ({"engine/misc.py": DOC}, "misc.py: has no row in the ladder"),
    "cycle": (
        {"models/a.py": DOC + "import asyncllm.models.b", "models/b.py": DOC + "def f():\n    from . import a"},
        "import cycle: asyncllm.models.a -> asyncllm.models.b -> asyncllm.models.a",
    ),
    "torch": ({"inputs/images.py": DOC + "def f():\n    import torch.nn as nn"}, "inputs is free of torch and triton"),
    "torch in the command": ({"cli.py": DOC + "from torch import nn"}, "cli is free of torch and triton"),
    "a clock": ({"engine/scheduling/pool.py": DOC + "from time import monotonic"}, "scheduling must do without"),
    "a library in kernels": ({"kernels/norm.py": DOC + "import numpy"}, "but kernels imports only torch, triton"),
    "errors in kernels": ({"kernels/norm.py": DOC + "from asyncllm import errors"}, "but kernels imports only"),
    "environment": ({"weights/hub.py": DOC + "import os\nos.environ.get('HOME')"}, "hub.py:3: touches environment"),
    "environment, by name": ({"weights/hub.py": DOC + "from os import getenv"}, "hub.py:2: touches environment"),
    "printing": ({"engine/core.py": DOC + "print('done')"}, "core.py:2: prints; only cli and offline and serve may"),
    "no docstring": ({"offline.py": "x = 1"}, "offline.py: has no docstring"),
    "long file": ({"offline.py": DOC + "x = 1\n" * 400}, "offline.py: has 401 lines, over 400"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_planted_violation_is_found(tmp_path: Path, name: str) -> None:
    files, expected = BROKEN[name]
    found = planted(tmp_path, files)
    assert any(expected in violation for violation in found), found


def test_clean_tree_has_no_violations(tmp_path: Path) -> None:
    files = {
        "__init__.py": DOC + "if TYPE_CHECKING:\n    from asyncllm.offline import LLM",
        "cli.py": DOC + "from asyncllm import AsyncEngine\nprint(1)",
        "config.py": DOC + "import os\nfrom asyncllm import errors\nos.environ.get('HOME')",
        "errors.py": DOC,
        "kernels/norm.py": DOC + "import math, torch\nfrom asyncllm.kernels import rope",
        "kernels/rope.py": DOC,
        "offline.py": DOC + "def f():\n    import torch",
    }
    assert planted(tmp_path, files) == []


# --- kernels ---


def test_a_fault_is_planted_in_every_kernel() -> None:
    """Each module with code for a device is one that a test in `tests/kernels` makes faulty copies of; but for
    `language`, which computes nothing."""
    modules = (ROOT / "asyncllm/kernels").glob("*.py")
    compiled = {path.stem for path in modules if re.search(r"^@jit", path.read_text(encoding="utf-8"), re.MULTILINE)}
    faulty: set[str] = set()
    for path in (ROOT / "tests/kernels").glob("test_*.py"):
        text = path.read_text(encoding="utf-8")
        if "with mutant(" in text:
            (names,) = re.findall(r"^from asyncllm\.kernels import (.+)$", text, re.MULTILINE)
            faulty |= set(names.split(", "))
    assert len(compiled) > 15
    assert compiled - faulty == {"language"}


# --- the documents name what is there ---

# `folder/file.py`, `folder/`, or a file at the top such as `Makefile`, in backticks
NAMED_PATH = re.compile(r"`((?:[\w.-]+/)+[\w.-]*|[\w-]+\.(?:py|md|toml)|Makefile|LICENSE)(?:::?[\w.]+)?`")


def missing_paths(text: str) -> list[str]:
    """The paths that this text names in backticks and that are neither in the project nor in the package."""
    return [
        name
        for name in NAMED_PATH.findall(text)
        if not (ROOT / name).exists() and not (ROOT / "asyncllm" / name).exists()
    ]


@pytest.mark.parametrize("document", ["ARCHITECTURE.md", "README.md"])
def test_document_names_existing_paths(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    assert NAMED_PATH.search(text)
    assert missing_paths(text) == []


def test_missing_path_is_found() -> None:
    assert missing_paths("See `engine/plan.py`, `asyncllm/config.py`, `models/` and `Makefile`.") == []
    assert missing_paths("See `engine/plans.py`, `gone.md`, `away/`.") == ["engine/plans.py", "gone.md", "away/"]


def test_architecture_draws_the_ladder_as_enforced() -> None:
    """The code block under "## The ladder" has one line a row, top first, with † where torch may not be loaded."""
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    block = text.split("## The ladder", 1)[1].split("```", 2)[1]
    drawn = []
    for line in block.strip().splitlines():
        names = line.split("  ")[0]
        drawn.append([(name.removesuffix("†").strip(), name.endswith("†")) for name in names.split(", ")])
    shown = {"": "asyncllm"}
    enforced = [[(shown.get(unit, unit), unit in TORCH_FREE) for unit in row] for row in LADDER]
    assert drawn == enforced


def test_every_unit_of_the_ladder_exists() -> None:
    present = {unit_of(source.name) for source in SOURCES}
    later = {"parallel"}  # not there yet; their place is kept
    assert {unit for row in LADDER for unit in row} - present == later
