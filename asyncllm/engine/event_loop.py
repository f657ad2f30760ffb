"""The event loop of the engine's own thread: callbacks, timers and futures, and no I/O.

An ordinary selector loop gives the interpreter lock up five times for one wake-up from another thread: to wait, to
read its self-pipe until it is empty, and once for each pass over callbacks that became ready. Each of them can cost the
switch interval when the host is busy with Python work. This loop waits on a lock, so it gives the interpreter lock
up only when it has nothing to do.

Where the system has semaphores, it may wait on one of them: then what runs without the interpreter wakes it too.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import threading
import time
from collections.abc import Callable


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


class _WakeSemaphore:
    """The same on a POSIX semaphore, which any thread may post to. Raises OSError where there are none."""

    def __init__(self) -> None:
        try:
            self._short, self._waiting = ctypes.PyDLL(None), ctypes.CDLL(None)
            self._clockwait = self._waiting.sem_clockwait
        except (AttributeError, TypeError) as error:
            raise OSError("the system's library has no semaphores that wait by a steady clock") from error
        self._memory = (ctypes.c_longlong * 8)()  # more than such a semaphore has anywhere
        self.address = ctypes.addressof(self._memory)
        self._semaphore = ctypes.c_void_p(self.address)
        if self._short.sem_init(self._semaphore, 0, 0) != 0:
            raise OSError("the system has no semaphores of a process's own")

    def wake(self) -> None:
        """As `_WakeLock.wake`."""
        self._short.sem_post(self._semaphore)

    def select(self, timeout: float | None) -> tuple[()]:
        """As `_WakeLock.select`; it may return before. One wake-up is taken at a time, so it may return at once
        for one whose callback has run already."""
        if timeout is None:
            self._waiting.sem_wait(self._semaphore)
        elif timeout <= 0:
            self._short.sem_trywait(self._semaphore)
        else:
            until = time.clock_gettime(time.CLOCK_MONOTONIC) + min(timeout, _LONGEST_WAIT)
            seconds = int(until)
            at = (ctypes.c_long * 2)(seconds, int((until - seconds) * 1e9))
            self._clockwait(self._semaphore, time.CLOCK_MONOTONIC, at)
        return ()


_LONGEST_WAIT = 3600.0
"""Seconds: whoever waits longer looks again."""


class EngineLoop(asyncio.BaseEventLoop):
    """An asyncio event loop without sockets, pipes, signals or child processes."""

    def __init__(self) -> None:
        super().__init__()
        self._selector: _WakeLock | _WakeSemaphore = _WakeLock()
        self._looks: list[Callable[[], object]] = []

    def watch(self, look: Callable[[], object]) -> int | None:
        """Call `look` after each wake-up from now on. Returns the address of a semaphore that wakes the loop; None
        where there is none, and nothing is called. On the loop's thread, while it runs."""
        if not isinstance(self._selector, _WakeSemaphore):
            try:
                self._selector = _WakeSemaphore()  # whoever wakes the lock now has added its callback before
            except OSError:
                return None
        self._looks.append(look)
        return self._selector.address

    def unwatch(self, look: Callable[[], object]) -> None:
        """Call it no more."""
        if look in self._looks:
            self._looks.remove(look)

    def _write_to_self(self) -> None:  # BaseEventLoop's hook: another thread has added a callback
        self._selector.wake()

    def _process_events(self, event_list: tuple[()]) -> None:  # BaseEventLoop's hook for what select returned
        for look in self._looks:
            look()
