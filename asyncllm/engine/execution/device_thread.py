"""The one thread that a runner's device work happens on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

import torch

from asyncllm.errors import ModelLoadError

T = TypeVar("T")


class DeviceThread:
    """Runs calls one after another on a thread of its own, inside `torch.inference_mode()`.

    One thread for life, since every thread that runs products keeps a team of helpers. Not a daemon: torch aborts
    when the interpreter ends under one. Whoever makes a DeviceThread closes it.
    """

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._closing = False
        self._ended: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name=name, daemon=False)
        self._thread.start()

    @property
    def closing(self) -> bool:
        """Whether the thread ends after what it does now."""
        return self._closing

    def interruptible(self, items: Iterable[T]) -> Iterator[T]:
        """The items, until the thread is to end: nobody waits for a load any more, and `ModelLoadError` stops it."""
        for item in items:
            if self._closing:
                raise ModelLoadError("loading was cancelled")
            yield item

    def submit(self, function: Callable[[], T]) -> asyncio.Future[T]:
        """Call `function` after all calls before it; its result or exception arrives on the running loop."""
        if self._closing:
            raise RuntimeError("the device thread is closed")
        answer: Answer[T] = Answer()
        self._calls.put(partial(_answer, function, answer))
        return answer.future

    def post(self, function: Callable[[], object]) -> None:
        """The same for a function that raises nothing, and tells itself what comes of it."""
        if self._closing:
            raise RuntimeError("the device thread is closed")
        self._calls.put(function)

    async def bring_up(self, function: Callable[[], T]) -> T:
        """As `submit`, for the call that the thread was made for: without its result the thread ends."""
        try:
            return await self.submit(function)
        except Exception:
            await self.aclose()
            raise
        except BaseException:  # cancelled: an `interruptible` call notices soon, and the thread ends by itself
            self.close_soon()
            raise

    def close_soon(self) -> None:
        """End after the calls submitted so far, without waiting for them. Idempotent."""
        if not self._closing:
            self._closing = True
            self._calls.put(None)

    async def aclose(self) -> None:
        """End after the calls submitted so far, and wait for that. Idempotent."""
        self.close_soon()
        await asyncio.shield(asyncio.wrap_future(self._ended))
        self._thread.join()  # it has nothing left to do

    def _run(self) -> None:
        with torch.inference_mode():
            while (call := self._calls.get()) is not None:
                call()
                del call  # its result belongs to the caller: keep nothing while waiting
        self._ended.set_result(None)


class Answer(Generic[T]):
    """A future of the running loop that another thread resolves."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[T] = self._loop.create_future()

    def succeed(self, result: T) -> None:
        """From any thread. The first answer counts."""
        self._resolve(succeed, result)

    def fail(self, error: BaseException) -> None:
        """From any thread. The first answer counts."""
        self._resolve(fail, error)

    def _resolve(self, resolve: Callable[[asyncio.Future[Any], Any], None], value: Any) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(resolve, self.future, value)


def _answer(function: Callable[[], T], answer: Answer[T]) -> None:
    try:
        result = function()
    except BaseException as error:
        answer.fail(error)
    else:
        answer.succeed(result)


def succeed(future: asyncio.Future[T], result: T) -> None:
    """On the future's loop. The first answer counts."""
    if not future.done():
        future.set_result(result)


def fail(future: asyncio.Future[Any], error: BaseException) -> None:
    """The same."""
    if not future.done():
        future.set_exception(error)
