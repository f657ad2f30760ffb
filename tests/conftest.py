"""For all tests: an async test fails when asyncllm blocks its event loop.

A watcher thread looks at the test's loop ten times a second. Where a callback has run for longer than `LIMIT` and code
of the package is on the loop's stack, the place is noted, and the test fails with it. What a test itself does on its
loop (writing a model, `time.sleep` as a bad host) is its own affair. Imports are exempt: torch's takes seconds.

`@pytest.mark.blocks_loop` is for tests that call the blocking API inside a running loop on purpose.
"""

from __future__ import annotations

import asyncio
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
"""Seconds of wall time. Wide, because other tests may have the processors; test_host.py measures finer."""

PACKAGE = str(Path(__file__).parent.parent / "asyncllm")
TESTING = str(Path(PACKAGE) / "testing")


class _Watch:
    """The loop of the running test, and what its watcher has seen."""

    def __init__(self) -> None:
        self.thread: int | None = None
        self.busy_since: float | None = None  # None: it waits for events
        self.offences: list[str] = []

    def look(self) -> None:
        since, thread = self.busy_since, self.thread
        if since is None or thread is None or time.monotonic() - since < LIMIT:
            return
        frame = sys._current_frames().get(thread)
        if frame is not None and since == self.busy_since and _is_offence(frame):
            stack = "".join(traceback.format_stack(frame)[-12:])
            self.offences.append(f"the event loop was blocked for over {LIMIT} s:\n{stack}")
            self.busy_since = None  # once a callback is enough


def _is_offence(frame: FrameType | None) -> bool:
    in_package = False
    while frame is not None:
        file = frame.f_code.co_filename
        if "importlib" in file:
            return False
        in_package |= file.startswith(PACKAGE) and not file.startswith(TESTING)
        frame = frame.f_back
    return in_package


_watch = _Watch()


class _WatchedSelector(selectors.DefaultSelector):
    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        _watch.busy_since = None
        events = super().select(timeout)
        _watch.thread, _watch.busy_since = threading.get_ident(), time.monotonic()
        return events


def _watched_loop() -> asyncio.AbstractEventLoop:
    return asyncio.SelectorEventLoop(_WatchedSelector())


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"watched": _watched_loop}


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "blocks_loop: calls the blocking API inside a running event loop on purpose")


@pytest.fixture(scope="session", autouse=True)
def _loop_watcher() -> Iterator[None]:
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.1):
            _watch.look()

    thread = threading.Thread(target=watch, name="loop-watcher")
    thread.start()
    yield
    ended.set()
    thread.join()


@pytest.fixture(autouse=True)
def _fail_blocking_tests(request: pytest.FixtureRequest, _loop_watcher: None) -> Iterator[None]:
    _watch.offences.clear()
    yield
    _watch.busy_since = None
    if request.node.get_closest_marker("blocks_loop") is None and _watch.offences:
        pytest.fail(_watch.offences[0], pytrace=False)
