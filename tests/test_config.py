"""EngineConfig refuses what cannot work, and says which name was meant."""

from __future__ import annotations

import math
from typing import Any

import pytest

from asyncllm.config import EngineConfig
from asyncllm.errors import ConfigError

IMPOSSIBLE: list[dict[str, Any]] = [
    {"dtype": "int8"},
    {"load_format": "pickle"},
    *({"device": device} for device in ("0", "gpu", "cuda:", "cuda:x", "cuda:-1", "cuda:\u0661", 0, None)),
    *({"block_size": size} for size in (0, 7, 24, 512, 16.0, "16", True)),
    *({"run_ahead": steps} for steps in (-1, 3, 1.0, True, None)),
    *({"ageing_seconds": seconds} for seconds in (0, -1.0, math.nan, "10")),
    *({name: 0} for name in ("max_model_len", "max_num_seqs", "max_batched_tokens", "num_blocks", "threads")),
    {"max_num_seqs": None},
    {"kv_cache_memory": 1.5},
    {"prefix_caching": 1},
    {"model_defaults": None},
    {"num_blocks": 8, "kv_cache_memory": 2**20},
]


@pytest.mark.parametrize("settings", IMPOSSIBLE, ids=str)
def test_impossible_values_raise(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        EngineConfig(**settings)
    with pytest.raises(ConfigError):
        EngineConfig().override(**settings)


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:0", "cuda:11"])
def test_devices(device: str) -> None:
    assert EngineConfig(device=device).device == device


def test_override_makes_a_new_config() -> None:
    config = EngineConfig(block_size=8)
    assert config.override(run_ahead=0) == EngineConfig(block_size=8, run_ahead=0)
    assert config.run_ahead == 1


def test_unknown_names_raise() -> None:
    with pytest.raises(ConfigError, match="did you mean 'max_num_seqs'"):
        EngineConfig().override(max_num_seq=4)
    with pytest.raises(ConfigError, match="there are dtype, "):
        EngineConfig().override(zzz=4)
    with pytest.raises(TypeError):
        EngineConfig(zzz=4)  # type: ignore[call-arg]


@pytest.mark.parametrize("name", ["revision", "chat_template"])
def test_texts_are_texts(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        EngineConfig(**{name: 5})  # type: ignore[arg-type]
