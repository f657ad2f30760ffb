"""LLM: the blocking API, for scripts and notebooks.

Each call runs in an event loop of its own on a thread of its own, so it works where a loop runs already.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
import time
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np

from asyncllm.config import EngineConfig
from asyncllm.engine.async_engine import AsyncEngine
from asyncllm.engine.model import ModelLoader
from asyncllm.engine.preparation import Prompt, is_messages
from asyncllm.errors import InvalidParamsError, InvalidPromptError
from asyncllm.params import SamplingParams
from asyncllm.results import Completion

Result = TypeVar("Result")

REFRESH_SECONDS = 0.2


class LLM:
    """A model for blocking use: `LLM("some/model").generate(["One", "Two"], SamplingParams(max_tokens=32))`.

    The model is loaded by the first call, or by entering the `with` block, and stays until `close()`, until this object
    is dropped, or until the program ends. Ctrl-C aborts the requests of the running call and raises
    `KeyboardInterrupt`; the model stays loaded.
    """

    def __init__(
        self, model: str | os.PathLike[str] | ModelLoader, *, config: EngineConfig | None = None, **overrides: Any
    ) -> None:
        self._model = model
        self._config = (config or EngineConfig()).override(**overrides)
        self._engine = AsyncEngine(model, config=self._config)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[Completion]:
        """The completions of one prompt or a list of them, in order.

        A prompt is a text, a list of chat messages or a list of token ids. `params` holds for all, or is a list as
        long as the prompts. `progress` draws a bar on standard error. The first request that is refused or fails
        ends the call with its error.
        """
        many = _as_list(prompts)
        each = [params] * len(many) if params is None or isinstance(params, SamplingParams) else list(params)
        if len(each) != len(many):
            raise InvalidParamsError(f"there are {len(many)} prompts and {len(each)} params")
        return _run(self._generate(many, each, _Progress(len(many)) if progress else None))

    def close(self) -> None:
        """Give threads and memory back. Idempotent."""
        _run(self._engine.aclose())

    def __enter__(self) -> Self:
        _run(self._start())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    async def _start(self) -> None:
        try:
            await self._engine.start()
        except asyncio.CancelledError:  # Ctrl-C while it loads: the next call loads anew
            self._engine = AsyncEngine(self._model, config=self._config)
            raise

    async def _generate(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams | None], progress: _Progress | None
    ) -> list[Completion]:
        async def complete(prompt: Prompt, params: SamplingParams | None) -> Completion:
            async with self._engine.stream(prompt, params) as stream:
                return await stream.result()

        await self._start()
        before = self._engine.statistics().tokens_generated
        tasks = [asyncio.create_task(complete(*request)) for request in zip(prompts, params, strict=True)]
        pending = set(tasks)
        try:
            while pending:
                done, pending = await asyncio.wait(
                    pending,
                    timeout=None if progress is None else REFRESH_SECONDS,
                    return_when=asyncio.FIRST_EXCEPTION,
                )
                for task in done:
                    task.result()
                if progress is not None:
                    progress.show(len(tasks) - len(pending), self._engine.statistics().tokens_generated - before)
        finally:
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
            if progress is not None:
                progress.end()
        return [task.result() for task in tasks]


class _Progress:
    """A line on standard error that is drawn over itself."""

    WIDTH = 30

    def __init__(self, total: int) -> None:
        self._total = total
        self._start = time.monotonic()
        self._drawn = False

    def show(self, done: int, tokens: int) -> None:
        """Draw that so many requests are done, and so many tokens made."""
        filled = self.WIDTH * done // max(self._total, 1)
        rate = tokens / max(time.monotonic() - self._start, 1e-6)
        bar = "#" * filled + "." * (self.WIDTH - filled)
        print(f"\r[{bar}] {done}/{self._total}  {rate:,.0f} tokens/s ", end="", file=sys.stderr, flush=True)
        self._drawn = True

    def end(self) -> None:
        """Go on to the next line."""
        if self._drawn:
            print(file=sys.stderr, flush=True)


def _as_list(prompts: Any) -> list[Prompt]:
    """One prompt as a list of one. What holds numbers or messages is a prompt, what holds prompts is a list of them."""
    if isinstance(prompts, str) or is_messages(prompts):
        return [prompts]
    if isinstance(prompts, Mapping | bytes):
        raise InvalidPromptError(f"prompts must be a prompt or a list of prompts, got {prompts!r:.80}")
    try:
        many = list(prompts)
    except TypeError:
        raise InvalidPromptError(f"prompts must be a prompt or a list of prompts, got {prompts!r:.80}") from None
    is_ids = bool(many) and isinstance(many[0], int | np.integer)
    return [prompts] if is_ids else many


def _run(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """The coroutine's result, from a loop on a thread of its own. An interruption cancels it and is raised when it is
    done."""
    running: Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = Future()
    outcome: Future[Result] = Future()

    async def run() -> Result:
        task = asyncio.current_task()
        assert task is not None
        running.set_result((asyncio.get_running_loop(), task))
        return await coroutine

    def body() -> None:
        try:
            outcome.set_result(asyncio.run(run()))
        except BaseException as error:
            outcome.set_exception(error)

    thread = threading.Thread(target=body, name="asyncllm-offline")
    thread.start()
    try:
        return outcome.result()
    except BaseException:
        if not outcome.done():  # it was this thread that was interrupted
            loop, task = running.result()
            with contextlib.suppress(RuntimeError):  # the loop has closed: it is done
                loop.call_soon_threadsafe(task.cancel)
            outcome.exception()
        raise
    finally:
        thread.join()
