"""Model loaders for engines in processes of their own, which import them from here."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from asyncllm import AsyncEngine
from asyncllm.config import EngineConfig
from asyncllm.engine.execution.runner import StepTicket
from asyncllm.engine.isolation.engine_process import EngineProcess
from asyncllm.engine.model import ServedModel
from asyncllm.engine.plan import StepPlan
from asyncllm.errors import EngineDead
from asyncllm.testing.shadow_engine import ShadowModel

FATAL, DEVICE_FAULT, SLOW = 501, 502, 503
"""Tokens of a prompt that the runner below does not survive, reports as its own end, or is long about."""


def child_of(engine: AsyncEngine) -> int:
    """The number of its process."""
    home = engine._home
    assert isinstance(home, EngineProcess)
    child = home._core.dispatcher._child
    assert child is not None
    return child.pid


class DangerousRunner:
    """A runner of the shadow's that some prompts are too much for."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner

    def launch(self, plan: StepPlan) -> StepTicket:
        tokens = {token_id for chunk in plan.chunks for token_id in chunk.token_ids.tolist()}
        if FATAL in tokens:
            os.kill(os.getpid(), signal.SIGSEGV)
        if DEVICE_FAULT in tokens:
            raise EngineDead("the device is lost")
        if SLOW in tokens:
            time.sleep(600)
        return self._runner.launch(plan)

    async def aclose(self) -> None:
        await self._runner.aclose()


@dataclass
class DangerousModel:
    """The shadow on such a runner."""

    shadow: ShadowModel = field(default_factory=lambda: ShadowModel(latency=0.005))

    async def __call__(self, config: EngineConfig, workers: Executor) -> ServedModel:
        model = await self.shadow(config, workers)
        return replace(model, runner=DangerousRunner(model.runner))


@dataclass
class CountedModel:
    """Notes each load as a line in a file; `act` is done before the load with its number, 0 first."""

    notes: Path
    act: Callable[[int], None]

    async def __call__(self, config: EngineConfig, workers: Executor) -> ServedModel:
        number = self.loads
        with self.notes.open("a") as file:
            file.write(f"{os.getpid()}\n")
        self.act(number)
        return await DangerousModel()(config, workers)

    @property
    def loads(self) -> int:
        return len(self.notes.read_text().splitlines()) if self.notes.exists() else 0


def die_always(number: int) -> None:
    os._exit(7)


def die_later(number: int) -> None:
    if number > 0:
        os._exit(7)


def die_twice_later(number: int) -> None:
    if number in (1, 2):
        os._exit(7)


def be_slow_later(number: int) -> None:
    if number > 0:
        time.sleep(2.0)


def be_wrong(number: int) -> None:
    raise KeyError("no such thing")


def be_wrong_by_name(number: int) -> None:
    from asyncllm.errors import InsufficientMemoryError

    raise InsufficientMemoryError("2 TB are needed") from MemoryError("malloc")


async def never_loads(config: EngineConfig, workers: Executor) -> ServedModel:
    await asyncio.get_running_loop().create_future()
    raise AssertionError


async def blocks_its_process(config: EngineConfig, workers: Executor) -> ServedModel:
    threading.Event().wait()
    raise AssertionError


def prints(number: int) -> None:
    print("printed by the model", flush=True)
