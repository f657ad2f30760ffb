from __future__ import annotations

import asyncio
import contextvars

import pytest

from asyncllm.engine.event_loop import EngineLoop
from asyncllm.engine.side_work import SideWork
from asyncllm.errors import EngineClosed


async def work(seconds: float) -> float:
    await asyncio.sleep(seconds)
    return 1 / seconds


def test_each_is_answered() -> None:
    loop = EngineLoop()
    side = SideWork(loop, contextvars.Context())
    quick, wrong, long = side.begin(work(0.01)), side.begin(work(0.0)), side.begin(work(60))

    async def serve() -> None:
        await asyncio.wrap_future(quick)
        await side.aclose()

    loop.run_until_complete(serve())
    between = side.begin(work(1))  # the loop has stopped and is not closed
    loop.close()
    side.end()
    after = side.begin(work(1))
    assert quick.result(0) == 100
    with pytest.raises(ZeroDivisionError):
        wrong.result(0)
    for refused in (long, between, after):
        with pytest.raises(EngineClosed):
            refused.result(0)


def test_a_thread_that_failed_leaves_no_future_behind() -> None:
    loop = EngineLoop()
    side = SideWork(loop, contextvars.Context())
    running = side.begin(work(0.05))
    loop.run_until_complete(asyncio.sleep(0.01))
    side.end()
    with pytest.raises(EngineClosed):
        running.result(0)
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.close()
