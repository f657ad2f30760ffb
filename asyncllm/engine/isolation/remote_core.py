"""RemoteCore: a core in another process, as the caller's side sees it."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from itertools import count
from typing import Any, Literal

from asyncllm.engine.hook_place import LoopPlace
from asyncllm.engine.isolation.child_process import ChildProcess
from asyncllm.engine.isolation.dispatcher import Dispatcher, Question
from asyncllm.engine.isolation.messages import News, Refused, Started
from asyncllm.engine.isolation.remote_hooks import HookedStream
from asyncllm.engine.isolation.remote_streams import RemoteStream, RemoteStreams
from asyncllm.engine.isolation.totals import continued, without_requests
from asyncllm.engine.mailbox import Mailbox, Stage
from asyncllm.engine.plan import Float32Array, Int32Array
from asyncllm.engine.preparation import Submission, TextWork
from asyncllm.errors import AsyncLLMError
from asyncllm.metrics import EngineState, EngineStatistics, Inspection, ModelDescription


class RemoteCore:
    """As `CoreAccess`, over the lives of several children."""

    def __init__(self) -> None:
        self.streams = RemoteStreams()
        self.dispatcher = Dispatcher(self.streams)
        self._numbers = count()
        self._description: ModelDescription | None = None
        self._state = EngineState.LOADING
        self._before: EngineStatistics | None = None  # of children that are gone
        self._statistics = EngineStatistics()

    # --- for callers ---

    def open(self, mailbox: Mailbox, submission: Submission, loop: asyncio.AbstractEventLoop) -> int:
        """As `CoreAccess.open`; where nobody answers any more, the stream is told so."""
        number, params = next(self._numbers), submission.params
        hooks = HookedStream(params, LoopPlace(loop, contextvars.copy_context())) if params.has_hooks else None
        mailbox.stage = Stage.PREPARING
        self.dispatcher.post(self.dispatcher.open, RemoteStream(number, mailbox, submission, loop, hooks))
        return number

    def abandon(self, request: int) -> None:
        """As `CoreAccess.abandon`."""
        self.dispatcher.post(self.dispatcher.abandon, request)

    def abort(self, request_id: str) -> None:
        """As `CoreAccess.abort`."""
        self.dispatcher.post(self.dispatcher.abort, request_id)

    def text(self, work: TextWork) -> Future[Any]:
        """As `CoreAccess.text`."""
        return self._ask("text", work)

    def embed(self, token_ids: Int32Array) -> Future[Float32Array]:
        """As `CoreAccess.embed`; whatever is wrong is in the future."""
        return self._ask("embed", token_ids)

    def inspect(self, limit: int) -> Future[Inspection]:
        """As `CoreAccess.inspect`."""
        return self._ask("inspect", limit)

    @property
    def state(self) -> EngineState:
        """As `CoreAccess.state`: loading, while another child comes up."""
        return self._state

    def describe(self, name: str) -> ModelDescription:
        """As `CoreAccess.describe`."""
        assert self._description is not None
        return replace(self._description, name=name)

    def statistics(self) -> EngineStatistics:
        """As `CoreAccess.statistics`."""
        found, waiting = self._statistics, self.dispatcher.waiting
        return replace(found, requests_waiting=found.requests_waiting + waiting) if waiting else found

    # --- for the thread that reads from children ---

    def begin(self, started: Started) -> None:
        """A child has started."""
        self._description = started.description
        if self._before is not None:
            self._before = replace(self._before, restarts=self._before.restarts + 1)
        self._take_statistics(started.statistics)
        self._state = EngineState.RUNNING

    def take(self, news: News) -> None:
        """What a turn of the child has brought; `wake` follows."""
        if news.statistics is not None:  # first: who sees an end sees what it has freed
            self._take_statistics(news.statistics)
        self.streams.take(news)

    def wake(self) -> None:
        """Tell each loop that has something to look at, once."""
        for orphan in self.streams.send():
            self.abandon(orphan)

    def refuse(self, refused: Refused) -> None:
        """The child could not read a request."""
        error = refused.error.restore()
        assert isinstance(error, AsyncLLMError)
        self.streams.fail([refused.number], lambda: error)

    def hang_up(self, child: ChildProcess) -> None:
        """The child is about to be gone."""
        self._state = EngineState.LOADING
        self.dispatcher.post(self.dispatcher.hung_up, child)

    def lose(self, failure: Callable[[], AsyncLLMError]) -> None:
        """The child is gone."""
        self._before = self._statistics = without_requests(self._statistics)
        self.dispatcher.post(self.dispatcher.lost, failure)

    def give_up(self, death: Callable[[], AsyncLLMError]) -> None:
        """There will be no other."""
        self._state = EngineState.DEAD
        self.dispatcher.post(self.dispatcher.refuse, death)

    def _take_statistics(self, now: EngineStatistics) -> None:
        self._statistics = now if self._before is None else continued(self._before, now)

    def _ask(self, method: Literal["text", "embed", "inspect"], argument: Any) -> Future[Any]:
        question = Question(next(self._numbers), method, argument, Future())
        self.dispatcher.post(self.dispatcher.ask, question)
        return question.answer
