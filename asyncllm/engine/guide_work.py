"""GuideWork: has the guides of late requests do their work on worker threads, while the device computes.

One thread at a time is at work on one request. One thread does it all as long as guides are quick: threads that hand
the interpreter lock to one another for every word take twice the time. Where work is left after `PATIENCE`, others join
it, so that a slow guide holds up its own request and one of the threads.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

from asyncllm.engine.guide import Guide, Word
from asyncllm.engine.workers import THREADS
from asyncllm.errors import shown

PATIENCE = 0.001
"""Seconds after which `hurry` is due, for as long as guides are `behind`: some 50 words take as long."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a request's guide has said; or what went wrong with it."""

    request: int
    word: Word | Exception


class GuideWork:
    """Used on the engine's thread. `answered` is called on any thread once all that was asked is answered; what is
    answered before that can be taken at any time."""

    def __init__(self, executor: Executor, answered: Callable[[], object]) -> None:
        self._executor = executor
        self._tell_answered = answered
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

    @property
    def answered(self) -> bool:
        """Whether there is something to `take`."""
        return bool(self._answers)

    @property
    def behind(self) -> bool:
        """Whether some guide was not begun with."""
        return bool(self._tasks)

    def let_pass(self) -> None:
        """A plan is made without the rows whose word is still to come."""
        self._awaited.clear()

    def start(self, request: int, guide: Guide) -> None:
        """A late request was queued: ask for its first word."""
        self._guides[request] = guide
        self.tell(((request, ()),))

    def tell(self, tokens: Iterable[tuple[int, Sequence[int]]]) -> None:
        """These tokens of these requests have come, and their next words are due. A forgotten request is left out."""
        guides = self._guides
        tasks = [(request, guides[request], token_ids) for request, token_ids in tokens if request in guides]
        self._awaited.update([request for request, _, _ in tasks])
        with self._lock:
            self._tasks.extend(tasks)
            if not tasks or self._threads:
                return
            self._threads = 1
        self._executor.submit(self._work)

    def hurry(self) -> None:
        """Have one more thread do what was not begun, if there is one."""
        with self._lock:
            if not self._tasks or self._threads >= THREADS:
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
                    break
                request, guide, token_ids = self._tasks.popleft()
            if request not in self._guides:  # forgotten: a reading from another thread, whose worst is a word in vain
                continue
            try:
                word: Word | Exception = guide.advance(token_ids)
            except Exception as error:
                word = error
            except BaseException as error:  # a panic in Rust is no Exception
                word = RuntimeError(shown(error))
            self._answers.append(Answer(request, word))
        if self._answers and not self._signalled:
            self._signalled = True
            self._tell_answered()
