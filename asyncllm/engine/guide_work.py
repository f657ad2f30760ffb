"""GuideWork: has the guides of late requests do their work on worker threads, while the device computes.

One thread at a time is at work on one request; a slow one holds up its own request, and one of the threads.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

from asyncllm.engine.guide import Guide, Word
from asyncllm.engine.workers import THREADS


@dataclass(frozen=True, slots=True)
class Answer:
    """What a request's guide has said; or what went wrong with it."""

    request: int
    word: Word | Exception


class GuideWork:
    """Used on the engine's thread. `answered` is called on any thread once there is something to `take`."""

    def __init__(self, executor: Executor, answered: Callable[[], object]) -> None:
        self._executor = executor
        self._answered = answered
        self._guides: dict[int, Guide] = {}
        self._awaited: set[int] = set()
        self._answers: deque[Answer] = deque()
        self._signalled = False  # somebody was told of answers that are not taken yet
        self._lock = threading.Lock()  # of the two below
        self._tasks: deque[tuple[int, Guide, Sequence[int]]] = deque()
        self._threads = 0

    @property
    def awaited(self) -> bool:
        """Whether a word may be there in time for the next plan: a row that has missed one is not waited for again."""
        return bool(self._awaited)

    def let_pass(self) -> None:
        """A plan is made without the rows whose word is still to come."""
        self._awaited.clear()

    def start(self, request: int, guide: Guide) -> None:
        """A late request was queued: ask for its first word."""
        self._guides[request] = guide
        self.tell(request, ())

    def tell(self, request: int, token_ids: Sequence[int]) -> None:
        """These tokens have come, and the next word is due. Nothing happens for a request that was forgotten."""
        guide = self._guides.get(request)
        if guide is None:
            return
        self._awaited.add(request)
        with self._lock:
            self._tasks.append((request, guide, token_ids))
            if self._threads >= THREADS:
                return
            self._threads += 1
        self._executor.submit(self._work)

    def forget(self, request: int) -> None:
        """The request has ended. What its guide still says is not answered."""
        self._guides.pop(request, None)
        self._awaited.discard(request)

    def take(self) -> list[Answer]:
        """The answers since the last call, of requests that have not ended."""
        self._signalled = False  # first, so that what comes from now on is signalled anew
        answers: list[Answer] = []
        while self._answers:
            answer = self._answers.popleft()
            if answer.request in self._guides:
                self._awaited.discard(answer.request)
                answers.append(answer)
        return answers

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._tasks:
                    self._threads -= 1
                    return
                request, guide, token_ids = self._tasks.popleft()
            if request not in self._guides:  # forgotten: a reading from another thread, whose worst is a word in vain
                continue
            try:
                word: Word | Exception = guide.advance(token_ids)
            except Exception as error:
                word = error
            except BaseException as error:  # a panic in Rust is no Exception
                word = RuntimeError(repr(error))
            self._answers.append(Answer(request, word))
            if not self._signalled:
                self._signalled = True
                self._answered()
