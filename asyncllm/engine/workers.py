"""Workers: the threads that tokenise, render and compute masks, so that nothing of it is done on an event loop."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any, TypeVar

Result = TypeVar("Result")

THREADS = min(4, os.cpu_count() or 1)
HOOK_THREADS = 32
"""A plain hook that waits keeps one of them."""
LONG_TEXT = 100_000
"""Characters from which on a text has a thread of its own: about 0.1 s of work."""


class Workers:
    """Several threads for what is short, and one for what is long: a prompt of megabytes delays only its like. Others
    are for `guides`, which are at work while a step is, and for `hooks`, the host's own functions."""

    def __init__(self, short: Executor, long: Executor, guides: Executor, hooks: Executor) -> None:
        self.short = short
        self.guides = guides
        self.hooks = hooks
        self._long = long

    @classmethod
    def start(cls) -> Workers:
        """Threads are made when there is work for them."""
        return cls(
            ThreadPoolExecutor(THREADS, thread_name_prefix="asyncllm-worker"),
            ThreadPoolExecutor(1, thread_name_prefix="asyncllm-long-worker"),
            ThreadPoolExecutor(THREADS, thread_name_prefix="asyncllm-guide"),
            ThreadPoolExecutor(HOOK_THREADS, thread_name_prefix="asyncllm-hook"),
        )

    def submit(self, characters: int, work: Callable[..., Result], *args: Any) -> Future[Result]:
        """Have work on a text of so many characters done. Raises `RuntimeError` after `shutdown`."""
        return (self._long if characters >= LONG_TEXT else self.short).submit(work, *args)

    def shutdown(self, *, wait: bool) -> None:
        """Drop what has not begun, and `wait` for what is being done."""
        for executor in (self.short, self._long, self.guides):
            executor.shutdown(wait, cancel_futures=True)
        self.hooks.shutdown(wait=False, cancel_futures=True)  # who knows when a function of the host's returns
