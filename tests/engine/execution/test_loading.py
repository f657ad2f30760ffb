from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from asyncllm.config import EngineConfig
from asyncllm.engine.execution import loading
from asyncllm.engine.execution.head_start import HeadStart
from asyncllm.engine.execution.loading import load_runner
from asyncllm.engine.execution.processor import native_kernels
from asyncllm.engine.execution.runner import ModelFacts
from asyncllm.engine.plan import CacheGroup
from asyncllm.errors import CheckpointError, ConfigError, InsufficientMemoryError, UnsupportedModelError
from asyncllm.kernels.cpu.build import always
from asyncllm.models.registry import read_model_config
from asyncllm.testing.tiny_models import tiny_config, tiny_weights, write_tiny_model
from asyncllm.weights.source import ModelSource, resolve_source
from tests.engine.execution.plan_driver import PlanDriver
from tests.weights.gguf_files import write_gguf


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


async def facts_of(path: Path, **overrides: Any) -> ModelFacts:
    config = EngineConfig(max_num_seqs=4).override(**overrides)
    source = await asyncio.to_thread(resolve_source, str(path), config)
    runner, facts = await load_runner(source, config, HeadStart())
    await runner.aclose()
    return facts


async def test_facts(folder: Path) -> None:
    facts = await facts_of(folder, dtype="float32")
    assert (facts.vocab_size, facts.max_model_len, facts.block_size) == (512, 2048, 16)
    assert (facts.max_num_seqs, facts.max_batched_tokens, facts.num_blocks) == (4, 1024, 4 * 128)
    assert facts.groups == (CacheGroup(None),)
    assert (facts.dtype, facts.device, facts.prefix_caching) == ("float32", "cpu", True)
    parameters = 2 * 512 * 64 + 2 * (64 * 128 + 64 * 64 + 3 * 64 * 128 + 2 * 64) + 64
    assert facts.memory_bytes["weights"] == 4 * parameters
    assert facts.memory_bytes["cache"] == (512 + 1) * 2 * 2 * 2 * 16 * 16 * 4
    assert facts.memory_bytes["workspace"] > 0


@pytest.mark.parametrize("native", [True, False])
async def test_what_grows_with_the_context_is_counted(native: bool, tmp_path: Path) -> None:
    """Tables of rotations, which the processor's kernels have copies of, and of blocks; masks, and what is gathered."""
    path = write_tiny_model(tmp_path, config={"head_dim": 32, "max_position_embeddings": 4096})
    settings = {"dtype": "bfloat16", "native_kernels": native, "num_blocks": 8, "max_batched_tokens": 64}
    short, long = [await facts_of(path, max_model_len=length, **settings) for length in (2048, 4096)]
    grown = long.memory_bytes["workspace"] - short.memory_bytes["workspace"]
    rotations = 2048 * 32 * 2
    if native and native_kernels() is not None:
        rotations *= 3
    else:
        rotations += 256 * 2048 * 2
    assert grown == rotations + 4 * 2048 // 16 * 8


async def test_facts_of_a_model_with_windows(tmp_path: Path) -> None:
    config = {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}
    facts = await facts_of(write_tiny_model(tmp_path, config=config), block_size=8, max_model_len=100)
    assert facts.groups == (CacheGroup(None), CacheGroup(64))
    assert (facts.max_model_len, facts.block_size) == (100, 8)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
async def test_low_precision(folder: Path, dtype: str) -> None:
    async with await PlanDriver.load(folder, dtype=dtype) as driver:
        assert driver.facts.dtype == dtype
        single = await facts_of(folder, dtype="float32")
        assert 2 * driver.facts.memory_bytes["weights"] == single.memory_bytes["weights"]
        assert len(set(await driver.generate(list(range(3, 40)), 10))) > 1


@pytest.mark.parametrize(
    ("capabilities", "stored", "kernels", "expected"),
    [
        ((), "bfloat16", False, torch.float32),
        (("avx512_bf16",), "bfloat16", False, torch.bfloat16),
        (("amx_bf16",), "float16", False, torch.bfloat16),
        (("amx_bf16",), "float32", False, torch.float32),
        ((), "bfloat16", True, torch.bfloat16),
        ((), "float32", True, torch.float32),
    ],
)
def test_dtype_goes_by_the_processor(
    capabilities: tuple[str, ...],
    stored: str,
    kernels: bool,
    expected: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: dict.fromkeys(capabilities, True), raising=False)
    monkeypatch.setattr(loading, "native_kernels", lambda wanted: object() if kernels else None)
    model = read_model_config(tiny_config(torch_dtype=stored))
    assert loading._choose_dtype(EngineConfig(), model, always) == expected
    plain = torch.bfloat16 if capabilities and stored != "float32" else torch.float32
    assert loading._choose_dtype(EngineConfig(native_kernels=False), model, always) == plain
    assert loading._choose_dtype(EngineConfig(dtype="float16"), model, always) == torch.float16


