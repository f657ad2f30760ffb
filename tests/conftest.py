"""For all tests: an async test fails when asyncllm blocks its event loop.

A watcher thread looks at the test's loop ten times a second. Where one call into the package has run for longer than
`LIMIT` without going back to the loop, the place is noted, and the test fails with it. What a test itself does on its
loop (writing a model, `time.sleep` as a bad host) is its own affair. Exempt are imports (of torch: seconds), waiting
for a new thread to get a processor, and collections of garbage, which look through all that earlier tests left. Time in
which the watcher did not get to run either counts only if the loop's thread was at work: other tests may have the
processors, and a library the interpreter lock.

`@pytest.mark.blocks_loop` is for tests that call the blocking API inside a running loop on purpose.
"""

from __future__ import annotations

import asyncio
import gc
import selectors
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType

import pytest

LIMIT = 0.4
"""Seconds. Wide, because other tests may have the processors; test_host.py measures finer."""

LOOK_EVERY = 0.1

PACKAGE = str(Path(__file__).parent.parent / "asyncllm")
TESTING = str(Path(PACKAGE) / "testing")


class _Watch:
    """The loop of the running test, and what its watcher has seen."""

    def __init__(self) -> None:
        self.thread: int | None = None
        self.turn: float | None = None  # when its loop had waited for events, as its processor time; None: it waits
        self.offences: list[str] = []
        self._call: tuple[float, int] | None = None  # the turn, and the call of the package that ran at the last look
        self._since = 0.0  # processor time when it was first seen
        self._looks = 0  # at this call, each of them in time
        self._collects = False

    def look(self, in_time: bool) -> None:
        turn, thread = self.turn, self.thread
        frame = None if turn is None or thread is None or self._collects else sys._current_frames().get(thread)
        outermost = _call_of_package(frame)
        if turn is None or thread is None or outermost is None or turn != self.turn:
            self._call = None
            return
        call, now = (turn, id(outermost)), _processor_time(thread)
        if call != self._call:
            self._call, self._since, self._looks = call, now, 0
        self._looks += in_time
        if self._looks * LOOK_EVERY < LIMIT and now - self._since < LIMIT:
            return
        stack = "".join(traceback.format_stack(frame)[-12:])
        self.offences.append(f"the event loop was blocked for over {LIMIT} s:\n{stack}")
        self.turn = None  # once a turn is enough

    def on_collection(self, phase: str, info: object) -> None:
        """For `gc.callbacks`: a call's time begins anew when the collection is over."""
        if threading.get_ident() == self.thread:
            self._collects = phase == "start"
            self._call = None


def _processor_time(thread: int) -> float:
    return time.clock_gettime(time.pthread_getcpuclockid(thread)) if hasattr(time, "pthread_getcpuclockid") else 0.0


def _call_of_package(frame: FrameType | None) -> FrameType | None:
    """The outermost frame of the package on this stack; None where there is none, or what runs is exempt."""
    outermost = None
    while frame is not None:
        file = frame.f_code.co_filename
        if "importlib" in file or (frame.f_code.co_name == "start" and file == threading.__file__):
            return None
        if file.startswith(PACKAGE) and not file.startswith(TESTING):
            outermost = frame
        frame = frame.f_back
    return outermost


_watch = _Watch()


class _WatchedSelector(selectors.DefaultSelector):
    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        _watch.turn = None
        events = super().select(timeout)
        _watch.thread, _watch.turn = threading.get_ident(), time.thread_time()
        return events


def _watched_loop() -> asyncio.AbstractEventLoop:
    return asyncio.SelectorEventLoop(_WatchedSelector())


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"watched": _watched_loop}


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "blocks_loop: calls the blocking API inside a running loop on purpose")


@pytest.fixture(scope="session", autouse=True)
def _loop_watcher() -> Iterator[None]:
    ended = threading.Event()

    def watch() -> None:
        last = time.monotonic()
        while not ended.wait(LOOK_EVERY):
            now = time.monotonic()
            _watch.look(in_time=now - last < 1.5 * LOOK_EVERY)
            last = now

    thread = threading.Thread(target=watch, name="loop-watcher")
    thread.start()
    gc.callbacks.append(_watch.on_collection)
    yield
    gc.callbacks.remove(_watch.on_collection)
    ended.set()
    thread.join()


@pytest.fixture(autouse=True)
def _fail_blocking_tests(request: pytest.FixtureRequest, _loop_watcher: None) -> Iterator[None]:
    _watch.offences.clear()
    yield
    _watch.turn = None
    if request.node.get_closest_marker("blocks_loop") is None and _watch.offences:
        pytest.fail(_watch.offences[0], pytrace=False)
