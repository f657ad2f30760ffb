from __future__ import annotations

import asyncio
import ctypes
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


def test_what_runs_without_the_interpreter_wakes_it() -> None:
    """A look is taken after each wake-up; timers and other threads' callbacks come as before."""
    loop = EngineLoop()
    looks = [0]
    enough = asyncio.Event()

    def look() -> None:
        looks[0] += 1
        if looks[0] >= 50:
            enough.set()

    async def main() -> None:
        address = loop.watch(look)
        if address is None:
            return
        post = ctypes.CDLL(None).sem_post  # gives the interpreter up, as a kernel that calls it has
        poster = threading.Thread(target=lambda: [post(ctypes.c_void_p(address)) for _ in range(50)])
        poster.start()
        await enough.wait()
        poster.join()
        assert await loop.run_in_executor(None, lambda: "from a thread") == "from a thread"
        start = time.monotonic()
        await asyncio.sleep(0.05)
        assert time.monotonic() - start >= 0.05
        loop.unwatch(look)
        seen = looks[0]
        await asyncio.sleep(0.01)
        assert looks[0] == seen

    loop.run_until_complete(asyncio.wait_for(main(), 30))
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()


def test_no_wake_up_is_lost_while_a_semaphore_takes_over() -> None:
    for _ in range(50):
        loop = EngineLoop()
        _take_over(loop)
        loop.close()


def _take_over(loop: EngineLoop) -> None:
    done = loop.create_future()
    thread = threading.Thread(target=lambda: loop.call_soon_threadsafe(done.set_result, None))

    async def main() -> None:
        thread.start()
        loop.watch(lambda: None)
        await done

    loop.run_until_complete(asyncio.wait_for(main(), 30))
    thread.join()
