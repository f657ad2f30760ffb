from __future__ import annotations

from typing import Any

import pytest
import torch

from asyncllm.config import EngineConfig
from asyncllm.engine.execution.sizes import (
    Sizes,
    choose_sizes,
    full_step_tokens,
    mixed_chunk_tokens,
)
from asyncllm.engine.plan import CacheGroup
from asyncllm.errors import ConfigError, InsufficientMemoryError
from asyncllm.models.registry import read_model_config
from asyncllm.testing.tiny_models import tiny_config

BLOCK = 2 * 2 * 2 * 16 * 16 * 4  # layers, keys and values, KV heads, positions, dimensions, float32


def sizes(free: int = 10**9, *, model: dict[str, Any] | None = None, **overrides: Any) -> Sizes:
    return choose_sizes(EngineConfig(**overrides), read_model_config(tiny_config(**(model or {}))), torch.float32, free)


def test_by_default_all_rows_may_be_as_long_as_the_context() -> None:
    found = sizes(max_num_seqs=8)
    assert (found.max_model_len, found.max_batched_tokens, found.layout.block_size) == (2048, 1024, 16)
    assert found.num_blocks == 8 * 128
    assert found.layout.block_bytes(torch.float32) == BLOCK


def test_by_default_at_most_half_of_what_is_free() -> None:
    found = sizes(2 * 300 * BLOCK)
    assert (found.num_blocks, found.max_model_len) == (299, 2048)


def test_the_default_context_shrinks_to_what_fits() -> None:
    found = sizes(2 * 101 * BLOCK)
    assert (found.num_blocks, found.max_model_len) == (100, 1600)
    assert sizes(kv_cache_memory=21 * BLOCK).max_model_len == 320


def test_a_context_that_was_asked_for_does_not_shrink() -> None:
    with pytest.raises(InsufficientMemoryError, match="max_model_len=1600 would fit"):
        sizes(2 * 101 * BLOCK, max_model_len=2048)
    assert sizes(2 * 101 * BLOCK, max_model_len=1600).num_blocks == 100


def test_nothing_fits() -> None:
    """A request's one block, beside the null block."""
    with pytest.raises(InsufficientMemoryError, match=r"there are 0\.0 MB: the shortest needs 0\.0 MB"):
        sizes(BLOCK)
    with pytest.raises(InsufficientMemoryError, match="the shortest"):
        sizes(kv_cache_memory=2 * BLOCK - 1)
    assert sizes(kv_cache_memory=2 * BLOCK).max_model_len == 16


def test_given_blocks_are_taken_as_they_are() -> None:
    """Even where they hold no request of the whole context: the scheduler refuses what is too long."""
    found = sizes(num_blocks=8, max_model_len=512)
    assert (found.num_blocks, found.max_model_len) == (8, 512)
    with pytest.raises(InsufficientMemoryError, match="num_blocks=99"):
        sizes(100 * BLOCK, num_blocks=100)
    assert sizes(100 * BLOCK, num_blocks=99).num_blocks == 99


def test_given_memory_is_used_up() -> None:
    assert sizes(kv_cache_memory=1000 * BLOCK + 5, max_num_seqs=1).num_blocks == 999
    with pytest.raises(InsufficientMemoryError, match="kv_cache_memory"):
        sizes(10**6, kv_cache_memory=10**6 + 1)


def test_the_context_of_the_model_is_a_limit() -> None:
    with pytest.raises(ConfigError, match="context of 2048"):
        sizes(max_model_len=2049)
    stretched = {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
    assert sizes(model=stretched).max_model_len == 2048
    assert sizes(model=stretched, max_model_len=4096).max_model_len == 4096
    with pytest.raises(ConfigError, match="context of 4096"):
        sizes(model=stretched, max_model_len=4097)


def test_a_window_that_is_never_full_is_none() -> None:
    model = {"model_type": "mistral", "sliding_window": 256}
    assert sizes(model=model, max_model_len=256).layout.groups == (CacheGroup(None),)
    assert sizes(model=model, max_model_len=257).layout.groups == (CacheGroup(256),)


def test_windows_need_less() -> None:
    model = {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 64,
        "max_window_layers": 1,
    }
    found = sizes(model=model, max_num_seqs=1, max_batched_tokens=32)
    assert found.num_blocks == 128 + (64 + 2 * 32) // 16 + 1


@pytest.mark.parametrize(("rows", "tokens", "expected"), [(256, None, 1024), (2048, None, 2048), (256, 100, 100)])
def test_tokens_of_a_step(rows: int, tokens: int | None, expected: int) -> None:
    assert sizes(max_num_seqs=rows, max_batched_tokens=tokens).max_batched_tokens == expected


@pytest.mark.parametrize(
    ("device", "weights", "expected"),
    [("cuda", 1.2e9, 1024), ("cuda", 8e9, 512), ("cuda", 16.1e9, 256), ("cuda", 140e9, 256), ("cpu", 1e8, 64)],
)
def test_tokens_beside_decoding_rows(device: str, weights: float, expected: int) -> None:
    assert mixed_chunk_tokens(torch.device(device), int(weights)) == expected


@pytest.mark.parametrize(
    ("device", "weights", "expected"),
    [("cuda", 1.2e9, 2048), ("cuda", 16.1e9, 1024), ("cuda", 140e9, 1024), ("cpu", 1e8, 256)],
)
def test_tokens_of_a_full_step(device: str, weights: float, expected: int) -> None:
    assert full_step_tokens(torch.device(device), int(weights)) == expected
