"""The Llama family against transformers on the same random weights: every feature of the config."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from asyncllm.testing.tiny_models import write_tiny_model
from tests.models.single_model import SingleModel

TOLERANCE = 1e-4
SHORT = [1.0 + 0.1 * i for i in range(8)]
LONG = [1.5 + 0.5 * i for i in range(8)]


def scaled(max_position_embeddings: int = 128, **rope: Any) -> dict[str, Any]:
    return {"max_position_embeddings": max_position_embeddings, "rope_scaling": rope}


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama with biases": {"attention_bias": True, "mlp_bias": True},
    "llama, tied": {"tie_word_embeddings": True},
    "llama, head_dim": {"head_dim": 32},
    "llama, no grouping": {"num_key_value_heads": None},
    "llama, one KV head": {"num_key_value_heads": 1},
    "llama, eps": {"rms_norm_eps": 0.1},
    "llama, gelu": {"hidden_act": "gelu"},
    "llama, tanh gelu": {"hidden_act": "gelu_pytorch_tanh"},
    "mistral, window": {"model_type": "mistral", "sliding_window": 20},
    "mistral, no window": {"model_type": "mistral", "sliding_window": None},
    "qwen2": {"model_type": "qwen2", "sliding_window": 20, "use_sliding_window": False},
    "qwen2, windows": {
        "model_type": "qwen2",
        "num_hidden_layers": 3,
        "use_sliding_window": True,
        "sliding_window": 20,
        "max_window_layers": 1,
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 32},
    "qwen3, biases, tied": {
        "model_type": "qwen3",
        "head_dim": 16,
        "attention_bias": True,
        "tie_word_embeddings": True,
    },
    "qwen3, layer types": {
        "model_type": "qwen3",
        "head_dim": 16,
        "num_hidden_layers": 3,
        "use_sliding_window": True,
        "sliding_window": 9,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "rope, theta": {"rope_theta": 500.0},
    "rope, linear": scaled(type="linear", factor=4.0),
    "rope, linear, new style": {
        "rope_theta": None,
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0},
    },
    "rope, dynamic": scaled(32, rope_type="dynamic", factor=4.0),
    "rope, llama3": scaled(
        rope_type="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=32,
    ),
    "rope, yarn": scaled(**YARN),
    "rope, yarn, attention_factor": scaled(**YARN, attention_factor=1.0),
    "rope, yarn, mscale": scaled(**YARN, mscale=0.7, mscale_all_dim=1.2),
    "rope, yarn, beta": scaled(**YARN, beta_fast=16, beta_slow=2),
    "rope, yarn, not truncated": scaled(**YARN, truncate=False),
    "rope, longrope": scaled(
        rope_type="longrope", short_factor=SHORT, long_factor=LONG, original_max_position_embeddings=32
    ),
    "rope, longrope, factors": scaled(
        rope_type="longrope",
        short_factor=SHORT,
        long_factor=LONG,
        factor=2.0,
        attention_factor=1.3,
        original_max_position_embeddings=32,
    ),
    "rope, longrope, length beside": {
        **scaled(rope_type="longrope", short_factor=SHORT, long_factor=LONG, factor=4.0),
        "original_max_position_embeddings": 32,
    },
}


@cache
def prompt(length: int) -> list[int]:
    return torch.randint(3, 512, (length,), generator=torch.Generator().manual_seed(length)).tolist()


def reference(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.inference_mode()
def reference_logits(folder: Path, token_ids: list[int]) -> Tensor:
    return reference(folder)(torch.tensor([token_ids])).logits[0]


def assert_close(actual: Tensor, expected: Tensor) -> None:
    assert (actual - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_logits_are_those_of_transformers(config: dict[str, Any], tmp_path: Path) -> None:
    """Whole, in chunks, and token by token at the end; 24 and 80 tokens, where the original context is 32."""
    write_tiny_model(tmp_path, config=config)
    model = SingleModel(tmp_path)
    for length, cuts in ((24, ((), (7, 8, 16))), (80, ((), (7, 8, 20, 77, 78, 79)))):
        expected = reference_logits(tmp_path, prompt(length))
        for each in cuts:
            assert_close(model.logits(prompt(length), each), expected)


@pytest.mark.parametrize("name", ["rope, dynamic", "rope, longrope", "llama"])
def test_generation_with_a_cache_is_that_of_transformers(name: str, tmp_path: Path) -> None:
    """A rope that depends on length: the prompt is rotated for its own length, what follows for the length so far."""
    write_tiny_model(tmp_path, config=CONFIGS[name])
    model, token_ids = SingleModel(tmp_path), prompt(60)
    for prompt_length in (24, 40):
        expected = reference(tmp_path)  # a new one: it remembers the longest length it has seen
        with torch.inference_mode():
            output = expected(torch.tensor([token_ids[:prompt_length]]), use_cache=True)
            logits = [output.logits[0]]
            for token in token_ids[prompt_length:]:
                output = expected(torch.tensor([[token]]), cache=output.cache, use_cache=True)
                logits.append(output.logits[0])
        cuts = (9, prompt_length, *range(prompt_length + 1, 60))
        assert_close(model.logits(token_ids, cuts, prompt_tokens=prompt_length), torch.cat(logits))


def test_dynamic_rope_leaves_short_prompts_alone(tmp_path: Path) -> None:
    plain = SingleModel(write_tiny_model(tmp_path / "plain", config={"max_position_embeddings": 32}))
    dynamic = SingleModel(write_tiny_model(tmp_path / "dynamic", config=CONFIGS["rope, dynamic"]))
    assert torch.equal(plain.logits(prompt(24)), dynamic.logits(prompt(24)))
    assert not torch.allclose(plain.logits(prompt(80))[1], dynamic.logits(prompt(80))[1], atol=1e-2)


def test_yarn_attention_factor_counts(tmp_path: Path) -> None:
    default = SingleModel(write_tiny_model(tmp_path / "default", config=CONFIGS["rope, yarn"]))
    given = SingleModel(write_tiny_model(tmp_path / "given", config=CONFIGS["rope, yarn, attention_factor"]))
    assert not torch.allclose(default.logits(prompt(24)), given.logits(prompt(24)), atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_close_to_float32(dtype: torch.dtype, tmp_path: Path) -> None:
    """No worse than twice the error of transformers in the same dtype."""
    write_tiny_model(tmp_path, config={"model_type": "qwen3", "head_dim": 32})
    exact = reference_logits(tmp_path, prompt(80))
    with torch.inference_mode():
        rounded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)(torch.tensor([prompt(80)])).logits[0]
    own = SingleModel(tmp_path, dtype=dtype).logits(prompt(80), (7, 79))
    assert own.dtype == dtype
    assert (own.float() - exact).abs().mean() < 2 * (rounded.float() - exact).abs().mean()


def test_positions_outside_the_window_are_not_read(tmp_path: Path) -> None:
    """Blocks that fell out of a layer's window may hold anything, not-a-number included."""
    write_tiny_model(tmp_path, config={"model_type": "mistral", "sliding_window": 20})
    model, token_ids = SingleModel(tmp_path, block_size=8), prompt(80)
    expected = model.logits(token_ids)
    model.start(80)
    parts = []
    for start, stop in ((0, 40), (40, 41), (41, 70), (70, 71), (71, 80)):
        outside = max(0, start - 20 + 1) // 8
        model.cache[:, model.rows.tables[0, 0, :outside]] = torch.nan
        parts.append(model.feed(start, token_ids[start:stop]))
    assert_close(torch.cat(parts), expected)


def test_a_window_reads_exactly_its_positions(tmp_path: Path) -> None:
    """The key `window` positions back changes nothing, the one after it does."""
    config = {"model_type": "mistral", "sliding_window": 20, "num_hidden_layers": 1}
    model, token_ids = SingleModel(write_tiny_model(tmp_path, config=config)), prompt(60)
    expected = model.logits(token_ids)[59]
    for position, same in ((39, True), (40, False)):
        changed = [*token_ids]
        changed[position] += 1 if changed[position] < 511 else -1
        for cuts in ((), (59,)):
            assert torch.allclose(model.logits(changed, cuts)[59], expected, atol=TOLERANCE) == same
