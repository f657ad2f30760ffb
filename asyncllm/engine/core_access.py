"""What the caller's side of an engine asks of the core, and of where it lives: a thread, or a process of its own."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import Any, Protocol

from asyncllm.engine.mailbox import Mailbox
from asyncllm.engine.plan import Float32Array, Int32Array
from asyncllm.engine.preparation import Submission, TextWork
from asyncllm.metrics import EngineState, EngineStatistics, Inspection, ModelDescription


class CoreAccess(Protocol):
    """A core that serves. From any thread; nothing here waits, and `abandon` takes no lock."""

    def open(self, mailbox: Mailbox, submission: Submission, loop: asyncio.AbstractEventLoop) -> int:
        """A stream begins; what comes of it is left in its mailbox and told to `loop`. Returns the internal id.

        Raises `EngineClosed` where nobody would answer any more.
        """
        ...

    def abandon(self, request: int) -> None:
        """Nobody reads this request any more."""
        ...

    def abort(self, request_id: str) -> None:
        """End the live request of this name, if there is one."""
        ...

    def text(self, work: TextWork) -> Future[Any]:
        """Tokenising, rendering and the like, beside any request. Raises `EngineClosed`; the future gets it, or is
        cancelled, where the engine ends before it."""
        ...

    def embed(self, token_ids: Int32Array) -> Future[Float32Array]:
        """The features [hidden] of a text, computed beside the steps. Raises `InvalidParamsError` where there are none;
        the future gets `EngineClosed` where the engine ends before it."""
        ...

    @property
    def state(self) -> EngineState:
        """Whether it serves."""
        ...

    def describe(self, name: str) -> ModelDescription:
        """What is served, under that name."""
        ...

    def statistics(self) -> EngineStatistics:
        """A snapshot as of the last turn."""
        ...

    def inspect(self, limit: int) -> Future[Inspection]:
        """What is held now, block by block, and the oldest requests."""
        ...


class EngineHome(Protocol):
    """Where an engine lives, from loading the model to giving everything back."""

    @property
    def started(self) -> Future[CoreAccess]:
        """Fails with why it cannot start; `join` it then. Cannot be cancelled, so any number may wait for it."""
        ...

    @property
    def stopped(self) -> Future[None]:
        """Likewise."""
        ...

    def start(self) -> None:
        """Begin to load."""
        ...

    def stop(self, drain: float = 0.0) -> None:
        """Begin to end: at once where the model is still being loaded, else take no more requests, and end those that
        are still there after `drain` seconds with `EngineClosed`. From any thread; takes no lock."""
        ...

    def join(self) -> None:
        """Wait for the last instructions, once `stopped` is set or `started` has failed."""
        ...
