"""A KV cache of 8-bit numbers through the GPU runner."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from asyncllm import AsyncEngine, SamplingParams
from asyncllm.testing.tiny_models import write_tiny_model

SETTINGS: dict[str, Any] = {"max_model_len": 512, "num_blocks": 200, "max_num_seqs": 16}


async def ask(folder: Path, **changes: Any) -> tuple[list[tuple[int, ...]], int]:
    async with AsyncEngine(folder, device="cuda", **SETTINGS, **changes) as engine:
        params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
        requests = [engine.generate(list(range(3, 4 + 27 * i)), params) for i in range(8)]
        tokens = [completion.token_ids for completion in await asyncio.gather(*requests)]
        return tokens, engine.statistics().memory_bytes["cache"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
async def test_half_the_bytes_and_mostly_the_same_tokens(dtype: str, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    expected, whole = await ask(folder, dtype=dtype)
    actual, narrow = await ask(folder, dtype=dtype, kv_cache_dtype="fp8")
    assert narrow * (4 if dtype == "float32" else 2) == whole
    firsts = [a[0] == b[0] for a, b in zip(actual, expected, strict=True)]
    assert sum(firsts) >= 6
    again, _ = await ask(folder, dtype=dtype, kv_cache_dtype="fp8", prefix_caching=False)
    assert sum(a == b for a, b in zip(again, actual, strict=True)) >= 6
