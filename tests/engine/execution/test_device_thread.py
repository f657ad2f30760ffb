from __future__ import annotations

import asyncio
import gc
import threading
import weakref

import pytest
import torch

from asyncllm.engine.execution.device_thread import DeviceThread


async def test_calls_run_in_order_on_one_thread_in_inference_mode() -> None:
    thread = DeviceThread("test-device")
    before = torch.is_inference_mode_enabled()
    seen: list[tuple[int, bool, int]] = []

    def call(number: int) -> int:
        seen.append((number, torch.is_inference_mode_enabled(), threading.get_ident()))
        return number

    try:
        futures = [thread.submit(lambda number=number: call(number)) for number in range(20)]  # type: ignore[misc]
        assert await asyncio.gather(*futures) == list(range(20))
    finally:
        await thread.aclose()
    assert [number for number, _, _ in seen] == list(range(20))
    assert {(mode, ident != threading.get_ident()) for _, mode, ident in seen} == {(True, True)}
    assert len({ident for _, _, ident in seen}) == 1
    assert torch.is_inference_mode_enabled() == before


async def test_a_failing_call_fails_its_own_future() -> None:
    thread = DeviceThread("test-device")
    try:
        failing, fine = thread.submit(lambda: 1 / 0), thread.submit(lambda: 1)
        with pytest.raises(ZeroDivisionError):
            await failing
        assert await fine == 1
    finally:
        await thread.aclose()


async def test_a_cancelled_future_stops_nothing() -> None:
    thread = DeviceThread("test-device")
    gate = threading.Event()
    try:
        cancelled, later = thread.submit(gate.wait), thread.submit(lambda: "later")
        cancelled.cancel()
        gate.set()
        assert await later == "later"
    finally:
        await thread.aclose()


async def test_closing_waits_for_what_was_submitted() -> None:
    thread = DeviceThread("test-device")
    done: list[int] = []
    gate = threading.Event()
    waiting = thread.submit(gate.wait)
    for number in range(5):
        thread.submit(lambda number=number: done.append(number))  # type: ignore[misc]
    closing = [asyncio.create_task(thread.aclose()) for _ in range(3)]
    await asyncio.sleep(0.01)
    assert thread.closing
    assert not any(task.done() for task in closing)
    with pytest.raises(RuntimeError, match="closed"):
        thread.submit(lambda: None)
    closing[0].cancel()
    gate.set()
    await asyncio.gather(waiting, *closing[1:])
    assert done == list(range(5))
    assert not any(each.name == "test-device" for each in threading.enumerate())
    await thread.aclose()


async def test_results_are_not_kept() -> None:
    class Result:
        pass

    thread = DeviceThread("test-device")
    try:
        result = await thread.submit(Result)
        reference = weakref.ref(result)
        del result
        await thread.submit(lambda: None)  # so the thread has gone past the first call
        gc.collect()
        assert reference() is None
    finally:
        await thread.aclose()


def test_the_loop_may_be_gone() -> None:
    gate = threading.Event()

    async def leave() -> DeviceThread:
        thread = DeviceThread("test-device")
        thread.submit(gate.wait)
        return thread

    thread = asyncio.run(leave())
    gate.set()
    asyncio.run(thread.aclose())
    assert not any(each.name == "test-device" for each in threading.enumerate())
