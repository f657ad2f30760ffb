"""EngineThread: the thread that an engine lives on, from loading the model to giving everything back."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

from asyncllm.config import EngineConfig
from asyncllm.engine.consumers import Consumers
from asyncllm.engine.core import Core
from asyncllm.engine.event_loop import EngineLoop
from asyncllm.engine.home_thread import HomeThread
from asyncllm.engine.model import ModelLoader, ServedModel
from asyncllm.engine.workers import Workers
from asyncllm.errors import EngineClosed

logger = logging.getLogger("asyncllm")


class EngineThread(HomeThread):
    """Loads a model, serves it, gives it back."""

    def __init__(self, load: ModelLoader, config: EngineConfig, consumers: Consumers | None = None) -> None:
        """`consumers`: who hears of the streams; else the event loops that submit them."""
        super().__init__()
        self._load = load
        self._config = config
        self._consumers = consumers
        self._loop = EngineLoop()
        self._loading: asyncio.Future[ServedModel] | None = None
        self._core: Core | None = None
        self._stopping = False

    def stop(self, drain: float = 0.0) -> None:
        """As `EngineHome.stop`."""
        self._stopping = True  # before the core is looked for: who makes it looks at this afterwards
        if self._core is not None:
            self._core.close(drain)
        else:
            with suppress(RuntimeError):  # the loop is closed: it has ended
                self._loop.call_soon_threadsafe(self._stop_loading)

    def _run(self) -> None:
        loop = self._loop
        workers = Workers.start()
        failure: BaseException = EngineClosed("the engine was closed while it started")
        gave_up = False
        try:
            loop.run_until_complete(self._serve(workers))
        except asyncio.CancelledError:
            gave_up = True
        except BaseException as error:
            failure = error
            if self._core is not None:
                logger.exception("the engine's thread failed")
        finally:
            # What a load that was given up still does (a download, say) is not waited for.
            workers.shutdown(wait=not gave_up)
            loop.close()
            if self._core is not None:
                self._core.end()
            self._end(failure)

    async def _serve(self, workers: Workers) -> None:
        self._loading = asyncio.ensure_future(self._load(self._config, workers.short))
        if self._stopping:
            self._stop_loading()
        model = await self._loading
        try:
            core = Core(model, self._config, workers, self._consumers)
            self._core = core
            if self._stopping:
                core.close(0)
            else:
                self.started.set_result(core)
            await core.serve()
        finally:
            await model.runner.aclose()

    def _stop_loading(self) -> None:
        if self._loading is not None and self._core is None:
            self._loading.cancel()
