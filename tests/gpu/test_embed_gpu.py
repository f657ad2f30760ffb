"""engine.embed on the GPU: as the CPU has it, beside requests, and giving everything back."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncllm import AsyncEngine, SamplingParams
from asyncllm.engine.execution import cuda_embedder
from asyncllm.errors import EngineClosed, InsufficientMemoryError
from asyncllm.testing.tiny_models import write_tiny_model

SIZES: dict[str, Any] = {"dtype": "float32", "max_model_len": 512, "num_blocks": 200, "max_num_seqs": 16}
TEXTS = [list(range(3, 3 + length)) for length in (1, 2, 40, 65, 300, 500)]
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "windows": {
        "model_type": "qwen2",
        "num_hidden_layers": 3,
        "use_sliding_window": True,
        "sliding_window": 40,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    },
    "dynamic rope": {
        "max_position_embeddings": 128,
        "rope_scaling": {"rope_type": "dynamic", "factor": 4.0},
    },
}


@pytest.fixture(params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path, config=MODELS[request.param])


async def embed(folder: Path, device: str, **changes: Any) -> list[list[float]]:
    async with AsyncEngine(folder, device=device, **{**SIZES, **changes}) as engine:
        return [each.embedding for each in await engine.embed(TEXTS)]


@pytest.mark.parametrize("chunk", [24, 1024])
async def test_equals_the_cpu(chunk: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_embedder, "CHUNK", chunk)
    np.testing.assert_allclose(await embed(folder, "cuda"), await embed(folder, "cpu"), atol=1e-4)


@pytest.mark.parametrize(
    "settings", [{"kv_cache_dtype": "fp8"}, {"deterministic": True}, {"dtype": "bfloat16"}], ids=str
)
async def test_other_settings(settings: dict[str, Any], tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    actual, expected = await embed(folder, "cuda", **settings), await embed(folder, "cpu")
    assert all(float(np.dot(a, b)) > 0.98 for a, b in zip(actual, expected, strict=True))


@pytest.mark.parametrize("run_ahead", [0, 2])
async def test_beside_requests(
    run_ahead: int, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither notices the other: graphs, the pool and the texts' own cache."""
    monkeypatch.setattr(cuda_embedder, "CHUNK", 64)

    async def ask(engine: AsyncEngine) -> list[tuple[int, ...]]:
        params = [SamplingParams(temperature=i / 4, seed=i, max_tokens=60, ignore_eos=True) for i in range(5)]
        requests = [engine.generate(list(range(9, 30 + 20 * i)), each) for i, each in enumerate(params)]
        return [completion.token_ids for completion in await asyncio.gather(*requests)]

    async with AsyncEngine(folder, run_ahead=run_ahead, **SIZES) as engine:
        tokens, alone = await ask(engine), await engine.embed(TEXTS)
        for _ in range(2):
            together = await asyncio.gather(ask(engine), engine.embed(TEXTS), ask(engine), engine.embed(TEXTS))
            assert together[0] == together[2] == tokens
            for found in (together[1], together[3]):
                vectors = [each.embedding for each in found]
                np.testing.assert_allclose(vectors, [each.embedding for each in alone], atol=1e-6)
        assert engine.statistics().blocks_used == 0
    assert "no graph" not in caplog.text


async def test_nothing_synchronises(folder: Path) -> None:
    async with AsyncEngine(folder, **SIZES) as engine:
        await engine.embed(TEXTS)
        torch.cuda.set_sync_debug_mode("error")
        try:
            await engine.embed(TEXTS)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("delay", [0.0, 0.01, 0.1])
async def test_closing_ends_it_and_gives_everything_back(delay: float, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    await embed(folder, "cuda")

    def held() -> int:
        gc.collect()
        torch.cuda.synchronize()
        return torch.cuda.memory_reserved()

    before = held()
    async with AsyncEngine(folder, **SIZES) as engine:
        texts = [asyncio.ensure_future(engine.embed(TEXTS * 500)) for _ in range(3)]
        await asyncio.sleep(delay)
        texts[0].cancel()
        await engine.aclose()
        for text in texts[1:]:
            with pytest.raises(EngineClosed):
                await asyncio.wait_for(text, 5)
    assert held() == before


async def test_memory_is_accounted_for_and_used_again(tmp_path: Path) -> None:
    async with AsyncEngine(write_tiny_model(tmp_path), **SIZES) as engine:
        before = engine.statistics().memory_bytes["workspace"]
        await engine.embed([TEXTS[-1]])
        after = engine.statistics().memory_bytes["workspace"]
        assert after > before
        await engine.embed([TEXTS[-1]] * 20)
        assert engine.statistics().memory_bytes["workspace"] == after


async def test_a_text_that_does_not_fit_hurts_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    async with AsyncEngine(write_tiny_model(tmp_path), **SIZES) as engine:
        params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
        expected = (await engine.generate([5, 6, 7], params)).token_ids
        running = asyncio.ensure_future(engine.generate([5, 6, 7], params))
        with monkeypatch.context() as patch:
            patch.setattr(cuda_embedder, "allocate_device_cache", full)
            with pytest.raises(InsufficientMemoryError, match="a text of 300 tokens"):
                await engine.embed([TEXTS[4]])
        assert (await running).token_ids == expected
        assert len(await engine.embed([TEXTS[4]])) == 1
