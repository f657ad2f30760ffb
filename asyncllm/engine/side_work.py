"""SideWork: coroutines of other threads' that run on the engine's loop beside the steps.

`asyncio.run_coroutine_threadsafe` would lose one that is handed over after the loop has stopped and before it is
closed: nobody would ever answer. Here each is answered, by `end` at the latest.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from asyncllm.errors import EngineClosed

Result = TypeVar("Result")


class SideWork:
    """Only `begin` may be called on other threads."""

    def __init__(self, loop: asyncio.AbstractEventLoop, context: contextvars.Context) -> None:
        self._loop = loop
        self._context = context
        self._waiting: deque[tuple[Coroutine[Any, Any, Any], Future[Any]]] = deque()
        self._running: dict[asyncio.Task[Any], Future[Any]] = {}
        self._closed = False

    def begin(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Have it run. The future gets its result, or `EngineClosed`; cancelling it helps only before it has begun."""
        future: Future[Result] = Future()
        self._waiting.append((work, future))  # first: `end`, which comes after the loop is closed, then finds it
        try:
            self._loop.call_soon_threadsafe(self._start, context=self._context)
        except RuntimeError:  # the loop is closed
            self._refuse()
        return future

    async def aclose(self) -> None:
        """Answer all that is there, and what is still to come."""
        self._closed = True
        self._refuse()
        for task in self._running:
            task.cancel()
        if self._running:
            await asyncio.wait(tuple(self._running))

    def end(self) -> None:
        """Answer what came too late. After the loop was closed, on its thread."""
        self._refuse()
        for future in self._running.values():  # none, unless the thread failed
            future.set_exception(EngineClosed("the engine was closed"))
        self._running.clear()

    def _start(self) -> None:
        if self._closed:
            return self._refuse()
        work, future = self._waiting.popleft()
        if not future.set_running_or_notify_cancel():
            return work.close()
        task = self._loop.create_task(work)
        self._running[task] = future
        task.add_done_callback(self._answer)

    def _answer(self, task: asyncio.Task[Any]) -> None:
        future = self._running.pop(task)
        if task.cancelled():
            future.set_exception(EngineClosed("the engine was closed"))
        elif (error := task.exception()) is not None:
            future.set_exception(error)
        else:
            future.set_result(task.result())

    def _refuse(self) -> None:
        while True:
            try:
                work, future = self._waiting.popleft()
            except IndexError:
                return
            work.close()
            if future.set_running_or_notify_cancel():
                future.set_exception(EngineClosed("the engine is closed"))
