"""Whole programs around an engine, each in a process of its own: how they begin, and what they have in common."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from asyncllm import AsyncEngine
from asyncllm.engine.stream import TokenStream
from asyncllm.errors import EngineForked

ROOT = Path(__file__).parent.parent.parent

HEAD = """
    import asyncio, gc, os, signal, sys, threading, time, warnings
    from asyncllm import AsyncEngine, SamplingParams
    from asyncllm.testing.shadow_engine import ShadowModel
    from tests.engine.programs import begin, uses_not_refused
    LONG = SamplingParams(temperature=0, max_tokens=400)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that put the tests behind has it ignored
    def say(*words):
        print(*words, flush=True)
"""


def start_program(source: str) -> subprocess.Popen[str]:
    """`HEAD` and this, in a process group of its own."""
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(HEAD) + textwrap.dedent(source)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        start_new_session=True,
    )


async def begin(stream: TokenStream, engine: AsyncEngine) -> TokenStream:
    """The stream of an engine that was not started, begun."""
    await engine.start()
    await stream.start()
    return stream


async def uses_not_refused(engine: AsyncEngine, stream: TokenStream) -> list[object]:
    """In a fork: what may be done with its parent's engine, and with a stream that has started there."""
    waiting: tuple[Callable[[], Awaitable[Any]], ...] = (
        stream.__anext__,
        stream.start,
        stream.result,
        stream.aclose,
        engine.start,
        engine.aclose,
        lambda: engine.generate([5]),
        lambda: engine.tokenize("x"),
    )
    found: list[object] = []
    for use in waiting:
        try:
            await asyncio.wait_for(use(), 5)
        except EngineForked:
            continue
        found.append(use)
    for call in (engine.statistics, lambda: engine.abort("x")):
        try:
            call()
        except EngineForked:
            continue
        found.append(call)
    return found
