"""Workers: the threads that tokenise, render and compute masks, so that nothing of it is done on an event loop.

Functions of the host's have threads of their own.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any, TypeVar

from asyncllm.errors import shown

Result = TypeVar("Result")

THREADS = min(4, os.cpu_count() or 1)
LONG_TEXT = 100_000
"""Characters from which on a text has a thread of its own: about 0.1 s of work."""


class Workers:
    """Several threads for what is short, and one for what is long: a prompt of megabytes delays only its like. Others
    are for `guides`, which are at work while a step is."""

    def __init__(self, short: Executor, long: Executor, guides: Executor) -> None:
        self.short = short
        self.guides = guides
        self._long = long

    @classmethod
    def start(cls) -> Workers:
        """Threads are made when there is work for them."""
        return cls(
            ThreadPoolExecutor(THREADS, thread_name_prefix="asyncllm-worker"),
            ThreadPoolExecutor(1, thread_name_prefix="asyncllm-long-worker"),
            ThreadPoolExecutor(THREADS, thread_name_prefix="asyncllm-guide"),
        )

    def submit(self, characters: int, work: Callable[..., Result], *args: Any) -> Future[Result]:
        """Have work on a text of so many characters done. Raises `RuntimeError` after `shutdown`."""
        return (self._long if characters >= LONG_TEXT else self.short).submit(work, *args)

    def shutdown(self, *, wait: bool) -> None:
        """Drop what has not begun, and `wait` for what is being done."""
        for executor in (self.short, self._long, self.guides):
            executor.shutdown(wait, cancel_futures=True)


def on_own_thread(work: Callable[[], Result]) -> Future[Result]:
    """Have the host's own code run on a thread that nothing else waits for: neither other work, nor the end of the
    interpreter, since who knows when it returns. Raises `RuntimeError` where there can be no more threads."""
    done = Future[Result]()
    done.set_running_or_notify_cancel()  # it is answered, whether anybody waits or not

    def run() -> None:
        try:
            result = work()
        except StopIteration as error:  # asyncio has a meaning of its own for it, and no future takes it
            done.set_exception(_caused(error))
        except Exception as error:
            done.set_exception(error)
        except BaseException as error:  # it wants the interpreter to end, or the thread: nothing to raise elsewhere
            done.set_exception(_caused(error))
        else:
            done.set_result(result)

    threading.Thread(target=run, name="asyncllm-hook", daemon=True).start()
    return done


def _caused(error: BaseException) -> RuntimeError:
    failure = RuntimeError(shown(error))
    failure.__cause__ = error
    return failure
