from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFValueType
from transformers import AutoConfig, AutoModelForCausalLM

from asyncllm.config import EngineConfig
from asyncllm.errors import CheckpointError, UnsupportedModelError
from asyncllm.testing.tiny_models import FloatArray, tiny_config, tiny_weights
from asyncllm.weights.source import ModelSource, resolve_source
from asyncllm.weights.tensors import iterate_tensors
from tests.weights.gguf_files import write_gguf

UINT, REAL, TEXT = GGUFValueType.UINT32, GGUFValueType.FLOAT32, GGUFValueType.STRING


def resolve(path: Path) -> ModelSource:
    return resolve_source(str(path), EngineConfig())


def write(path: Path, config: Mapping[str, Any] | None = None, **options: Any) -> Path:
    full = tiny_config(**(config or {}))
    return write_gguf(path / "tiny.gguf", full, tiny_weights(full), **options)


def logits(config: Mapping[str, Any], weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Of transformers' own model, at 40 positions."""
    options = {name: value for name, value in config.items() if name not in ("model_type", "dtype", "torch_dtype")}
    settings = AutoConfig.for_model(config["model_type"], **options)
    model = AutoModelForCausalLM.from_config(settings, dtype=torch.float32)  # type: ignore[no-untyped-call]  # it has none
    missing, unexpected = model.load_state_dict(dict(weights), strict=False)
    assert not unexpected
    assert set(missing) <= ({"lm_head.weight"} if config["tie_word_embeddings"] else set())
    model.tie_weights()
    with torch.inference_mode():
        output: torch.Tensor = model.eval()(torch.arange(40)[None] * 7 % 512).logits
    return output


def assert_same_logits(config: dict[str, Any], weights: Mapping[str, FloatArray], path: Path) -> None:
    source = resolve(path)
    found = logits(source.config, {name: tensor.clone() for name, tensor in iterate_tensors(source)})
    expected = logits(config, {name: torch.from_numpy(weight) for name, weight in weights.items()})
    assert expected.abs().max() > 1
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama, tied": {"tie_word_embeddings": True},
    "llama, biases": {"attention_bias": True, "mlp_bias": True},
    "llama, head_dim": {"head_dim": 32},
    "llama, theta and eps": {"rope_theta": 500000.0, "rms_norm_eps": 1e-5},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "head_dim": 32},
}


@pytest.mark.parametrize("name", MODELS)
def test_transformers_computes_the_same_from_both(tmp_path: Path, name: str) -> None:
    """Names, rows, biases, config: from a GGUF and from the weights that it was made of."""
    config = tiny_config(**MODELS[name])
    weights = tiny_weights(config)
    path = write_gguf(tmp_path / "tiny.gguf", config, weights)
    found = dict(resolve(path).config)
    assert {
        key: found[key] for key in config if key not in ("torch_dtype", "bos_token_id", "eos_token_id", "pad_token_id")
    }
    assert found["model_type"] == config["model_type"]
    assert found["tie_word_embeddings"] == config["tie_word_embeddings"]
    assert_same_logits(config, weights, path)


def test_mistral_is_a_llama_with_a_window(tmp_path: Path) -> None:
    config = tiny_config(model_type="mistral", sliding_window=16)
    weights = tiny_weights(config)
    window = {"llama.attention.sliding_window": (16, UINT)}
    path = write_gguf(tmp_path / "tiny.gguf", config, weights, extra=window)
    source = resolve(path)
    assert (source.config["model_type"], source.config["sliding_window"]) == ("mistral", 16)
    assert_same_logits(config, weights, path)
    wide = {"llama.attention.sliding_window": (2048, UINT)}  # as long as the context
    assert resolve(write_gguf(path, config, weights, extra=wide)).config["model_type"] == "llama"


def llama3_factors(scaling: Mapping[str, Any], theta: float, head_dim: int) -> FloatArray:
    """`rope_freqs.weight`, as llama.cpp's convert_hf_to_gguf.py computes it."""
    low = scaling["original_max_position_embeddings"] / scaling["low_freq_factor"]
    high = scaling["original_max_position_embeddings"] / scaling["high_freq_factor"]
    factors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (i / head_dim)
        if wavelength < high:
            factors.append(1.0)
        elif wavelength > low:
            factors.append(scaling["factor"])
        else:
            smooth = (scaling["original_max_position_embeddings"] / wavelength - scaling["low_freq_factor"]) / (
                scaling["high_freq_factor"] - scaling["low_freq_factor"]
            )
            factors.append(1 / ((1 - smooth) / scaling["factor"] + smooth))
    assert len(set(factors)) > 3  # all three branches
    return np.array(factors, np.float32)


