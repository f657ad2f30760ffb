"""HookPlace: where the host's own functions are called.

Async functions run in the event loop that their request was submitted in, with the context variables of that moment;
plain ones on a thread of each call's own (`on_own_thread`), so that none waits for another, and a call's time is its
own.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

from asyncllm.engine.workers import on_own_thread
from asyncllm.errors import shown


class HookCall(Protocol):
    """One call."""

    @property
    def result(self) -> Future[Any]:
        """What comes of it. It is answered, whether anybody waits or not, and cannot be cancelled."""
        ...

    def cancel(self) -> None:
        """Nobody waits for it any more. From any thread."""
        ...


class HookPlace(Protocol):
    """Where the functions of one request run."""

    def begin(self, function: Callable[..., Any], *args: Any) -> HookCall:
        """Have it called. From any thread; raises `RuntimeError` where that is impossible."""
        ...


class LoopPlace:
    """An event loop of this process, and a task's context."""

    def __init__(self, loop: asyncio.AbstractEventLoop, context: contextvars.Context) -> None:
        self.loop = loop
        self.context = context

    def begin(self, function: Callable[..., Any], *args: Any) -> LoopCall:
        """As `HookPlace.begin`."""
        call = LoopCall(self)
        if _is_async(function):
            call.wait_for(partial(function, *args))
        else:
            work = partial(self.context.copy().run, function, *args)
            on_own_thread(work).add_done_callback(call.take)
        return call


class LoopCall:
    """A call in such a place."""

    def __init__(self, place: LoopPlace) -> None:
        self.result = Future[Any]()
        self.result.set_running_or_notify_cancel()
        self._place = place
        self._task: asyncio.Task[None] | None = None
        self._cancelled = False

    def take(self, returned: Future[Any]) -> None:
        """What a plain function has returned: awaited, if it can be."""
        error = returned.exception()
        if error is not None:
            self.result.set_exception(error)
        elif inspect.isawaitable(returned.result()):
            try:
                self.wait_for(returned.result)
            except RuntimeError as closed:
                self.result.set_exception(closed)
        else:
            self.result.set_result(returned.result())

    def wait_for(self, function: Callable[[], Awaitable[Any]]) -> None:
        """The result is that of an awaitable, made and awaited on the loop. Raises `RuntimeError` if it is closed."""
        self._place.loop.call_soon_threadsafe(self._start, function)

    def cancel(self) -> None:
        """As `HookCall.cancel`."""
        self._cancelled = True
        with suppress(RuntimeError):  # that loop is closed, and its tasks with it
            self._place.loop.call_soon_threadsafe(self._stop)

    def _start(self, function: Callable[[], Awaitable[Any]]) -> None:
        self._task = self._place.loop.create_task(self._run(function), context=self._place.context)
        if self._cancelled:
            self._task.cancel()

    def _stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run(self, function: Callable[[], Awaitable[Any]]) -> None:
        try:
            self.result.set_result(await function())
        except Exception as error:
            self.result.set_exception(error)
        except BaseException as error:  # cancelled, or the host is about to leave: nothing to raise on our thread
            self.result.set_exception(RuntimeError(shown(error)))
            raise


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
