"""ChildProcess: the process itself, from its start to the last that the system knows of it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Sequence
from contextlib import suppress

from asyncllm.config import child_environment
from asyncllm.errors import ConfigError

LAST_MOMENT = 5.0
"""Seconds that it may take to leave once it has hung up; then it is killed."""

HOST_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")
"""Signals that are for the host alone: blocked while a child starts, and ignored by it from then on. Names, since not
every system has all of them."""


class ChildProcess:
    """Made by `start`; `wait` and `close` must follow."""

    def __init__(self, process: subprocess.Popen[bytes], connection: socket.socket) -> None:
        self._process = process
        self.connection = connection
        self.served = False  # whether it was ever asked for anything
        _children.add(self)

    @classmethod
    def start(cls, folder: str | None, path: Sequence[str]) -> ChildProcess:
        """Start one in this folder, or here, that finds modules along this path. On a thread of the engine's own, whose
        signal mask it takes over: the signals that are its host's are blocked there for good. Raises `OSError`."""
        if not sys.executable or not hasattr(signal, "pthread_sigmask"):
            raise ConfigError('isolation="process" needs a Unix system and an interpreter that can be started')
        signal.pthread_sigmask(signal.SIG_BLOCK, [getattr(signal, name) for name in HOST_SIGNALS])
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "asyncllm.engine.isolation", str(theirs.fileno()), str(os.getpid())],
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    cwd=folder,
                    env=child_environment(path),
                )
        except BaseException:
            ours.close()
            raise
        return cls(process, ours)

    @property
    def pid(self) -> int:
        """Its number."""
        return self._process.pid

    def kill(self) -> None:
        """End it at once. From any thread."""
        self._process.kill()

    def hang_up(self) -> None:
        """Nothing more is sent: it ends when it has read all."""
        with suppress(OSError):  # it is gone
            self.connection.shutdown(socket.SHUT_WR)

    def wait(self) -> str:
        """How it has ended, in words, once it has hung up. `close` must follow."""
        try:
            self._process.wait(LAST_MOMENT)
        except subprocess.TimeoutExpired:
            self.kill()
            self._process.wait()
        return _in_words(self._process.returncode)

    def close(self) -> None:
        """Give the socket back. On the thread that writes to it: another file might get its number."""
        self.connection.close()
        _children.discard(self)

    def forget(self) -> None:
        """In a fork: it is the other process's child."""
        self.connection.close()
        self._process.returncode = 0


def _in_words(code: int) -> str:
    if code >= 0:
        return f"it ended with exit status {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = ", as the system does where memory runs out" if name == "SIGKILL" else ""
    return f"{name} ended it{hint}"


_children: weakref.WeakSet[ChildProcess] = weakref.WeakSet()


def _forget_all() -> None:
    for child in tuple(_children):
        child.forget()
    _children.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
