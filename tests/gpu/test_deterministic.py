"""deterministic=True: what runs beside a request, how its prompt is cut and what is cached changes no bit of it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncllm import AsyncEngine, SamplingParams
from asyncllm.engine.execution import cuda_loading
from asyncllm.engine.execution.device_rows import DeviceRows
from asyncllm.layers.paged_attention import PagedBatch
from asyncllm.models.forward_batch import ForwardBatch
from asyncllm.models.llama import Llama
from asyncllm.testing.tiny_models import write_tiny_model

LENGTH = 512
SETTINGS: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": LENGTH, "num_blocks": 200, "max_num_seqs": 16}
VARIANTS: dict[str, dict[str, Any]] = {
    "alone": {"max_num_seqs": 1},
    "short chunks": {"max_batched_tokens": 24},
    "no prefix cache": {"prefix_caching": False},
    "small pool": {"num_blocks": 12},
    "run_ahead 0": {"run_ahead": 0},
}


@pytest.fixture(scope="module", params=[{}, {"model_type": "qwen3", "head_dim": 32}], ids=["llama", "qwen3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), config=request.param)


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """[seed, position]: the bits of the logits there, added up."""
    table = torch.zeros((16, LENGTH), dtype=torch.int64, device="cuda")
    made: list[DeviceRows] = []
    forward = Llama.forward

    def make_rows(*arguments: Any, **named: Any) -> DeviceRows:
        made.append(DeviceRows(*arguments, **named))
        return made[-1]

    def keep_sums(model: Llama, batch: ForwardBatch) -> torch.Tensor:
        logits = forward(model, batch)
        sampled = torch.arange(len(logits), device="cuda") if batch.sampled is None else batch.sampled.long()
        group = batch.attention[0]
        assert isinstance(group, PagedBatch)
        seeds = made[-1].settings.seed[group.rows[sampled].long()]
        weights = torch.arange(1, logits.shape[1] + 1, device=logits.device)
        table[seeds % 16, batch.positions[sampled].long()] = (logits.view(torch.int16).long() * weights).sum(dim=1)
        return logits

    monkeypatch.setattr(cuda_loading, "DeviceRows", make_rows)
    monkeypatch.setattr(Llama, "forward", keep_sums)
    return table


async def ask(folder: Path, sums: torch.Tensor, **changes: Any) -> torch.Tensor:
    sums.zero_()
    async with AsyncEngine(folder, device="cuda", **{**SETTINGS, **changes}) as engine:
        requests = [
            engine.generate(
                list(range(3, 5 + 27 * i)),
                SamplingParams(temperature=(i % 3) / 2, seed=i + 1, max_tokens=20 + 5 * i, ignore_eos=True),
            )
            for i in range(8)
        ]
        await asyncio.gather(*requests)
    torch.cuda.synchronize()
    return sums[1:9].clone()


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    a, b = a[:, 1:], b[:, 1:]  # what fills up a step stands at position 0
    both = (a != 0) & (b != 0)  # a step also computes logits that nobody asked for
    assert int(both.sum()) >= sum(20 + 5 * i for i in range(8))
    return torch.equal(a[both], b[both])


async def test_every_bit_is_the_same(folder: Path, sums: torch.Tensor) -> None:
    expected = await ask(folder, sums, deterministic=True)
    for name, changes in VARIANTS.items():
        assert equal(await ask(folder, sums, deterministic=True, **changes), expected), name


async def test_the_bits_tell(folder: Path, sums: torch.Tensor) -> None:
    assert not equal(await ask(folder, sums), await ask(folder, sums, max_num_seqs=1))
