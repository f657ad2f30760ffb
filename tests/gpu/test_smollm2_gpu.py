"""The real SmolLM2-135M-Instruct on the GPU: its greedy tokens, teacher-forced through transformers in float32."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from asyncllm import AsyncEngine, EngineConfig, SamplingParams
from asyncllm.cli import find_smollm2, main
from asyncllm.inputs.tokenizer import Tokenizer
from asyncllm.weights.source import resolve_source
from asyncllm.weights.tensors import iterate_tensors

TEXT = (
    "The capital of France is Paris, a city on the river Seine where about two million people live. Here is a short "
    "program in Python:\n\ndef add(first, second):\n    return first + second\n\nIt takes two numbers and gives back "
    "their sum. Water boils at 100 degrees at sea level; on a high mountain it boils earlier. "
)
LENGTHS = (1, 2, 5, 16, 17, 33, 64, 100, 129, 256, 511, 1100)
GREEDY = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Each starts somewhere else in the text, so that no two share a prefix."""
    source = resolve_source(find_smollm2(), EngineConfig())
    ids = Tokenizer.load(source.tokenizer).encode(TEXT * 20, add_special_tokens=False)
    return [ids[7 * i : 7 * i + length] for i, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def reference() -> LlamaForCausalLM:
    source = resolve_source(find_smollm2(), EngineConfig())
    model = LlamaForCausalLM(LlamaConfig(**source.config)).eval()
    missing, unexpected = model.load_state_dict(dict(iterate_tensors(source)), strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    return model.cuda()


def gaps(reference: LlamaForCausalLM, prompt: Sequence[int], output: Sequence[int]) -> list[float]:
    """How far each token of an output lies under the reference's largest logit at its position."""
    with torch.inference_mode():
        ids = torch.tensor([[*prompt, *output]], device="cuda")
        logits = reference(ids).logits[0, len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(output, device="cuda")[:, None])[:, 0]
    found: list[float] = (logits.max(dim=1).values - chosen).tolist()
    return found


@pytest.mark.parametrize(
    ("dtype", "device", "bound", "share"),
    [
        ("float32", "cuda", 0.01, 1.0),
        ("bfloat16", "cuda", 1.0, 0.95),
        ("auto", "auto", 1.0, 0.95),
        ("float32", "cpu", 0.01, 1.0),
    ],
)
async def test_answers_are_the_models(  # noqa: PLR0917
    dtype: str, device: str, bound: float, share: float, prompts: list[list[int]], reference: LlamaForCausalLM
) -> None:
    """As on the CPU, which is asked for by name on a machine that has a GPU."""
    async with AsyncEngine(find_smollm2(), dtype=dtype, device=device, max_model_len=2048) as engine:
        done = await asyncio.gather(*(engine.generate(prompt, GREEDY) for prompt in prompts))
        assert engine.statistics().blocks_used == 0
    found = [gap for prompt, each in zip(prompts, done, strict=True) for gap in gaps(reference, prompt, each.token_ids)]
    assert len(found) == 48 * len(prompts)
    assert max(found) <= bound
    assert found.count(0.0) >= share * (len(found) - 2)  # where two logits are one, either may be the first


@pytest.mark.parametrize(
    ("settings", "share"), [({"kv_cache_dtype": "fp8"}, 0.85), ({"deterministic": True}, 0.95)], ids=str
)
async def test_answers_of_other_settings(
    settings: dict[str, Any], share: float, prompts: list[list[int]], reference: LlamaForCausalLM
) -> None:
    """How many of the greedy tokens are those that float32 would have chosen in their place."""
    async with AsyncEngine(find_smollm2(), device="cuda", dtype="bfloat16", max_model_len=2048, **settings) as engine:
        done = await asyncio.gather(*(engine.generate(prompt, GREEDY) for prompt in prompts))
    found = [gap for prompt, each in zip(prompts, done, strict=True) for gap in gaps(reference, prompt, each.token_ids)]
    agreed = found.count(0.0) / len(found)
    print(f"{settings}: {agreed:.1%} of {len(found)} greedy tokens agree, the others lie up to {max(found):.2f} under")
    assert agreed >= share


def test_the_demo_uses_it_unasked(capsys: pytest.CaptureFixture[str]) -> None:
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.max_memory_allocated()
    assert main(["demo"]) == 0
    assert torch.cuda.max_memory_allocated() > before + 2 * 130_000_000  # the weights, in 16 bits
    assert "tokens/s" in capsys.readouterr().out