async def test_a_rope_that_depends_on_length_shares_no_prefix(tmp_path: Path) -> None:
    config = {"max_position_embeddings": 32, "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}
    write_tiny_model(tmp_path, config=config)
    assert (await facts_of(tmp_path)).prefix_caching
    assert not (await facts_of(tmp_path, max_model_len=33)).prefix_caching


async def test_dummy_weights_need_a_config_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config()))
    generated = []
    for _ in range(2):
        async with await PlanDriver.load(tmp_path, load_format="dummy") as driver:
            generated.append(await driver.generate(list(range(3, 40)), 10))
    assert generated[0] == generated[1]
    assert len(set(generated[0])) > 1


async def test_threads_are_set_only_when_asked(folder: Path) -> None:
    before = torch.get_num_threads()
    await facts_of(folder)
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("device", ["cuda:99", "cuda:1234"])
async def test_a_gpu_that_is_not_there(device: str, folder: Path) -> None:
    with pytest.raises(ConfigError, match=r'torch sees .*device="cpu" would do'):
        await facts_of(folder, device=device)


async def test_auto_takes_the_cpu_where_there_is_no_gpu(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert (await facts_of(folder, device="auto")).device == "cpu"


@pytest.mark.parametrize(
    ("config", "error", "named"),
    [
        ({"architectures": ["FooForCausalLM"]}, UnsupportedModelError, "FooForCausalLM"),
        ({"rope_scaling": {"rope_type": "foo"}}, UnsupportedModelError, "'foo'"),
        ({"num_hidden_layers": 3}, CheckpointError, r"lacks model\.layers\.2"),
        ({"num_hidden_layers": 1}, CheckpointError, r"model\.layers\.1.*no place"),
        ({"vocab_size": 511}, CheckpointError, r"needs \(511, 64\)"),
    ],
)
async def test_what_does_not_load_leaves_no_thread(
    config: dict[str, Any], error: type[Exception], named: str, tmp_path: Path
) -> None:
    write_tiny_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(tiny_config(**config)))
    before = set(threading.enumerate())
    with pytest.raises(error, match=named):
        await facts_of(tmp_path)
    assert not any(thread.name == "asyncllm-cpu" for thread in {*threading.enumerate()} - before)


async def test_no_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "available_memory", lambda: 10**5)
    with pytest.raises(InsufficientMemoryError, match="weights"):
        await facts_of(folder)
    monkeypatch.setattr(loading, "available_memory", lambda: 10**6)
    with pytest.raises(InsufficientMemoryError, match="max_model_len"):
        await facts_of(folder, max_model_len=2048)
    assert (await facts_of(folder)).max_model_len < 2048


async def test_copies_of_packed_weights_are_left_out_where_memory_is_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(hidden_size=64, intermediate_size=128)
    path = write_gguf(tmp_path / "tiny.gguf", config, tiny_weights(config), matrix_type=GGMLQuantizationType.Q4_1)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict, raising=False)
    roomy = await facts_of(path, num_blocks=4)
    monkeypatch.setattr(loading, "available_memory", lambda: roomy.memory_bytes["weights"] + 100_000)
    short = await facts_of(path, num_blocks=4)
    assert (short.memory_bytes["weights"], short.memory_bytes["copies"]) == (roomy.memory_bytes["weights"], 0)
    assert roomy.memory_bytes["copies"] > 100_000
    with pytest.raises(InsufficientMemoryError, match="weights"):
        await facts_of(path, num_blocks=4, dtype="float32")


async def test_a_cancelled_load_stops_soon(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started, before = threading.Event(), set(threading.enumerate())

    def slow(source: ModelSource) -> Iterator[tuple[str, Tensor]]:
        started.set()
        while True:
            yield "model.norm.weight", torch.zeros(64)

    monkeypatch.setattr(loading, "iterate_grouped", slow)
    task = asyncio.create_task(facts_of(folder))
    assert await asyncio.to_thread(started.wait, 10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    for thread in [each for each in {*threading.enumerate()} - before if each.name == "asyncllm-cpu"]:
        await asyncio.to_thread(thread.join, 10)
        assert not thread.is_alive()


@pytest.mark.parametrize("setting", [{"kv_cache_dtype": "fp8"}, {"deterministic": True}], ids=str)
async def test_a_gpus_settings_are_refused_on_the_cpu(folder: Path, setting: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(setting))}.*needs a GPU"):
        await facts_of(folder, device="cpu", **setting)
