"""The first GPU's clock and power while something runs, as `nvidia-smi` tells them.

Under load a GPU lowers its clock to stay within its power, and everything that is computed then takes longer.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import threading
import time
from dataclasses import dataclass
from types import TracebackType
from typing import IO, Self

_INTERVAL = 50  # milliseconds
_COMMAND = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw.instant", "--format=csv,noheader,nounits", "--id=0"]


@dataclass(frozen=True, slots=True)
class Power:
    """Means over some time."""

    clock: float  # of the multiprocessors, MHz
    watts: float


class PowerLog:
    """Reads clock and power while it is entered; where there is no `nvidia-smi`, nothing."""

    def __init__(self) -> None:
        self._readings: list[tuple[float, float, float]] = []  # when, MHz, W
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None

    def __enter__(self) -> Self:
        if shutil.which(_COMMAND[0]):
            self._process = subprocess.Popen([*_COMMAND, f"--loop-ms={_INTERVAL}"], stdout=subprocess.PIPE, text=True)
            assert self._process.stdout is not None
            self._reader = threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True)
            self._reader.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None and self._reader is not None:
            self._process.kill()
            self._process.wait()
            self._reader.join()

    def _read(self, lines: IO[str]) -> None:
        with lines:
            for line in lines:
                self.add(time.perf_counter(), line)

    def add(self, now: float, line: str) -> None:
        """A line of `nvidia-smi`; one that holds no numbers says nothing."""
        try:
            clock, watts = map(float, line.split(","))
        except ValueError:
            return
        self._readings.append((now, clock, watts))

    def mean(self, start: float, end: float) -> Power | None:
        """From `start` to `end` of `time.perf_counter`; None without a reading."""
        found = [(clock, watts) for now, clock, watts in list(self._readings) if start <= now <= end]
        if not found:
            return None
        clocks, powers = zip(*found, strict=True)
        return Power(statistics.fmean(clocks), statistics.fmean(powers))
