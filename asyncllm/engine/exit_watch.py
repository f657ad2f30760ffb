"""Ends every engine when the program ends without closing it: one watcher a process waits for the main thread's end.

The threads of an engine are no daemons: torch aborts the process when the interpreter ends under one. So the
interpreter would wait for them for ever.
"""

from __future__ import annotations

import threading
from typing import Protocol


class Stoppable(Protocol):
    """What can be ended."""

    def stop(self) -> None:
        """Begin to end."""
        ...


_running: set[Stoppable] = set()
_watcher: threading.Thread | None = None


def watch(engine: Stoppable) -> None:
    """Stop it once the main thread has ended."""
    global _watcher  # noqa: PLW0603  # one a process
    _running.add(engine)
    if _watcher is None or not _watcher.is_alive():  # not alive: this is a child of the process that had it
        _watcher = threading.Thread(target=_stop_at_exit, name="asyncllm-exit", daemon=True)
        _watcher.start()


def forget(engine: Stoppable) -> None:
    """It has ended."""
    _running.discard(engine)


def _stop_at_exit() -> None:
    threading.main_thread().join()
    for engine in tuple(_running):
        engine.stop()
