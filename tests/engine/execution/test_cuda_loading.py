"""What a GPU is too small for, or has no kernel for, is refused before anything is taken of it."""

from __future__ import annotations

import pytest
import torch

from asyncllm.config import EngineConfig
from asyncllm.engine.execution.cuda_loading import _check_room, _check_supported, _choose_cache_dtype
from asyncllm.errors import ConfigError, InsufficientMemoryError, UnsupportedModelError
from asyncllm.models.registry import read_model_config
from asyncllm.testing.tiny_models import tiny_config

GB = 10**9


@pytest.mark.parametrize("size", [4, 8, 12, 20, 130, 264, 512])
def test_head_sizes_without_a_kernel(size: int) -> None:
    message = rf'heads of {size} dimensions.*multiples of 8 from 16 to 256; device="cpu" runs any'
    with pytest.raises(UnsupportedModelError, match=message):
        _check_supported(read_model_config(tiny_config(head_dim=size)))


@pytest.mark.parametrize("size", [16, 24, 64, 80, 96, 128, 256])
def test_head_sizes_with_one(size: int) -> None:
    _check_supported(read_model_config(tiny_config(head_dim=size)))


def test_a_gpu_too_old_for_eight_bit_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    device, narrow = torch.device("cuda", 0), EngineConfig(kv_cache_dtype="fp8")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    assert _choose_cache_dtype(EngineConfig(), torch.float16, device) is torch.float16
    with pytest.raises(ConfigError, match=r'kv_cache_dtype="fp8" needs compute capability 8\.9, and cuda:0 has 8\.6'):
        _choose_cache_dtype(narrow, torch.float16, device)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    assert _choose_cache_dtype(narrow, torch.float16, device) is torch.float8_e4m3fn


def test_a_gpu_too_small_for_the_weights() -> None:
    message = r"the weights take 16,000\.0 MB as bfloat16 on cuda:0.*12,000\.0 MB are free: with 17,000\.0 MB.*cpu"
    with pytest.raises(InsufficientMemoryError, match=message):
        _check_room(16 * GB, 1 * GB, 12 * GB, "as bfloat16 on cuda:0")


def test_a_gpu_too_small_for_a_step() -> None:
    with pytest.raises(InsufficientMemoryError, match=r"16,500\.0 MB are free: a smaller max_batched_tokens"):
        _check_room(16 * GB, 1 * GB, 16 * GB + GB // 2, "as bfloat16 on cuda:0")
    _check_room(16 * GB, 1 * GB, 17 * GB, "as bfloat16 on cuda:0")
