"""HomeThread: what an engine's homes have in common, the thread that each of them runs on."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from concurrent.futures import Future

from asyncllm.engine import exit_watch
from asyncllm.engine.core_access import CoreAccess


class HomeThread(ABC):
    """As `EngineHome`. Its futures cannot be cancelled, so any number may wait for them."""

    def __init__(self) -> None:
        self.started: Future[CoreAccess] = Future()
        self.stopped: Future[None] = Future()
        for future in (self.started, self.stopped):
            future.set_running_or_notify_cancel()
        self._thread = threading.Thread(target=self._run, name="asyncllm-engine", daemon=False)

    def start(self) -> None:
        """As `EngineHome.start`."""
        exit_watch.watch(self)
        try:
            self._thread.start()
        except RuntimeError:  # there can be no more threads
            exit_watch.forget(self)
            raise

    @abstractmethod
    def stop(self, drain: float = 0.0) -> None:
        """As `EngineHome.stop`."""

    def join(self) -> None:
        """As `EngineHome.join`."""
        self._thread.join()

    @abstractmethod
    def _run(self) -> None:
        """What the thread does; its last call is `_end`."""

    def _end(self, failure: BaseException) -> None:
        """All is given back. `failure`: why it has not started, if it has not."""
        exit_watch.forget(self)
        self.stopped.set_result(None)
        if not self.started.done():
            self.started.set_exception(failure)
