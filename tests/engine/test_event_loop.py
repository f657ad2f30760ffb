from __future__ import annotations

import asyncio
import threading
import time

from asyncllm.engine.event_loop import EngineLoop


def test_callbacks_timers_and_tasks() -> None:
    loop = EngineLoop()
    seen: list[str] = []

    async def main() -> str:
        loop.call_soon(seen.append, "soon")
        loop.call_later(0.02, seen.append, "later")
        await asyncio.sleep(0.05)
        return await loop.run_in_executor(None, lambda: "from a thread")

    assert loop.run_until_complete(main()) == "from a thread"
    assert seen == ["soon", "later"]
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()


def test_no_wake_up_is_lost() -> None:
    loop = EngineLoop()
    woken, total, threads = [0], 3000, 4
    everything = loop.create_future()

    def wake() -> None:
        woken[0] += 1
        if woken[0] == total * threads:
            everything.set_result(None)

    def poster() -> None:
        for n in range(total):
            loop.call_soon_threadsafe(wake)
            if n % 100 == 0:
                time.sleep(0.0001)  # let the loop fall asleep

    posters = [threading.Thread(target=poster) for _ in range(threads)]
    for thread in posters:
        thread.start()
    loop.run_until_complete(asyncio.wait_for(everything, 30))
    for thread in posters:
        thread.join()
    loop.close()


def test_an_idle_loop_sleeps() -> None:
    loop = EngineLoop()
    passes = [0]
    select = loop._selector.select

    def counting(timeout: float | None) -> tuple[()]:
        passes[0] += 1
        return select(timeout)

    loop._selector.select = counting  # type: ignore[method-assign]
    cpu = time.thread_time()
    loop.run_until_complete(asyncio.sleep(0.3))
    assert passes[0] < 20
    assert time.thread_time() - cpu < 0.1
    loop.close()
