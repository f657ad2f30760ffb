from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from asyncllm import AsyncEngine
from asyncllm.inputs.tokenizer import Tokenizer
from asyncllm.testing.byte_tokenizer import byte_tokenizer
from asyncllm.testing.shadow_engine import ShadowModel
from asyncllm.testing.tiny_models import CHAT_TEMPLATE


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """A byte-level tokenizer of 512 tokens, with a chat template."""
    return byte_tokenizer(chat_template=CHAT_TEMPLATE)


@pytest.fixture
def no_thread_left() -> Iterator[None]:
    """Every thread that the test brings about is gone at its end, the process-wide exit watcher apart. A host's own
    function may have been answered for when its thread is about to end."""
    before = set(threading.enumerate())
    yield
    left = [thread for thread in threading.enumerate() if thread not in before and thread.name != "asyncllm-exit"]
    for thread in left:
        if thread.name == "asyncllm-hook":
            thread.join(5)
    assert not [thread.name for thread in left if thread.name != "asyncllm-hook" or thread.is_alive()]


async def eventually(reached: Callable[[], bool], seconds: float = 5.0) -> None:
    """Wait for something that another thread brings about."""
    end = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < end, "it never came about"
        await asyncio.sleep(0.005)


async def settled(engine: AsyncEngine, shadow: ShadowModel) -> None:
    """Nothing is left once the last step is done, and no plan was wrong."""
    async with asyncio.timeout(5):
        while engine.statistics().blocks_used:  # noqa: ASYNC110  (there is no such event)
            await asyncio.sleep(0.001)
    assert engine.statistics().blocks_used == engine.statistics().rows_used == 0
    if shadow.runner is not None:  # else it is in the engine's process, and a fault there fails its step
        assert not shadow.runner.faults
