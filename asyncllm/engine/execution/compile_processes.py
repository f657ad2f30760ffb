"""CompileProcesses: processes that compile kernels while a model is brought up."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Self

from asyncllm.config import child_environment
from asyncllm.errors import ModelLoadError

logger = logging.getLogger("asyncllm")

MOST_PROCESSES = 16
"""Processes at once, or as many as there are processors. They share some 300 MB, and each takes a processor for some
seconds."""
_LAST_MOMENT = 5.0
"""Seconds that they may take to leave."""


def processors() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class CompileProcesses:
    """A `Compiler`, from `start` to `close`. Before, and where processes cannot be started or have died, it compiles
    nothing: whoever needs a kernel compiles it then. Used from any thread."""

    def __init__(self) -> None:
        self.count = min(processors(), MOST_PROCESSES)
        self._process: subprocess.Popen[bytes] | None = None
        self._free = SimpleQueue[Connection | None]()  # None, once there is no process
        self._free.put(None)
        self._alive = 0
        self._asked = False
        self._closed = False
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> None:
        """Start them, once. It takes some milliseconds; they are ready when they have loaded what they need."""
        executable = _interpreter()
        if executable is None:
            return
        pairs: list[tuple[Connection, Connection]] = []
        try:
            pairs += (Pipe() for _ in range(self.count))
            numbers = [theirs.fileno() for _, theirs in pairs]
            self._process = subprocess.Popen(
                [executable, "-P", "-m", "asyncllm.kernels.compile_worker", str(os.getpid()), *map(str, numbers)],
                pass_fds=numbers,
                stdin=subprocess.PIPE,
                bufsize=0,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # each would say again what the host's own Triton says
                env=child_environment(entry or os.curdir for entry in sys.path),
                process_group=0,  # what a terminal sends is for the host alone
            )
        except OSError:
            logger.warning("there are no processes to compile kernels in: threads compile them", exc_info=True)
            for ours, _ in pairs:
                ours.close()
        else:
            self._alive = self.count
            self._free.get()
            for ours, _ in pairs:
                self._free.put(ours)
        finally:
            for _, theirs in pairs:
                theirs.close()

    def compile(self, job: bytes) -> bytes | None:
        """See `Compiler.compile`. Raises `ModelLoadError` where it is closed."""
        self._asked = True
        answer = None
        connection = self._free.get()
        if connection is not None:
            try:
                connection.send_bytes(job)
                answer = connection.recv_bytes()
            except (EOFError, OSError):
                self._lose(connection)
                connection = None
        if connection is not None or not self._alive:
            self._free.put(connection)
        if self._closed:
            raise ModelLoadError("loading was cancelled")
        return answer

    def _lose(self, connection: Connection) -> None:
        connection.close()
        with self._lock:
            self._alive -= 1
        if not self._closed:
            logger.warning("a process that compiled kernels has died")

    def close(self) -> None:
        """End them, whatever they do: who waits for one is told. Idempotent."""
        self._closed = True
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        if not self._asked:
            process.kill()  # it has started no other, and may still be loading
        with suppress(OSError):  # it is gone
            process.stdin.write(b"\0")  # a fork of this process may keep the pipe open
            process.stdin.close()
        try:
            process.wait(_LAST_MOMENT)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        while self._alive:
            connection = self._free.get()
            if connection is not None:
                self._lose(connection)
        self._free.put(None)


def _interpreter() -> str | None:
    """What to start a Python process by; None where that is not known: a frozen or embedding program is its own."""
    is_python = Path(sys.executable or "").name.startswith("python") and not getattr(sys, "frozen", False)
    return sys.executable if is_python and hasattr(os, "fork") else None