def test_llama3_rope(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    config = tiny_config(rope_scaling=scaling, head_dim=32)
    weights = tiny_weights(config)
    tensors = {"rope_freqs.weight": llama3_factors(scaling, config["rope_theta"], 32)}
    path = write_gguf(tmp_path / "tiny.gguf", config, weights, extra_tensors=tensors)
    assert_same_logits(config, weights, path)
    assert "rope_freqs.weight" not in dict(iterate_tensors(resolve(path)))


SCALINGS: dict[str, tuple[dict[str, Any], dict[str, tuple[Any, GGUFValueType]]]] = {
    "linear": (
        {"rope_type": "linear", "factor": 2.5},
        {"llama.rope.scaling.type": ("linear", TEXT), "llama.rope.scaling.factor": (2.5, REAL)},
    ),
    "yarn": (
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        {
            "llama.rope.scaling.type": ("yarn", TEXT),
            "llama.rope.scaling.factor": (4.0, REAL),
            "llama.rope.scaling.original_context_length": (32, UINT),
            "llama.rope.scaling.finetuned": (True, GGUFValueType.BOOL),
        },
    ),
    "yarn with betas": (
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "beta_fast": 20.0,
            "beta_slow": 2.0,
        },
        {
            "llama.rope.scaling.type": ("yarn", TEXT),
            "llama.rope.scaling.factor": (4.0, REAL),
            "llama.rope.scaling.original_context_length": (32, UINT),
            "llama.rope.scaling.yarn_beta_fast": (20.0, REAL),
            "llama.rope.scaling.yarn_beta_slow": (2.0, REAL),
        },
    ),
    "none": ({}, {"llama.rope.scaling.type": ("none", TEXT)}),
}


@pytest.mark.parametrize("name", SCALINGS)
def test_rope_scaling(tmp_path: Path, name: str) -> None:
    scaling, settings = SCALINGS[name]
    config = tiny_config(max_position_embeddings=128, **({"rope_scaling": scaling} if scaling else {}))
    weights = tiny_weights(config)
    assert_same_logits(config, weights, write_gguf(tmp_path / "tiny.gguf", config, weights, extra=settings))


def test_longrope(tmp_path: Path) -> None:
    short, long = np.linspace(1, 2, 8, dtype=np.float32), np.linspace(2, 5, 8, dtype=np.float32)
    scaling = {
        "rope_type": "longrope",
        "short_factor": short.tolist(),
        "long_factor": long.tolist(),
        "attention_factor": 1.25,
        "original_max_position_embeddings": 32,
    }
    config = tiny_config(max_position_embeddings=128, rope_scaling=scaling)
    weights = tiny_weights(config)
    path = write_gguf(
        tmp_path / "tiny.gguf",
        config,
        weights,
        extra={
            "llama.rope.scaling.type": ("longrope", TEXT),
            "llama.rope.scaling.attn_factor": (1.25, REAL),
            "llama.rope.scaling.original_context_length": (32, UINT),
        },
        extra_tensors={"rope_factors_short.weight": short, "rope_factors_long.weight": long},
    )
    assert resolve(path).config["rope_scaling"] == scaling
    assert_same_logits(config, weights, path)


def test_config(tmp_path: Path) -> None:
    ids = {
        f"tokenizer.ggml.{name}_token_id": (number, UINT) for name, number in (("bos", 1), ("eos", 2), ("padding", 0))
    }
    source = resolve(write(tmp_path, {"rms_norm_eps": 1e-5}, extra=ids))
    assert source.config == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,  # as written, not as the float32 spells it
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "dtype": "float32",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }


def test_every_end_id_and_the_sampling_defaults_are_found(tmp_path: Path) -> None:
    """G34, for GGUF files."""
    extra = {
        "tokenizer.ggml.bos_token_id": (1, UINT),
        "tokenizer.ggml.eos_token_id": (7, UINT),
        "tokenizer.ggml.eot_token_id": (5, UINT),
        "tokenizer.ggml.eom_token_id": (9, UINT),
        "general.sampling.temp": (0.6, REAL),
        "general.sampling.top_k": (20, GGUFValueType.INT32),
        "general.sampling.top_p": (0.95, REAL),
    }
    source = resolve(write(tmp_path, extra=extra))
    assert source.generation_config == {
        "bos_token_id": 1,
        "eos_token_id": [5, 7, 9],
        "pad_token_id": None,
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
    }
    fields = source.tokenizer.gguf_fields
    assert fields is not None
    assert fields == {name: value for name, (value, _) in extra.items() if name.startswith("tokenizer.")}


