from __future__ import annotations

import contextlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncllm.errors import CheckpointError, ModelLoadError, UnsupportedModelError
from asyncllm.layers.rope import DefaultRope, DynamicRope, LinearRope, Llama3Rope, LongRope, YarnRope
from asyncllm.models.configuration import read_config
from asyncllm.models.registry import find_architecture, read_model_config
from asyncllm.testing.tiny_models import tiny_config

LLAMA_3_1_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}

YARN = {"rope_type": "yarn", "factor": 4.0}
LLAMA3 = {**LLAMA_3_1_8B["rope_scaling"], "original_max_position_embeddings": 512}
LONGROPE = {"rope_type": "longrope", "short_factor": [1] * 8, "long_factor": [2] * 8}


def rope_of(**overrides: Any) -> DefaultRope:
    return read_model_config(tiny_config(**overrides)).rope


def test_a_real_config() -> None:
    config = read_model_config(LLAMA_3_1_8B)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (32, 32, 8, 128)
    assert config.windows == (None,) * 32
    assert config.rope == Llama3Rope(
        rope_theta=500000.0,
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )
    assert config.context_limit == 131072
    assert config.checkpoint_dtype == "bfloat16"
    assert not any((config.tied_head, config.qkv_bias, config.output_bias, config.mlp_bias, config.qk_norm))


def test_rope_old_and_new_style() -> None:
    old = rope_of(rope_theta=500.0, rope_scaling={"type": "linear", "factor": 2.0})
    new = rope_of(rope_theta=None, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0})
    assert old == new == LinearRope(rope_theta=500.0, factor=2.0)
    assert rope_of(rope_scaling=None) == rope_of(rope_parameters={"rope_type": "default"}) == rope_of()


def test_rope_lengths() -> None:
    """Dynamic takes the model's own length, the others a length that is given inside, or beside, or the model's."""
    yarn = {"rope_type": "yarn", "factor": 4.0}
    assert rope_of(rope_scaling=yarn) == YarnRope(rope_theta=10000.0, factor=4.0, original_max_position_embeddings=2048)
    inside = {**yarn, "original_max_position_embeddings": 512}
    assert rope_of(rope_scaling=inside).original_max_position_embeddings == 512  # type: ignore[attr-defined]
    beside = rope_of(rope_scaling=inside, original_max_position_embeddings=256)
    assert beside.original_max_position_embeddings == 256  # type: ignore[attr-defined]
    no_factor = {"rope_type": "yarn", "original_max_position_embeddings": 512}
    assert rope_of(rope_scaling=no_factor).factor == 4.0  # type: ignore[attr-defined]
    dynamic = {"rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 7}
    assert rope_of(rope_scaling=dynamic) == DynamicRope(
        rope_theta=10000.0, factor=4.0, original_max_position_embeddings=2048
    )
    long = {"rope_type": "longrope", "short_factor": [1] * 8, "long_factor": [2] * 8}
    assert rope_of(rope_scaling=long, original_max_position_embeddings=1024) == LongRope(
        rope_theta=10000.0,
        short_factor=(1.0,) * 8,
        long_factor=(2.0,) * 8,
        factor=2.0,
        original_max_position_embeddings=1024,
    )


@pytest.mark.parametrize(
    ("rope", "limit"),
    [
        (None, 2048),
        ({"rope_type": "linear", "factor": 2.0}, 4096),
        ({"rope_type": "dynamic", "factor": 4.0}, 8192),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}, 8192),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, 2048),
    ],
)
def test_context_limit(rope: dict[str, Any] | None, limit: int) -> None:
    config = read_model_config(tiny_config(rope_scaling=rope))
    assert config.max_position_embeddings == 2048
    assert config.context_limit == limit


