"""Requests for which there is no token to sample, since the model computes no numbers for them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from asyncllm import AsyncEngine, Completion, SamplingParams, StructuredOutput
from asyncllm.errors import SamplingFailed
from asyncllm.testing.tiny_models import write_tiny_model
from tests.engine.conftest import eventually

POISON = 77
"""A token whose embedding is no number, and so nothing that follows it is."""
SETTINGS: dict[str, Any] = {"max_model_len": 256, "num_blocks": 100, "max_num_seqs": 8}
PROMPT = tuple(range(100, 150))
ILL = (*range(200, 250), POISON)


def write_ill_model(path: Path, *, tied: bool) -> Path:
    """Where the head is the embedding, the logit of that token is no number either, in any row."""
    write_tiny_model(path, config={"tie_word_embeddings": tied})
    (file,) = path.glob("*.safetensors")
    weights = load_file(file)
    weights["model.embed_tokens.weight"][POISON] = torch.nan
    save_file(weights, file, metadata={"format": "pt"})
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_ill_model(tmp_path_factory.mktemp("tied"), tied=True)


@pytest.fixture
def device() -> str:
    return "cpu"


def look(token_ids: Sequence[int], logits: np.ndarray[Any, Any]) -> None:
    """A processor that changes nothing."""


KINDS = [
    {"temperature": 0},
    {},
    {"top_k": 5, "top_p": 0.9},
    {"top_k": 450, "typical_p": 0.9},
    {"temperature": 0, "logprobs": 3},
    {"repetition_penalty": 1.3, "logprobs": 2, "logprob_token_ids": (4,)},
    {"structured_output": StructuredOutput(regex="[a-f]{9,30}-[0-9]+")},
    {"n": 2, "presence_penalty": 0.5},
]


def params(i: int, **changes: Any) -> SamplingParams:
    return SamplingParams(**{"seed": i, "max_tokens": 20, "ignore_eos": True, **KINDS[i], **changes})


async def ask(engine: AsyncEngine, prompt: Sequence[int]) -> list[Completion | BaseException]:
    requests = [engine.generate([*prompt, 30 + i], params(i)) for i in range(len(KINDS))]
    return await asyncio.gather(*requests, return_exceptions=True)


def tokens_of(answers: Sequence[Completion | BaseException]) -> list[list[tuple[int, ...]]]:
    found = []
    for answer in answers:
        assert isinstance(answer, Completion), answer
        found.append([choice.token_ids for choice in answer.choices])
    return found


@pytest.mark.parametrize("run_ahead", [0, 1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_only_who_has_no_numbers_fails(folder: Path, device: str, dtype: str, run_ahead: int) -> None:
    settings = {**SETTINGS, "dtype": dtype, "device": device, "run_ahead": run_ahead}
    async with AsyncEngine(folder, **settings) as engine:
        expected = tokens_of(await ask(engine, PROMPT))
        assert tokens_of(await ask(engine, PROMPT)) == expected or dtype != "float32"
        ill, well = await asyncio.gather(ask(engine, ILL), ask(engine, PROMPT))
        assert [type(answer) for answer in ill] == [SamplingFailed] * len(KINDS)
        assert "no logit is above -infinity" in str(ill[0])
        assert tokens_of(well) == expected or dtype != "float32"
        # A late token comes while its step still runs, and blocks go back with the step.
        await eventually(lambda: engine.statistics().blocks_used == engine.statistics().rows_used == 0)


async def test_no_block_of_it_is_found_later(folder: Path, device: str) -> None:
    async with AsyncEngine(folder, dtype="float32", device=device, block_size=16, **SETTINGS) as engine:
        with pytest.raises(SamplingFailed):
            await engine.generate([*range(100, 148), POISON], params(0))
        done = await engine.generate([*range(100, 148), 5], params(0))
        assert done.usage.cached_tokens == 0
        again = await engine.generate([*range(100, 148), 5], params(0))
        assert again.usage.cached_tokens > 0
        assert again.token_ids == done.token_ids


@pytest.mark.parametrize(("tied", "told"), [(True, []), (False, [POISON])], ids=["at once", "after a token"])
async def test_what_came_before_is_told(tied: bool, told: list[int], device: str, tmp_path: Path) -> None:
    write_ill_model(tmp_path, tied=tied)
    came: list[int] = []
    async with AsyncEngine(tmp_path, dtype="float32", device=device, **SETTINGS) as engine:
        stream = engine.stream(PROMPT, SamplingParams(max_tokens=9, allowed_token_ids=[POISON]))
        with pytest.raises(SamplingFailed):  # noqa: PT012
            async for delta in stream:
                came += delta.token_ids
        assert engine.statistics().tokens_generated == len(came)
    assert came == told


async def test_a_processor_is_not_blamed_for_it(folder: Path, device: str) -> None:
    async with AsyncEngine(folder, dtype="float32", device=device, **SETTINGS) as engine:
        hooked = params(0, logits_processors=[look])
        assert len((await engine.generate([5], hooked)).token_ids) == 20
        with pytest.raises(SamplingFailed):
            await engine.generate([POISON], hooked)
