"""The event loop of the engine's own thread: callbacks, timers and futures, and no I/O.

An ordinary selector loop gives the interpreter lock up five times for one wake-up from another thread: to wait, to
read its self-pipe until it is empty, and once for each pass over callbacks that became ready. Each of them can cost the
switch interval when the host is busy with Python work. This loop waits on a lock, so it gives the interpreter lock
up only when it has nothing to do.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading


class _WakeLock:
    """What `BaseEventLoop` calls its selector: nothing to select from, only a wake-up to wait for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # locked: no wake-up has come
        self._lock.acquire()

    def wake(self) -> None:
        """Let `select` return; from any thread, never blocks."""
        with contextlib.suppress(RuntimeError):  # a wake-up that nobody has taken yet stands already
            self._lock.release()

    def select(self, timeout: float | None) -> tuple[()]:
        """Wait for a wake-up, at most `timeout` seconds; None waits for ever."""
        if timeout is None:
            self._lock.acquire()
        elif timeout <= 0:
            self._lock.acquire(blocking=False)  # what it announced is among the ready callbacks by now
        else:
            self._lock.acquire(timeout=min(timeout, threading.TIMEOUT_MAX))
        return ()


class EngineLoop(asyncio.BaseEventLoop):
    """An asyncio event loop without sockets, pipes, signals or child processes."""

    def __init__(self) -> None:
        super().__init__()
        self._selector = _WakeLock()

    def _write_to_self(self) -> None:  # BaseEventLoop's hook: another thread has added a callback
        self._selector.wake()

    def _process_events(self, event_list: tuple[()]) -> None:  # BaseEventLoop's hook for what select returned
        pass