@pytest.mark.parametrize(
    ("overrides", "windows"),
    [
        ({"model_type": "llama", "sliding_window": 8}, (None, None)),  # as in transformers
        ({"model_type": "mistral", "sliding_window": 8}, (8, 8)),
        ({"model_type": "mistral"}, (4096, 4096)),
        ({"model_type": "mistral", "sliding_window": None}, (None, None)),
        ({"model_type": "qwen2", "sliding_window": 8}, (None, None)),
        ({"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": True}, (None, None)),
        (
            {"model_type": "qwen3", "sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1},
            (None, 8),
        ),
        (
            {
                "model_type": "qwen2",
                "sliding_window": 8,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            (8, None),
        ),
    ],
)
def test_windows(overrides: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert read_model_config(tiny_config(**overrides)).windows == windows


def test_biases_belong_to_families() -> None:
    every = {"attention_bias": True, "mlp_bias": True}
    found = {}
    for model_type in ("llama", "mistral", "qwen2", "qwen3"):
        config = read_model_config(tiny_config(model_type=model_type, **every))
        found[model_type] = (config.qkv_bias, config.output_bias, config.mlp_bias)
    assert found == {
        "llama": (True, True, True),
        "mistral": (False, False, False),
        "qwen2": (True, False, False),
        "qwen3": (True, True, False),
    }


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"architectures": ["FooForCausalLM"]}, "FooForCausalLM"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"architectures": None, "model_type": "foo"}, "'foo'"),
        ({"hidden_act": "relu6"}, "relu6"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"quantization_config": "fp8"}, "'fp8'"),
        ({"hidden_act": ["silu"]}, "hidden_act"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_scaling": {"rope_type": ["x"]}}, "rope type"),
        ({"head_dim": 2, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "head_dim"),
        ({"layer_types": 3}, "layer_types"),
        ({"rope_scaling": {"rope_type": "foo", "factor": 2.0}}, "'foo'"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [1, 2]}}, "'mrope'"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "beta_fast": 1}}, "beta_fast"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "layer type"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"model_type": "mistral", "layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"model_type": "qwen2", "layer_types": ["sliding_attention"] * 2}, "sliding_window"),
        ({"model_type": "qwen2", "layer_types": ["chunked_attention"] * 2}, "chunked_attention"),
        ({"model_type": "qwen2", "layer_types": ["full_attention"]}, "2 layers"),
        ({"num_key_value_heads": 3}, "KV heads"),
        ({"head_dim": 15}, "15"),
        ({"num_attention_heads": 128, "num_key_value_heads": None}, "of 0 dimensions"),  # of 64 // 128
    ],
)
def test_what_is_not_run_is_refused_by_name(overrides: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        read_model_config(tiny_config(**overrides))


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"rms_norm_eps": None}, "rms_norm_eps"),
        ({"model_type": "mistral", "sliding_window": 0}, "sliding_window"),
        ({"head_dim": "x"}, "head_dim"),
        ({"head_dim": -2}, "head_dim"),
        ({"head_dim": 0}, "head_dim"),
        ({"num_key_value_heads": "2"}, "num_key_value_heads"),
        ({"num_key_value_heads": -2}, "num_key_value_heads"),
        ({"rms_norm_eps": "a"}, "rms_norm_eps"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings"),
        ({"torch_dtype": 32}, "torch_dtype"),
        ({"rope_theta": -1}, "rope_theta"),
        ({"rope_theta": 0}, "rope_theta"),
        ({"rope_theta": math.inf}, "rope_theta"),
        ({"rope_scaling": "yarn"}, "rope_scaling"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "4"}}, "factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 1e20}}, "factor"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 1e-6}}, "factor"),
        ({"rope_scaling": YARN | {"original_max_position_embeddings": 0}}, "original_max_position_embeddings"),
        ({"rope_scaling": YARN, "original_max_position_embeddings": "32"}, "original_max_position_embeddings"),
        ({"rope_scaling": YARN | {"rope_theta": 1}}, "rope_theta"),
        ({"rope_scaling": YARN | {"truncate": 1}}, "truncate"),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": 4.0}}, "low_freq_factor"),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": 5.0}}, "low_freq_factor"),
        ({"rope_scaling": LONGROPE | {"short_factor": [1]}}, "short_factor"),
        ({"rope_scaling": LONGROPE | {"short_factor": 3}}, "short_factor"),
        ({"rope_scaling": LONGROPE | {"long_factor": [1] * 7 + [0]}}, "long_factor"),
        ({"rope_scaling": LONGROPE, "original_max_position_embeddings": 1}, "original_max_position_embeddings"),
    ],
)
def test_a_config_with_holes_is_refused(overrides: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        read_model_config(tiny_config(**overrides))


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.sampled_from([2**31, -(2**63), 10**400, 1e-300, 1e300, math.nan, math.inf, -math.inf]),
    st.floats(),
    st.sampled_from(["", "x", "4", "1e-6", "yarn", "full_attention"]),
    st.lists(st.one_of(st.none(), st.integers(-2, 2), st.floats(), st.text(max_size=2)), max_size=9),
    st.dictionaries(st.sampled_from(["rope_type", "factor", "quant_method", "x"]), st.integers(-2, 2), max_size=2),
)
BASES: dict[str, dict[str, Any]] = {
    "llama": tiny_config(rope_scaling=LLAMA3, head_dim=16, attention_bias=False, mlp_bias=False, layer_types=None),
    "mistral": tiny_config(
        model_type="mistral", sliding_window=8, rope_scaling=YARN, original_max_position_embeddings=512
    ),
    "qwen2": tiny_config(
        model_type="qwen2",
        use_sliding_window=True,
        sliding_window=8,
        max_window_layers=1,
        rope_parameters={"rope_type": "dynamic", "factor": 2.0},
    ),
    "qwen3": tiny_config(model_type="qwen3", rope_scaling=LONGROPE, head_dim=16, quantization_config=None),
}
ROPE_VALUES = [
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 512},
    YARN | {"attention_factor": 1.0, "beta_fast": 32, "beta_slow": 1, "truncate": True},
    YARN | {"mscale": 1.0, "mscale_all_dim": 0.7},
    LLAMA3,
    LONGROPE | {"factor": 2.0, "attention_factor": 1.0, "original_max_position_embeddings": 512},
]


