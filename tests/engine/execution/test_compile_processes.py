from __future__ import annotations

import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from asyncllm.engine.execution import compile_processes
from asyncllm.engine.execution.compile_processes import CompileProcesses
from asyncllm.errors import ModelLoadError
from asyncllm.kernels.language import TRITON_AVAILABLE

pytestmark = pytest.mark.skipif(not TRITON_AVAILABLE, reason="there is nothing to compile")

PATIENCE = 60.0
SELECTABLE = 1024
"""Descriptors from this number on are too high for `select`."""


class Call:
    """In place of a job: reading it calls a function."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._call = function, arguments

    def __reduce__(self) -> Any:
        return self._call


def job(function: Callable[..., Any], *arguments: Any) -> bytes:
    return pickle.dumps(Call(function, *arguments))


def living(group: int) -> list[int]:
    """The processes of a group, but for those that are dead and not looked after."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, its_group = path.read_text(encoding="utf-8").rpartition(")")[2].split()[:3]
        except OSError:  # it has just ended
            continue
        if int(its_group) == group and state != "Z":
            found.append(int(path.parent.name))
    return found


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def in_thread(processes: CompileProcesses, text: bytes) -> Future[bytes | None]:
    future = Future[bytes | None]()

    def run() -> None:
        try:
            future.set_result(processes.compile(text))
        except ModelLoadError as error:
            future.set_exception(error)

    threading.Thread(target=run).start()
    return future


def leader(processes: CompileProcesses) -> int:
    process = processes._process
    assert process is not None
    return process.pid


def test_what_fails_is_told_and_who_dies_is_missed_by_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_processes, "MOST_PROCESSES", 2)
    with CompileProcesses() as processes, ThreadPoolExecutor(4) as pool:
        processes.start()
        group = leader(processes)
        answers = list(pool.map(processes.compile, [job(os.getpid)] * 4))
        assert all(answer is not None and b"AttributeError" in answer for answer in answers)  # a number is no job
        assert 1 < len(living(group)) <= 3
        assert processes.compile(job(os._exit, 1)) is None
        assert processes.compile(job(os.getpid)) is not None
        assert processes.compile(job(os._exit, 1)) is None
        assert list(pool.map(processes.compile, [job(os.getpid)] * 4)) == [None] * 4
    assert living(group) == []


def test_in_a_host_with_a_life_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many descriptors, ignored children, and a path among the texts of `sys.path`."""
    monkeypatch.setattr(compile_processes, "MOST_PROCESSES", 2)
    monkeypatch.setattr(sys, "path", [*sys.path, Path("/nowhere")])
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limits[1] < 2 * SELECTABLE:
        pytest.skip("there is no room for so many descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (2 * SELECTABLE, limits[1]))
    ignored = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(SELECTABLE)]
    try:
        with CompileProcesses() as processes, ThreadPoolExecutor(2) as pool:
            processes.start()
            group = leader(processes)
            assert None not in list(pool.map(processes.compile, [job(os.getpid)] * 2))
            for _ in range(2):
                in_thread(processes, job(time.sleep, 2 * PATIENCE))
            started = time.monotonic()
            processes.close()
            assert time.monotonic() - started < compile_processes._LAST_MOMENT
        assert living(group) == []
    finally:
        for descriptor in opened:
            os.close(descriptor)
        signal.signal(signal.SIGCHLD, ignored)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_without_room_for_descriptors_there_are_none() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.open(os.devnull, os.O_RDONLY)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + 1, limits[1]))
    try:
        with CompileProcesses() as processes:
            processes.start()
            assert processes.compile(b"") is None
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_closing_ends_what_they_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(compile_processes, "MOST_PROCESSES", 2)
    processes = CompileProcesses()
    processes.start()
    group = leader(processes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of os.fork in a process with threads
        fork = os.fork()  # of the host: it has a copy of every end of a pipe
    if not fork:
        time.sleep(PATIENCE)
        os._exit(0)
    try:
        waiting = [in_thread(processes, job(time.sleep, 2 * PATIENCE)) for _ in range(3)]
        wait_until(lambda: len(living(group)) == 3)
        started = time.monotonic()
        processes.close()
        for future in waiting:
            with pytest.raises(ModelLoadError, match="cancelled"):
                future.result(PATIENCE)
        assert time.monotonic() - started < compile_processes._LAST_MOMENT
        assert living(group) == []
        processes.close()
        with pytest.raises(ModelLoadError, match="cancelled"):
            processes.compile(b"")
    finally:
        os.kill(fork, signal.SIGKILL)
        os.waitpid(fork, 0)


def test_what_was_never_asked_ends_at_once() -> None:
    processes = CompileProcesses()
    processes.start()
    group = leader(processes)
    started = time.monotonic()
    processes.close()
    assert time.monotonic() - started < 1.0
    assert living(group) == []


HOST = """
import os, pickle, sys, threading, time
from asyncllm.engine.execution.compile_processes import CompileProcesses

class Call:
    def __reduce__(self):
        return time.sleep, (600,)

processes = CompileProcesses()
processes.start()
threading.Thread(target=processes.compile, args=(pickle.dumps(Call()),), daemon=True).start()
fork = os.fork()
if not fork:
    time.sleep(600)
print(processes._process.pid, fork, flush=True)
time.sleep(600)
"""


def test_nothing_outlives_the_host() -> None:
    """Though a fork of it lives on, and whatever they do."""
    host = subprocess.Popen([sys.executable, "-W", "ignore", "-c", HOST], stdout=subprocess.PIPE, text=True)
    assert host.stdout is not None
    group, fork = map(int, host.stdout.readline().split())
    try:
        wait_until(lambda: len(living(group)) == 2)
        host.kill()
        wait_until(lambda: not living(group))
    finally:
        os.kill(fork, signal.SIGKILL)
        host.kill()
        host.wait()
        host.stdout.close()


@pytest.mark.parametrize("executable", ["", "/usr/bin/uwsgi", "/nowhere/python3"])
def test_without_an_interpreter_there_are_none(executable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An embedding program would be started a second time."""
    monkeypatch.setattr(sys, "executable", executable)
    with CompileProcesses() as processes:
        processes.start()
        assert processes.compile(b"") is None
        assert processes.compile(b"") is None
