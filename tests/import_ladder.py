"""The import ladder and the other rules of the source tree, as functions from a folder to its violations.

`test_architecture.py` runs them on the project, and on small trees that break each rule.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

# A row may import only rows below it. Units of one row are siblings: they never import each other. A unit is a
# module or a package under asyncllm, without that prefix; "" is the package's own __init__, which only re-exports.
LADDER: tuple[tuple[str, ...], ...] = (
    ("__main__",),
    ("cli",),
    ("serve",),
    ("api",),
    ("",),
    ("testing", "offline", "workloads"),
    ("engine.async_engine",),
    ("engine.isolation",),
    ("engine.stream", "engine.engine_thread"),
    ("engine.core", "engine.choice_reader"),
    ("engine.guidance",),
    ("engine.delivery", "engine.statistics"),
    ("engine.live_requests", "engine.step_pipeline", "engine.guide_work", "engine.home_thread"),
    ("engine.consumers", "engine.core_access"),
    ("engine.preparation", "engine.mailbox", "engine.request_text", "engine.step_pace"),
    ("engine.guide_maker",),
    ("engine.row_sampling", "engine.logprob_reader", "engine.guide", "engine.hook_driver"),
    ("engine.model", "engine.row_logits", "engine.hook_place"),
    ("engine.scheduling", "engine.execution"),
    ("engine.grammars",),
    (
        "engine",
        "engine.plan",
        "engine.event_loop",
        "engine.alarm",
        "engine.process",
        "engine.exit_watch",
        "engine.workers",
        "engine.command_queue",
        "engine.side_work",
    ),
    ("models",),
    ("layers",),
    ("kernels",),
    ("parallel",),
    ("weights",),
    ("inputs",),
    ("outputs",),
    ("flags",),
    ("config",),
    ("params",),
    ("structured",),
    ("param_checks",),
    ("results",),
    ("metrics",),
    ("errors",),
)

# († in ARCHITECTURE.md) these import neither torch nor triton, inside functions neither, and loading one loads neither.
TORCH_FREE = frozenset(unit for row in LADDER for unit in row) - frozenset(
    ("testing", "offline", "engine.execution", "models", "layers", "kernels", "parallel", "weights")
)

# These may import torch inside functions; importing them loads none either.
TORCH_FREE_AT_IMPORT = TORCH_FREE | {"offline"}

# What a unit may never import, however deep inside a function.
FORBIDDEN = {
    "engine.scheduling": frozenset(
        ("asyncio", "time", "datetime", "random", "secrets", "threading", "os", "io", "uuid")
    ),
}

# What a unit may import beside the standard library and itself.
ONLY = {"kernels": frozenset({"torch", "triton"})}

# Names of os that only config.py may use.
ENVIRONMENT = frozenset(("environ", "environb", "getenv", "putenv"))

# Units that write to a terminal: the command, and the progress bar of the blocking API.
PRINTING = ("cli", "offline", "serve")

# (importer, imported) -> why this one import may break the ladder.
EXCEPTIONS: dict[tuple[str, str], str] = {}

MAX_LINES = 400
# Kernels may be longer: a kernel, its launcher and its reference stay together. path -> why another file is longer.
LONGER: dict[str, str] = {}


@dataclass(frozen=True)
class Source:
    """One module of the package."""

    name: str  # dotted, with the package in front
    path: Path
    tree: ast.Module

    @property
    def unit(self) -> str | None:
        """The longest unit of the ladder that holds this module; None where none does."""
        return unit_of(self.name)


@dataclass(frozen=True)
class Import:
    """One imported module."""

    name: str
    line: int
    type_checking: bool  # stands under `if TYPE_CHECKING`


def unit_of(module: str) -> str | None:
    """`asyncllm.engine.scheduling.pool` -> `engine.scheduling`; None for a module that has no place in the ladder."""
    parts = module.split(".")[1:]
    units = {unit for row in LADDER for unit in row}
    if not parts:
        return ""
    for end in range(len(parts), 0, -1):
        unit = ".".join(parts[:end])
        # `engine` stands for the package's own __init__ alone: what lies in it has rows of its own
        if unit in units and (unit != "engine" or len(parts) == 1):
            return unit
    return None


def read_sources(root: Path) -> list[Source]:
    """Every module of `root`/asyncllm, parsed."""
    sources = []
    for path in sorted((root / "asyncllm").rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        sources.append(Source(name, path.relative_to(root), ast.parse(path.read_text(encoding="utf-8"))))
    return sources


def imports_of(source: Source, modules: frozenset[str]) -> Iterator[Import]:
    """Every import in the module, those inside functions and `import_module("literal")` too.

    `from package import name` counts as the module `package.name` where there is one, else as `package`.
    """
    guarded = {
        id(inner)
        for node in ast.walk(source.tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for statement in node.body
        for inner in ast.walk(statement)
    }
    is_package = source.path.name == "__init__.py"
    for node in ast.walk(source.tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = source.name.split(".")
                parents = parents[: len(parents) - node.level + is_package]
                base = ".".join([*parents, *([node.module] if node.module else [])])
            joined = [f"{base}.{alias.name}" for alias in node.names]
            names = [name if name in modules else base for name in joined]
        elif (
            isinstance(node, ast.Call)
            and node.args
            and ast.unparse(node.func).split(".")[-1]
            in (
                "import_module",
                "__import__",
            )
        ):
            first = node.args[0]
            names = [first.value] if isinstance(first, ast.Constant) and isinstance(first.value, str) else []
        for name in dict.fromkeys(names):
            yield Import(name, getattr(node, "lineno", 0), id(node) in guarded)


def ladder_violations(sources: Sequence[Source]) -> list[str]:
    """Imports that point up or sideways, under TYPE_CHECKING too, and modules without a row."""
    found = []
    modules = frozenset(source.name for source in sources)
    height = {unit: len(LADDER) - i for i, row in enumerate(LADDER) for unit in row}
    for source in sources:
        if source.unit is None:
            found.append(f"{source.path}: has no row in the ladder")
            continue
        for imported in imports_of(source, modules):
            if imported.name.split(".")[0] != "asyncllm" or (source.name, imported.name) in EXCEPTIONS:
                continue
            target = unit_of(imported.name)
            if target is None:
                found.append(f"{source.path}:{imported.line}: imports {imported.name}, which has no row in the ladder")
            elif target != source.unit and height[target] >= height[source.unit]:
                found.append(f"{source.path}:{imported.line}: imports {imported.name}, which is not below it")
    return found


def cycle_violations(sources: Sequence[Source]) -> list[str]:
    """Import cycles between modules, whether or not a function hides one of the imports."""
    modules = frozenset(source.name for source in sources)
    graph = {
        source.name: {i.name for i in imports_of(source, modules) if not i.type_checking} & modules - {source.name}
        for source in sources
    }
    found: list[str] = []
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        if name in trail:
            found.append("import cycle: " + " -> ".join([*trail[trail.index(name) :], name]))
        elif name not in done:
            for target in sorted(graph[name]):
                visit(target, (*trail, name))
            done.add(name)

    for name in graph:
        visit(name, ())
    return found


def foreign_violations(sources: Sequence[Source]) -> list[str]:
    """Imports of torch, the clock and so on where they have no business."""
    found = []
    modules = frozenset(source.name for source in sources)
    for source in sources:
        unit = source.unit
        if unit is None:
            continue
        for imported in imports_of(source, modules):
            top = imported.name.split(".")[0]
            where = f"{source.path}:{imported.line}: imports {imported.name}"
            if unit in TORCH_FREE and top in ("torch", "triton"):
                found.append(f"{where}, but {unit or 'asyncllm'} is free of torch and triton")
            if top in FORBIDDEN.get(unit, frozenset()):
                found.append(f"{where}, which {unit} must do without")
            if unit in ONLY and not (
                top in ONLY[unit] or top in sys.stdlib_module_names or imported.name.startswith(f"asyncllm.{unit}")
            ):
                found.append(f"{where}, but {unit} imports only {', '.join(sorted(ONLY[unit]))}")
    return found


def call_violations(sources: Sequence[Source]) -> list[str]:
    """Environment variables read outside config.py; printing where there is no terminal to print to."""
    found = []
    for source in sources:
        for node in ast.walk(source.tree):
            where = f"{source.path}:{getattr(node, 'lineno', 0)}:"
            names: list[str] = []
            if isinstance(node, ast.Attribute):
                names = [node.attr]
            elif isinstance(node, ast.ImportFrom) and node.module == "os":
                names = [alias.name for alias in node.names]
            if ENVIRONMENT.intersection(names) and source.unit != "config":
                found.append(f"{where} touches environment variables; only config.py may")
            prints = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
            if prints and source.unit not in PRINTING:
                found.append(f"{where} prints; only {' and '.join(PRINTING)} may")
    return found


def file_violations(sources: Sequence[Source]) -> list[str]:
    """Modules without a docstring, and files that grew long without a reason."""
    found = []
    for source in sources:
        if not ast.get_docstring(source.tree):
            found.append(f"{source.path}: has no docstring")
        lines = max((getattr(node, "end_lineno", None) or 0 for node in ast.walk(source.tree)), default=0)
        if lines > MAX_LINES and source.unit != "kernels" and source.path.as_posix() not in LONGER:
            found.append(f"{source.path}: has {lines} lines, over {MAX_LINES}; does it hold two nouns?")
    return found


RULES: dict[str, Callable[[Sequence[Source]], list[str]]] = {
    "ladder": ladder_violations,
    "cycles": cycle_violations,
    "foreign imports": foreign_violations,
    "calls": call_violations,
    "files": file_violations,
}