def test_settings_stated_layer_by_layer(tmp_path: Path) -> None:
    same = {"llama.attention.head_count_kv": ([2, 2], UINT), "llama.feed_forward_length": ([128, 128], UINT)}
    assert resolve(write(tmp_path, extra=same)).config["num_key_value_heads"] == 2
    with pytest.raises(UnsupportedModelError, match="head_count_kv differs from layer to layer"):
        resolve(write(tmp_path, extra={"llama.attention.head_count_kv": ([2, 1], UINT)}))


UNSUPPORTED: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": ({"config": {"model_type": "mamba"}}, "'mamba'; of GGUF files, asyncllm runs llama, qwen2, qwen3"),
    "setting": (
        {"extra": {"llama.attention.clamp_kqv": (8.0, REAL)}},
        "does not know its setting llama.attention.clamp",
    ),
    "experts": ({"extra": {"llama.expert_count": (8, UINT)}}, "mixtures of experts"),
    "partial rope": (
        {"extra": {"llama.rope.dimension_count": (8, UINT)}},
        "rope.dimension_count is 8 where a head has 16",
    ),
    "value length": ({"extra": {"llama.attention.value_length": (8, UINT)}}, "value_length is 8"),
    "tensor": (
        {"extra_tensors": {"blk.0.attn_sinks.weight": np.zeros(4, np.float32)}},
        "the tensor blk.0.attn_sinks.weight",
    ),
    "rope scaling": (
        {"extra": {"llama.rope.scaling.type": ("ntk", TEXT)}},
        "its rope scaling, 'ntk', is not supported",
    ),
    "attention factor": (
        {"extra": {"llama.rope.scaling.attn_factor": (2.0, REAL)}},
        "attn_factor with rope scaling 'none'",
    ),
    "rope factors": (
        {"extra_tensors": {"rope_factors_long.weight": np.ones(8, np.float32)}},
        "long and short rope factors",
    ),
    "two scalings": (
        {
            "extra": {"llama.rope.scaling.type": ("linear", TEXT), "llama.rope.scaling.factor": (2.0, REAL)},
            "extra_tensors": {"rope_freqs.weight": np.ones(8, np.float32)},
        },
        "rope_freqs.weight with rope scaling 'linear'",
    ),
    "window of some layers": (
        {"config": {"model_type": "qwen2"}, "extra": {"qwen2.attention.sliding_window": (16, UINT)}},
        "in which layers the sliding window holds",
    ),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_could_not_be_computed_is_refused(tmp_path: Path, name: str) -> None:
    options, message = UNSUPPORTED[name]
    config = tiny_config(**options.pop("config", {})) if "config" in options else tiny_config()
    weights = tiny_weights({**config, "model_type": "llama" if name == "architecture" else config["model_type"]})
    path = write_gguf(tmp_path / "tiny.gguf", config, weights, **options)
    with pytest.raises(UnsupportedModelError) as caught:
        resolve(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


DAMAGED: dict[str, tuple[dict[str, Any], str]] = {
    "absent setting": ({"drop": "llama.block_count"}, "does not state llama.block_count"),
    "absent tensor": ({"without": "model.embed_tokens.weight"}, "holds no tensor token_embd.weight"),
    "text for a number": ({"extra": {"llama.context_length": ("long", TEXT)}}, "llama.context_length is 'long'"),
    "text for a real": ({"extra": {"llama.rope.freq_base": ("high", TEXT)}}, "llama.rope.freq_base is 'high'"),
    "no heads": ({"extra": {"llama.attention.head_count": (0, UINT)}}, "llama.attention.head_count is 0"),
    "text for an id": ({"extra": {"tokenizer.ggml.eos_token_id": ("</s>", TEXT)}}, "eos_token_id is '</s>'"),
    "rope factors": ({"extra_tensors": {"rope_freqs.weight": np.ones(7, np.float32)}}, "has 7 factors, not 8"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_what_makes_no_sense_is_refused(tmp_path: Path, name: str) -> None:
    options, message = DAMAGED[name]
    weights = tiny_weights(tiny_config())
    weights.pop(options.get("without", ""), None)
    options = {key: value for key, value in options.items() if key != "without"}
    path = write_gguf(tmp_path / "tiny.gguf", tiny_config(), weights, **options)
    with pytest.raises(CheckpointError) as caught:
        resolve(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


def test_wrong_number_of_rows(tmp_path: Path) -> None:
    weights = tiny_weights(tiny_config())
    weights["model.layers.0.self_attn.q_proj.weight"] = np.zeros((32, 64), np.float32)
    path = write_gguf(tmp_path / "tiny.gguf", tiny_config(), weights)
    with pytest.raises(CheckpointError, match=r"attn_q\.weight has 32 rows, not 4 heads of 16"):
        list(iterate_tensors(resolve(path)))
