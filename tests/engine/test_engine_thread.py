from __future__ import annotations

import asyncio
import time
from concurrent.futures import Executor
from pathlib import Path

import pytest

from asyncllm import AsyncEngine, EngineConfig
from asyncllm.engine.model import ServedModel
from asyncllm.errors import EngineClosed, ModelLoadError
from asyncllm.testing.shadow_engine import ShadowModel
from asyncllm.testing.tiny_models import write_tiny_model


async def slow_load(config: EngineConfig, workers: Executor) -> ServedModel:
    """A download on a worker thread that nobody can interrupt, then a model."""
    await asyncio.get_running_loop().run_in_executor(workers, time.sleep, 3)
    return await ShadowModel()(config, workers)


async def test_closing_does_not_wait_for_a_model_that_is_being_loaded() -> None:
    engine = AsyncEngine(slow_load)
    starting = asyncio.ensure_future(engine.start())
    await asyncio.sleep(0.1)
    began = time.monotonic()
    await engine.aclose()
    assert time.monotonic() - began < 1
    with pytest.raises(EngineClosed):
        await starting


async def test_cancelling_the_start_gives_the_load_up() -> None:
    engine = AsyncEngine(slow_load)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await engine.start()
    began = time.monotonic()
    await engine.aclose()
    assert time.monotonic() - began < 1


async def test_a_foreign_error_while_loading_is_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_tiny_model(tmp_path)
    monkeypatch.setattr("asyncllm.engine.execution.loading.load_weights", lambda *args: 1 / 0)
    with pytest.raises(ModelLoadError, match="ZeroDivisionError") as caught:
        await AsyncEngine(str(folder)).start()
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