def parse(raw: dict[str, Any], model_type: str) -> None:
    """A config that is taken has a rope that computes; one that is refused names the reason as our error."""
    family = find_architecture(BASES[model_type]).family
    with contextlib.suppress(ModelLoadError):
        config = read_config(raw, family)
        assert min(config.head_dim, config.num_kv_heads, config.context_limit) >= 1
        assert config.rope.frequencies(min(config.head_dim, 64)).shape == (min(config.head_dim, 64) // 2,)
        assert math.isfinite(config.rope.attention_scale)


@given(model_type=st.sampled_from(list(BASES)), junk=JUNK, data=st.data())
@settings(max_examples=200, deadline=None)
def test_a_field_of_junk_parses_or_is_refused(model_type: str, junk: Any, data: st.DataObject) -> None:
    base = BASES[model_type]
    parse({**base, data.draw(st.sampled_from(sorted(base))): junk}, model_type)


@given(rope=st.sampled_from(ROPE_VALUES), junk=JUNK, data=st.data())
@settings(max_examples=200, deadline=None)
def test_a_rope_value_of_junk_parses_or_is_refused(rope: dict[str, Any], junk: Any, data: st.DataObject) -> None:
    changed = {**rope, data.draw(st.sampled_from(sorted({*rope, "rope_theta"}))): junk}
    parse(tiny_config(rope_scaling=changed), "llama")


def test_what_transformers_writes_is_read(tmp_path: Path) -> None:
    """transformers 5 writes rope_parameters, dtype and layer_types."""
    from transformers import Qwen3Config

    Qwen3Config(num_hidden_layers=2, use_sliding_window=True, max_window_layers=1).save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    config = read_model_config(raw)
    assert config.windows == (None, 4096)
    assert config.qk_norm
    assert config.head_dim == 128
