"""Compiles the kernels with the machine's own compiler, for its own processor, once: the binary stays on disk.

The binary calls the OpenMP runtime that torch has loaded, and is linked to none: a second one would have threads of its
own, which compete with torch's.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).parent / "source"
_MAIN = "decoder.cpp"
_FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-fPIC", "-shared"),
    *("-fno-exceptions", "-fno-rtti", "-fno-threadsafe-statics", "-w"),
)
_COMPILERS = ("c++", "g++", "clang++")
_SECONDS = 120
"""A compiler that takes longer is given up."""


class BuildError(Exception):
    """The kernels cannot be compiled or loaded here; the message says why, and what would help."""


@dataclass(frozen=True, slots=True)
class Library:
    """The loaded kernels."""

    functions: ctypes.CDLL
    short: ctypes.PyDLL  # the same, for calls so short that the interpreter is not given up for them
    tiles: bool  # whether the processor's matrix unit (AMX) may be used


def load_library(folder: Path, compiler: str | None = None) -> Library:
    """The kernels, from `folder` or compiled into it; `compiler`, if any, is the only one that is tried.

    Raises `BuildError`.
    """
    commands = [tuple(compiler.split())] if compiler else list(_compilers())
    if not commands:
        raise BuildError("there is no C++ compiler: install g++ or clang++, or `pip install ziglang`")
    failures = []
    for command in commands:
        binary = folder / f"kernels-{_key(command)}.so"
        try:
            if not binary.exists():
                _compile(command, binary)
            return _load(binary)
        except (OSError, subprocess.SubprocessError) as error:
            failures.append(f"{' '.join(command)}: {_reason(error)}")
    raise BuildError("; ".join(failures))


def _compilers() -> Iterator[tuple[str, ...]]:
    """Commands that may compile C++."""
    yield from ((path,) for name in _COMPILERS if (path := shutil.which(name)))
    if importlib.util.find_spec("ziglang") is not None:
        yield (sys.executable, "-m", "ziglang", "c++")


def _key(command: Sequence[str]) -> str:
    """What a binary depends on."""
    digest = hashlib.sha256()
    for path in sorted(SOURCE.iterdir()):
        digest.update(path.read_bytes())
    digest.update("\0".join((*command, *_FLAGS, platform.machine(), _processor())).encode())
    return digest.hexdigest()[:24]


def _processor() -> str:
    """What this processor can, as the system tells it."""
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:
        for line in lines:
            if line.startswith("flags"):
                return line
    return platform.processor()


def _compile(command: Sequence[str], binary: Path) -> None:
    """Several processes may do so at once: the file appears whole, and one of equal ones stays."""
    binary.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=binary.parent) as scratch:
        made = Path(scratch) / binary.name
        subprocess.run(
            [*command, *_FLAGS, str(SOURCE / _MAIN), "-o", str(made)],
            check=True,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
        )
        os.replace(made, binary)


def _load(binary: Path) -> Library:
    _share_openmp()
    functions, short = ctypes.CDLL(str(binary)), ctypes.PyDLL(str(binary))
    for name in ("features", "takes_head", "workspace_bytes", "product_workspace_bytes"):
        for handle in (functions, short):
            getattr(handle, f"asyncllm_{name}").restype = ctypes.c_int64
    return Library(functions, short, tiles=bool(functions.asyncllm_features() & 1))


def _share_openmp() -> None:
    """Let what is loaded from now on see the OpenMP runtime that torch has loaded."""
    with suppress(OSError), open("/proc/self/maps", encoding="utf-8") as lines:
        paths = {line.split(maxsplit=5)[5].strip() for line in lines if "/lib" in line and "omp" in line}
        for path in sorted(paths):
            if Path(path).name.startswith(("libgomp", "libiomp", "libomp")):
                ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)


def _reason(error: Exception) -> str:
    """The first line that says what is wrong."""
    if isinstance(error, subprocess.CalledProcessError):
        lines = [line for line in str(error.stderr).splitlines() if "error" in line]
        return lines[0] if lines else f"ended with status {error.returncode}"
    return str(error)
