"""engine.embed: the features of a text's last token, beside requests."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncllm import AsyncEngine, SamplingParams
from asyncllm.errors import ContextLengthError, EngineClosed, InvalidParamsError, InvalidPromptError
from asyncllm.testing.shadow_engine import ShadowModel
from asyncllm.testing.tiny_models import write_tiny_model


@pytest.mark.parametrize("window", [None, 40])
async def test_agrees_with_transformers(tmp_path: Path, window: int | None) -> None:
    kind = {} if window is None else {"model_type": "mistral", "sliding_window": window}
    folder = write_tiny_model(tmp_path, config=kind)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    texts = [list(range(3, 3 + length)) for length in (1, 2, 40, 300)]  # the last one takes two chunks
    async with AsyncEngine(str(folder), device="cpu", num_blocks=32, dtype="float32") as engine:
        found = await engine.embed(texts)
        assert engine.statistics().blocks_used == 0
    for text, embedding in zip(texts, found, strict=True):
        with torch.no_grad():
            hidden = reference.model(torch.tensor([text])).last_hidden_state[0, -1]
        expected = (hidden / hidden.norm()).numpy()
        np.testing.assert_allclose(embedding.embedding, expected, atol=1e-4)
        assert embedding.prompt_tokens == len(text)


async def test_beside_requests(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    async with AsyncEngine(str(folder), device="cpu", num_blocks=64) as engine:
        alone = await engine.generate("The quick brown fox", params)
        (vector,) = await engine.embed(["The capital of France"])
        together, vectors = await asyncio.gather(
            engine.generate("The quick brown fox", params), engine.embed(["The capital of France"] * 3)
        )
        assert together.token_ids == alone.token_ids
        assert all(each == vector for each in vectors)
        assert await engine.embed(text for text in ["The capital of France"]) == [vector]  # type: ignore[arg-type]
        assert np.isclose(np.linalg.norm(vector.embedding), 1)
        with pytest.raises(InvalidPromptError):
            await engine.embed([""])
        with pytest.raises(InvalidPromptError, match="list of texts"):
            await engine.embed("abc")
        with pytest.raises(ContextLengthError):
            await engine.embed([[5] * 5000])
    with pytest.raises(EngineClosed):
        await engine.embed(["x"])


async def test_a_device_that_cannot() -> None:
    async with AsyncEngine(ShadowModel()) as engine:
        with pytest.raises(InvalidParamsError, match="embeddings"):
            await engine.embed([[1]])


@pytest.mark.parametrize("delay", [0.0, 0.01, 0.03, 0.06])
async def test_closing_ends_it(tmp_path: Path, delay: float) -> None:
    folder = write_tiny_model(tmp_path)
    async with AsyncEngine(str(folder), device="cpu", num_blocks=32) as engine:
        embedding = asyncio.ensure_future(engine.embed([[1, 2, 3]] * 20_000))
        await asyncio.sleep(delay)
        await engine.aclose()
        with pytest.raises(EngineClosed):
            await asyncio.wait_for(embedding, 5)
