"""The socket between the two processes: messages of any length, one after another, each of them pickled."""

from __future__ import annotations

import pickle
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

_LENGTH = struct.Struct("<Q")
_READ = 1 << 18
"""Bytes of one read: of a host that lags behind, several steps come at once."""


def encode(message: object) -> bytes:
    """As it stands on the socket."""
    body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(body)) + body


class Receiver:
    """Reads messages. Used by one thread."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._buffer = bytearray()
        self._start = 0  # of what is not read yet

    def receive(self) -> Any:
        """The next message, once it is there; None when the other process is gone."""
        while (end := self._end()) is None:
            del self._buffer[: self._start]
            self._start = 0
            try:
                data = self._connection.recv(_READ)
            except OSError:  # reset: it died with something unread
                return None
            if not data:
                return None
            self._buffer += data
        with memoryview(self._buffer) as view:
            message = pickle.loads(view[self._start + _LENGTH.size : end])
        self._start = end
        return message

    @property
    def more(self) -> bool:
        """Whether the next message is there already."""
        return self._end() is not None

    def _end(self) -> int | None:
        """Where the next message ends; None while it is not whole."""
        body = self._start + _LENGTH.size
        if len(self._buffer) < body:
            return None
        end: int = body + _LENGTH.unpack_from(self._buffer, self._start)[0]
        return end if len(self._buffer) >= end else None


class Sender:
    """Sends messages from any thread and waits for nobody: what the socket does not take at once, a thread sends."""

    def __init__(self, connection: socket.socket, cleared: Callable[[], object]) -> None:
        """`cleared` is called, on that thread, when it is no longer `busy`."""
        self._connection = connection
        self._cleared = cleared
        self._lock = threading.Lock()  # of what follows, and of the order on the socket
        self._backlog: deque[bytes | memoryview] = deque()
        self._waiting = threading.Semaphore(0)
        threading.Thread(target=self._run, name="asyncllm-sender", daemon=True).start()

    @property
    def busy(self) -> bool:
        """Whether the other process does not keep up: what can be merged had better wait."""
        return bool(self._backlog)

    @property
    def unsent(self) -> int:
        """Messages that wait."""
        return len(self._backlog)

    def send(self, message: object) -> None:
        """Have it sent, behind what was sent before."""
        data = memoryview(encode(message))
        with self._lock:
            if not self._backlog:
                data = data[self._send_some(data) :]
            if len(data):
                self._backlog.append(data)
                self._waiting.release()

    def _send_some(self, data: memoryview) -> int:
        try:
            return self._connection.send(data, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError:  # the other process is gone: nobody reads it
            return len(data)

    def _run(self) -> None:
        while True:
            self._waiting.acquire()
            with suppress(OSError):  # the other process is gone
                self._connection.sendall(self._backlog[0])
            with self._lock:
                self._backlog.popleft()
                cleared = not self._backlog
            if cleared:
                self._cleared()
