"""Requests that begin alike, through the GPU runner: their common blocks are read once a step."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncllm import AsyncEngine, SamplingParams
from asyncllm.engine.execution import step_program
from asyncllm.kernels.attention_plan import AttentionPlan, make_attention_plan
from asyncllm.testing.tiny_models import write_tiny_model
from tests.engine.execution.short_prefixes import share_short_prefixes

SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 512,
    "num_blocks": 200,
    "max_num_seqs": 16,
    "block_size": 16,
}
PROMPT = list(range(3, 120))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


async def ask(folder: Path, device: str) -> list[tuple[int, ...]]:
    async with AsyncEngine(folder, device=device, **SETTINGS) as engine:
        await engine.generate(PROMPT, SamplingParams(max_tokens=1))
        requests = [
            engine.generate(
                [*PROMPT[: 117 - 3 * (i % 4)], 7 + i],
                SamplingParams(temperature=(i % 2) / 2, seed=i, max_tokens=60, ignore_eos=True),
            )
            for i in range(12)
        ]
        return [completion.token_ids for completion in await asyncio.gather(*requests)]


async def test_equals_the_cpu(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    share_short_prefixes(monkeypatch)
    plans: list[AttentionPlan] = []

    def keep(*arguments: Any, **named: Any) -> AttentionPlan:
        plans.append(make_attention_plan(*arguments, **named))
        return plans[-1]

    monkeypatch.setattr(step_program, "make_attention_plan", keep)
    seen: list[int] = []

    async def watch() -> None:
        while True:
            await asyncio.sleep(0.002)
            if plans:
                units = await asyncio.to_thread(lambda: plans[0].small_units.to("cpu", non_blocking=False))
                seen.append(int(units[:, 15].sum()))

    watching = asyncio.create_task(watch())
    actual = await ask(folder, "cuda")
    watching.cancel()
    assert max(seen) > 0
    torch.cuda.synchronize()
    assert actual == await ask(folder, "cpu")
