"""A server to measure, in a process of its own: it says its ports, then its processor time whenever it is asked."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO


@dataclass(frozen=True, slots=True)
class ServerProcess:
    """One of them, as the measuring process sees it."""

    ports: Mapping[str, int]  # by the name of what is served there
    stdin: IO[str]
    stdout: IO[str]

    def processor_time(self) -> float:
        """Seconds so far."""
        self.stdin.write("\n")
        self.stdin.flush()
        return float(self.stdout.readline())


@contextmanager
def server_process(module: str, *arguments: str) -> Iterator[ServerProcess]:
    """Run the module, which calls `answer`; it ends with the block."""
    command = [sys.executable, "-m", module, *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield ServerProcess(json.loads(process.stdout.readline()), process.stdin, process.stdout)
        process.stdin.close()


async def answer(ports: Mapping[str, int], processor_time: Callable[[], float]) -> None:
    """In that process, once it listens: until the measuring one asks no more."""
    print(json.dumps(ports), flush=True)
    while await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline):
        print(processor_time(), flush=True)
