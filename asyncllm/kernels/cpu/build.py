"""Compiles the kernels with the machine's own compiler, for its own processor, once: the binary stays on disk.

The binary calls the OpenMP runtime that torch has loaded, and is linked to none: a second one would have threads of its
own, which compete with torch's.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import logging
import os
import platform
import selectors
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asyncllm.kernels.cpu.team import TeamSize

if sys.platform != "win32":  # where nothing is compiled
    import fcntl

logger = logging.getLogger("asyncllm")

SOURCE = Path(__file__).parent / "source"
_MAIN = "decoder.cpp"
_FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-fPIC", "-shared"),
    *("-fno-exceptions", "-fno-rtti", "-fno-threadsafe-statics", "-w"),
)
_COMPILERS = ("c++", "g++", "clang++")
_SECONDS = 120
"""A compiler that takes longer is given up."""
_LOOK_EVERY = 0.1
"""Seconds between looks at the time, and at whether the program ends, or nobody wants the kernels any more."""
_SCRATCH = "compiling-"
"""How the names of folders begin that a compiler writes to."""
_STALE = 3600.0
"""Seconds after which nobody compiles in such a folder any more: a process that was killed has left it."""
_MOST_SAID, _MOST_TOLD = 1 << 16, 300
"""Bytes of a compiler's messages, and characters of the one that is passed on."""
_POINTER, _COUNT, _NUMBER = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
_FUNCTIONS: dict[str, tuple[type[ctypes._SimpleCData[Any]] | None, tuple[type[ctypes._SimpleCData[Any]], ...]]] = {
    "features": (_COUNT, ()),
    "takes_head": (_COUNT, (_COUNT,)),
    "workspace_bytes": (_COUNT, (_POINTER, _POINTER, _POINTER, _COUNT)),
    "decode": (_NUMBER, (_POINTER, _POINTER, _POINTER, _COUNT, _POINTER)),
    "ask": (_COUNT, (_POINTER,)),
    "end": (None, (_POINTER,)),
    "product_workspace_bytes": (_COUNT, (_POINTER, _COUNT, _COUNT)),
    "draw_workspace_bytes": (_COUNT, (_COUNT, _COUNT)),
    "product": (
        _NUMBER,
        (_POINTER, _POINTER, _POINTER, _NUMBER, _COUNT, _POINTER, _COUNT, _POINTER, _COUNT, _COUNT),
    ),
    "uniform": (None, (_POINTER, _POINTER, _POINTER, ctypes.c_uint64, _COUNT, _POINTER)),
    "draw": (_NUMBER, (_POINTER, _COUNT, _COUNT, _POINTER, _POINTER, _POINTER, _POINTER, _COUNT)),
}
"""By name, without what all of them begin with: what each gives, and what it takes."""


class BuildError(Exception):
    """The kernels cannot be compiled or loaded here; the message says why, and what would help."""


class BuildInterrupted(Exception):
    """Nobody wants the kernels any more."""


@dataclass(frozen=True, slots=True)
class Library:
    """The loaded kernels."""

    functions: ctypes.CDLL
    short: ctypes.PyDLL  # the same, for calls so short that the interpreter is not given up for them
    tiles: bool  # whether the processor's matrix unit (AMX) may be used
    avx512: bool  # whether they were compiled for that; else for AVX2
    team: TeamSize = field(default_factory=TeamSize)


def always() -> bool:
    """What is wanted whatever happens."""
    return True


def load_library(folder: Path | None, compiler: str | None = None, wanted: Callable[[], bool] = always) -> Library:
    """The kernels, from `folder` or compiled into it; `compiler`, if any, is the only one that is tried.

    Where there is no folder, or it cannot be written to, or others can do so, none is kept: they are compiled at every
    start. Raises `BuildError`; and `BuildInterrupted` once they are not `wanted`, which ends a compiler.
    """
    commands = [_words(compiler)] if compiler else list(_compilers())
    if not commands:
        raise BuildError("there is no C++ compiler: install g++ or clang++, or `pip install ziglang`")
    names = [f"kernels-{_key(command)}.so" for command in commands]
    if folder is not None:
        folder = folder.absolute()  # the loader searches elsewhere for a name without a folder
        trusted = _is_ours(folder)
        for name in names if trusted else ():
            with suppress(OSError):  # what cannot be loaded is made anew
                return _load(folder / name)
        if not trusted or not os.access(folder, os.W_OK):
            logger.warning("kernels are compiled at every start: %s cannot be written to, or others can do so", folder)
            folder = None
    failures = []
    for command, name in zip(commands, names, strict=True):
        try:
            return _compile(command, name, folder, wanted)
        except (OSError, subprocess.SubprocessError) as error:
            failures.append(f"{' '.join(command)}: {_reason(error)}")
    raise BuildError("; ".join(failures))


def _words(command: str) -> tuple[str, ...]:
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise BuildError(f"the C++ compiler {command!r} is no command: {error}") from error
    if not words:
        raise BuildError(f"the C++ compiler {command!r} is no command")
    return tuple(words)


