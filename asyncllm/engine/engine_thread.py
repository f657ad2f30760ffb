"""EngineThread: the thread that an engine lives on, from loading the model to giving everything back.

It is not a daemon: torch aborts the process when the interpreter ends under one. So that a program which never closes
its engine ends all the same, one watcher a process waits for the main thread to end and then stops every engine.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future

from asyncllm.config import EngineConfig
from asyncllm.engine.core import Core
from asyncllm.engine.event_loop import EngineLoop
from asyncllm.engine.model import ModelLoader
from asyncllm.engine.workers import Workers
from asyncllm.errors import EngineClosed

logger = logging.getLogger("asyncllm")


class EngineThread:
    """Loads a model, serves it, gives it back. Its futures cannot be cancelled, so any number may wait for them."""

    def __init__(self, load: ModelLoader, config: EngineConfig) -> None:
        self._load = load
        self._config = config
        self._core: Core | None = None
        self._stopping = False
        self.started: Future[Core] = Future()
        self.stopped: Future[None] = Future()
        for future in (self.started, self.stopped):
            future.set_running_or_notify_cancel()
        self._thread = threading.Thread(target=self._run, name="asyncllm-engine", daemon=False)

    def start(self) -> None:
        """Begin to load."""
        _watch_exit(self)
        self._thread.start()

    def stop(self, drain: float = 0.0) -> None:
        """Begin to end: at once where the model is still being loaded, else as `Core.close` says."""
        self._stopping = True
        if self._core is not None:
            self._core.close(drain)

    def join(self) -> None:
        """Wait for the thread's last instructions, once `stopped` is set."""
        self._thread.join()

    def _run(self) -> None:
        loop = EngineLoop()
        workers = Workers.start()
        failure: BaseException = EngineClosed("the engine was closed while it started")
        try:
            loop.run_until_complete(self._serve(workers))
        except BaseException as error:
            failure = error
            if self._core is not None:
                logger.exception("the engine's thread failed")
        finally:
            workers.shutdown()
            loop.close()
            if self._core is not None:
                self._core.end()
            _running.discard(self)
            if not self.started.done():
                self.started.set_exception(failure)
            self.stopped.set_result(None)

    async def _serve(self, workers: Workers) -> None:
        model = await self._load(self._config, workers.short)
        try:
            core = Core(model, self._config, workers)
            self._core = core
            if self._stopping:
                core.close(0)
            else:
                self.started.set_result(core)
            await core.serve()
        finally:
            await model.runner.aclose()


_running: set[EngineThread] = set()
_watcher: threading.Thread | None = None


def _watch_exit(engine: EngineThread) -> None:
    global _watcher  # noqa: PLW0603  # one a process
    _running.add(engine)
    if _watcher is None or not _watcher.is_alive():  # not alive: this is a child of the process that had it
        _watcher = threading.Thread(target=_stop_at_exit, name="asyncllm-exit", daemon=True)
        _watcher.start()


def _stop_at_exit() -> None:
    threading.main_thread().join()
    for engine in tuple(_running):
        engine.stop()
