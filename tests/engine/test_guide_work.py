from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from asyncllm.engine.guide import Word
from asyncllm.engine.guide_work import Answer, GuideWork
from asyncllm.engine.plan import Adjustment
from tests.engine.hand_runner import InlineExecutor


class FakeGuide:
    """Says after how many tokens it was asked."""

    def __init__(self, gate: threading.Event | None = None) -> None:
        self.count = 0
        self.gate = gate
        self.busy = False

    def advance(self, token_ids: Sequence[int]) -> Word:
        assert not self.busy
        self.busy = True
        if self.gate is not None:
            assert self.gate.wait(10)
        self.count += len(token_ids)
        self.busy = False
        return Word(Adjustment(), (self.count,))


def counts(answers: list[Answer]) -> list[tuple[int, int]]:
    return sorted((answer.request, answer.word.forced[0]) for answer in answers if isinstance(answer.word, Word))


def make(executor: Any) -> tuple[GuideWork, list[None]]:
    told: list[None] = []
    return GuideWork(executor, lambda: told.append(None)), told


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as executor:
        yield executor


def test_answers_are_told_once_and_taken_together() -> None:
    work, told = make(InlineExecutor())
    for request in (3, 5):
        work.start(request, FakeGuide())  # type: ignore[arg-type]
    assert told == [None]
    assert counts(work.take()) == [(3, 0), (5, 0)]
    work.tell([(5, (7, 8)), (4, (7,))])  # 4 is nobody
    assert told == [None, None]
    assert counts(work.take()) == [(5, 2)]
    assert work.take() == []


def test_a_word_that_is_late_is_not_waited_for_again(threads: ThreadPoolExecutor) -> None:
    gate = threading.Event()
    work, told = make(threads)
    work.start(1, FakeGuide(gate))  # type: ignore[arg-type]
    assert work.awaited
    work.let_pass()
    assert not work.awaited
    gate.set()
    while not told:
        time.sleep(0.001)
    assert counts(work.take()) == [(1, 0)]
    gate.clear()
    work.tell([(1, (9,))])
    assert work.awaited
    work.forget(1)
    assert not work.awaited
    gate.set()


def test_what_a_forgotten_guide_says_is_not_heard(threads: ThreadPoolExecutor) -> None:
    gate = threading.Event()
    work, told = make(threads)
    guide = FakeGuide(gate)
    work.start(1, guide)  # type: ignore[arg-type]
    while not guide.busy:
        time.sleep(0.001)
    work.forget(1)
    gate.set()
    while not told:
        time.sleep(0.001)
    assert work.take() == []


def test_a_forgotten_guide_is_not_asked() -> None:
    gate, guides = threading.Event(), [FakeGuide() for _ in range(3)]
    with ThreadPoolExecutor(1) as thread:
        thread.submit(gate.wait, 10)
        work, _ = make(thread)
        for request, guide in enumerate(guides):
            work.start(request, guide)  # type: ignore[arg-type]
            work.tell([(request, (7,))])
        work.forget(1)
        gate.set()
    assert [guide.count for guide in guides] == [1, 0, 1]
    assert counts(work.take()) == [(0, 0), (0, 1), (2, 0), (2, 1)]


def test_errors_are_answers() -> None:
    class Broken(FakeGuide):
        def advance(self, token_ids: Sequence[int]) -> Word:
            raise SystemExit("a panic")

    work, _ = make(InlineExecutor())
    work.start(1, Broken())  # type: ignore[arg-type]
    (answer,) = work.take()
    assert isinstance(answer.word, RuntimeError)
    assert "a panic" in str(answer.word)


def test_quick_guides_have_one_thread_and_one_call(threads: ThreadPoolExecutor) -> None:
    names: set[str] = set()

    class Named(FakeGuide):
        def advance(self, token_ids: Sequence[int]) -> Word:
            names.add(threading.current_thread().name)
            return super().advance(token_ids)

    gate = threading.Event()
    work, told = make(threads)
    work.start(0, Named(gate))  # type: ignore[arg-type]
    for request in range(1, 50):
        work.start(request, Named())  # type: ignore[arg-type]
    assert not told
    gate.set()
    while not told:
        time.sleep(0.001)
    assert len(names) == len(told) == 1
    assert len(work.take()) == 50
    assert not work.behind


def test_a_slow_guide_holds_up_one_thread(threads: ThreadPoolExecutor) -> None:
    gate = threading.Event()
    work, told = make(threads)
    work.start(0, FakeGuide())  # type: ignore[arg-type]
    while not told:
        time.sleep(0.001)
    work.start(1, FakeGuide(gate))  # type: ignore[arg-type]
    while work.behind:
        time.sleep(0.001)
    assert counts(work.take()) == [(0, 0)]
    for request in range(2, 200):
        work.start(request, FakeGuide())  # type: ignore[arg-type]
    assert work.behind
    assert len(told) == 1
    work.hurry()
    while len(told) == 1:
        time.sleep(0.001)
    assert counts(work.take()) == [(request, 0) for request in range(2, 200)]
    work.hurry()  # nothing is left: it takes no thread
    gate.set()
    while len(told) == 2:
        time.sleep(0.001)
    assert counts(work.take()) == [(1, 0)]