def _is_ours(folder: Path) -> bool:
    """Whether nobody but this user and root can have put there what lies in the folder, which is made if need be."""
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = folder.stat()
        return found.st_uid in (0, os.geteuid()) and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return False


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


def _compile(command: Sequence[str], name: str, folder: Path | None, wanted: Callable[[], bool]) -> Library:
    """Where there is a folder, one process does so and others wait for it. The file appears whole, once it could be
    loaded."""
    if folder is None:
        return _compile_alone(command, name, folder, wanted)
    with _turn(folder / f"{name}.lock", wanted):
        with suppress(OSError):  # it was not there, or could not be loaded; another process may have made it since
            return _load(folder / name)
        _clear_away(folder)
        return _compile_alone(command, name, folder, wanted)


@contextmanager
def _turn(lock: Path, wanted: Callable[[], bool]) -> Iterator[None]:
    """While it lasts, no other process and no other thread has this turn. One that is killed gives it back.

    Where files cannot be locked, and where another has had it for as long as a compiler may take, it is shared: equal
    kernels are compiled more than once, and no harm comes of that. Raises `BuildInterrupted` once nothing is `wanted`.
    """
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        yield
        return
    try:
        taken = _take(descriptor)
        deadline = time.monotonic() + _SECONDS
        while not taken and time.monotonic() < deadline and threading.main_thread().is_alive():
            if not wanted():
                raise BuildInterrupted
            time.sleep(_LOOK_EVERY)
            taken = _take(descriptor)
        try:
            yield
        finally:
            if taken:
                _give_back(descriptor, lock)
    finally:
        os.close(descriptor)


def _give_back(descriptor: int, lock: Path) -> None:
    """Unlock this file, and take it away before that: who waits looks for the binary first."""
    with suppress(OSError):  # the kernels are there, whether it goes or not
        lock.unlink()
    with suppress(OSError):  # closing it would leave it to a copy of this process, made by a fork meanwhile
        fcntl.flock(descriptor, fcntl.LOCK_UN)


def _take(descriptor: int) -> bool:
    """Lock this file; False where another has it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # not on this file system
        return True
    return True


def _compile_alone(command: Sequence[str], name: str, folder: Path | None, wanted: Callable[[], bool]) -> Library:
    with tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=folder) as scratch:
        made = Path(scratch) / name
        _run_compiler([*command, *_FLAGS, str(SOURCE / _MAIN), "-o", str(made)], wanted)
        library = _load(made)
        if folder is not None:
            os.replace(made, folder / name)
        return library


def _clear_away(folder: Path) -> None:
    """What processes that were killed have left."""
    latest = time.time() - _STALE
    for left in folder.glob(f"{_SCRATCH}*"):
        with suppress(OSError):
            if left.stat().st_mtime < latest:
                shutil.rmtree(left, ignore_errors=True)


def _run_compiler(command: Sequence[str], wanted: Callable[[], bool]) -> None:
    """Wait for it as long as `_SECONDS`, or until the program ends; it reads nothing, and of what it says no more than
    `_MOST_SAID` is kept."""

    def may_go_on() -> bool:
        return time.monotonic() < deadline and threading.main_thread().is_alive() and wanted()

    said = b""
    deadline = time.monotonic() + _SECONDS
    with (
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,  # so that the programs that a compiler runs can be ended with it
        ) as process,
        selectors.DefaultSelector() as selector,
    ):
        assert process.stderr is not None
        selector.register(process.stderr, selectors.EVENT_READ)
        try:
            piece = None
            while piece != b"" and may_go_on():
                if selector.select(_LOOK_EVERY):
                    piece = os.read(process.stderr.fileno(), 1 << 16)
                    said = (said + piece)[:_MOST_SAID]
                elif process.poll() is not None:  # a fork of this program, made as it began, holds its end of the pipe
                    piece = b""
            status = process.wait(max(0.0, deadline - time.monotonic()) if piece == b"" else 0)
        except subprocess.TimeoutExpired as error:
            os.killpg(process.pid, signal.SIGKILL)
            if not wanted():
                raise BuildInterrupted from None
            raise subprocess.TimeoutExpired(command[:1], _SECONDS) from error
    if status:
        raise subprocess.CalledProcessError(status, command[:1], stderr=said.decode(errors="replace"))


def _load(binary: Path) -> Library:
    """Raises `OSError` where it is not what was compiled."""
    _share_openmp()
    functions, short = ctypes.CDLL(str(binary)), ctypes.PyDLL(str(binary))
    try:
        for handle in (functions, short):
            for name, (given, taken) in _FUNCTIONS.items():
                function = getattr(handle, f"asyncllm_{name}")
                function.restype, function.argtypes = given, taken
        features = functions.asyncllm_features()
        return Library(functions, short, tiles=bool(features & 1), avx512=bool(features & 2))
    except AttributeError as error:
        raise OSError(f"not our kernels: {error}") from error


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
        return lines[0][:_MOST_TOLD] if lines else f"ended with status {error.returncode}"
    return str(error)
