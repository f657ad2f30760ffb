"""Whether a parser's time grows with its text, or with the square of it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from time import process_time


def check_linear(run: Callable[[int], object], count: int = 250) -> None:
    """16 times as much takes 16 times as long, not 256 times."""

    def seconds(count: int) -> float:
        start = process_time()
        run(count)
        return process_time() - start

    collecting = gc.isenabled()
    gc.disable()  # what other tests left behind would be looked through in the longer run only
    try:
        assert min(seconds(16 * count) for _ in range(2)) < 64 * min(seconds(count) for _ in range(2)) + 0.02
    finally:
        if collecting:
            gc.enable()
