"""Mailbox: what the engine's thread leaves for one stream, and how the stream's event loop hears of it.

Every field is written by one thread only, so no lock is needed: the engine's thread appends and then looks whether
somebody waits; the stream says that it waits and then looks again. One of the two sees the other. (Each step here is
one operation under the interpreter lock, and atomic without it too.)

A mailbox does not hold its stream, so a stream that is dropped is gone even while its request runs.
"""

from __future__ import annotations

import asyncio
import weakref
from enum import Enum, auto
from typing import Any, NamedTuple, Protocol

import numpy as np

from asyncllm.engine.logprob_reader import LogprobReader
from asyncllm.engine.plan import Int32Array, RowSampling, TokenScores
from asyncllm.errors import AsyncLLMError
from asyncllm.metrics import RequestMetrics
from asyncllm.results import FinishReason, Usage

NO_IDS: Int32Array = np.empty(0, dtype=np.int32)


class Stage(Enum):
    """Where a stream stands in its life. `NEW` belongs to the stream, the rest to the engine's thread."""

    NEW = auto()
    PREPARING = auto()  # tokenised and validated on a worker thread
    QUEUED = auto()  # handed to the scheduler
    RUNNING = auto()  # planned into a step
    DONE = auto()


class ChoiceEnd(NamedTuple):
    """How a choice came to its end."""

    reason: FinishReason
    stop_reason: str | int | None = None


class Ending(NamedTuple):
    """What a request came to, errors apart."""

    usage: Usage
    metrics: RequestMetrics


class Consumer(Protocol):
    """Who hears of mailboxes."""

    batch: list[Mailbox]  # to look at, once this turn is over


class Waiter(Protocol):
    """Who is told of new tokens, on the stream's loop: a future, or what does its work at once and is told again."""

    def done(self) -> bool:
        """Whether it is to be told no more."""
        ...

    def set_result(self, result: None, /) -> object:
        """Something is there to be read. Returns what is true if it is to be told again."""
        ...


class ChoiceBox:
    """All that a choice has produced. Written by the engine's thread."""

    __slots__ = ("end", "ids", "scores", "tail", "texts")

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.texts: list[str] = []  # one for each of `ids`, appended before it; stays empty without a tokenizer
        self.scores: list[TokenScores] | None = None  # likewise one for each of `ids`, where they were asked for
        self.tail = ""  # text that was held back, behind the last token's; set before the end, or the request's failure
        self.end: ChoiceEnd | None = None  # set after the last of `ids`


class Mailbox:
    """Holds all that a request has produced; its stream keeps a place in it. What is unread needs no merging."""

    __slots__ = (
        "__weakref__",
        "aborted",
        "accepted",
        "choices",
        "consumer",
        "ending",
        "failure",
        "prompt",
        "prompt_scores",
        "reader",
        "released",
        "request_id",
        "signalled",
        "stage",
        "starters",
        "stream",
        "waiter",
        "watchers",
    )

    def __init__(self, request_id: str, choices: int = 1) -> None:
        self.request_id = request_id
        # Written by the engine's thread.
        self.choices = tuple([ChoiceBox() for _ in range(choices)])
        self.reader: LogprobReader | None = None  # set before anything that it reads
        self.prompt_scores: list[TokenScores] | None = None  # one for each prompt token but the first, if asked for
        self.prompt: Int32Array = NO_IDS
        self.stage = Stage.NEW
        self.accepted = False  # was queued: what fails it from then on did not refuse it
        self.ending: Ending | None = None  # set after the ends of all choices
        self.failure: AsyncLLMError | None = None  # in place of an ending; set after all that the choices have come to
        self.released = False  # row and blocks are free; set after `ending` or `failure`
        self.consumer: Consumer | None = None
        # Written by the thread of the stream's loop.
        self.aborted = False  # before it was submitted: ends as soon as it is
        self.waiter: Waiter | None = None  # the one that is told of new tokens
        self.starters: list[asyncio.Future[None]] = []  # of tasks that wait for the start
        self.watchers: list[asyncio.Future[None]] = []  # of tasks that wait for the end or the release
        self.stream: weakref.ref[Any] | None = None  # the stream, once it has started: tells when it was dropped
        # Set by the engine's thread, cleared by the loop's: a wake-up is on its way.
        self.signalled = False

    @property
    def done(self) -> bool:
        """No more tokens will come."""
        return self.ending is not None or self.failure is not None

    def take_logprobs(self, reader: LogprobReader | None, sampling: RowSampling) -> None:
        """Make place for what was asked for. Engine thread."""
        self.reader = reader
        if sampling.logprobs is not None:
            for box in self.choices:
                box.scores = []
        if sampling.prompt_logprobs is not None:
            self.prompt_scores = []

    def take_prompt(self, start: int, scores: TokenScores) -> None:
        """Of prompt tokens from this position on, which a request that was preempted computes once more."""
        if self.prompt_scores is not None:
            known = len(self.prompt_scores) + 1
            self.prompt_scores += [scores.at(place) for place in range(known - start, len(scores))]

    def begin(self) -> None:
        """The request is queued: tell who waits for that. Engine thread."""
        self.accepted = True
        self.stage = Stage.QUEUED
        if self.starters:
            self.notify()

    def notify(self) -> None:
        """Have the stream's loop look at this mailbox after the turn. Engine thread."""
        if not self.signalled and self.consumer is not None:
            self.signalled = True
            self.consumer.batch.append(self)
