"""Models whose layers are one kernel, through the batches that real steps use, against the same in float32."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from asyncllm.config import EngineConfig
from asyncllm.engine.execution.cpu_runner import StepExecutor
from asyncllm.engine.execution.kernel_batch import KernelBatchBuilder
from asyncllm.engine.execution.loading import load_executor
from asyncllm.engine.execution.processor import native_kernels
from asyncllm.engine.execution.step_batch import lay_out_tokens
from asyncllm.engine.plan import Chunk, RowJoin, RowSampling, StepPlan, TableEdits
from asyncllm.testing.tiny_models import write_tiny_model
from asyncllm.weights.source import resolve_source

NONE = np.zeros(0, np.int32)
GREEDY = RowSampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"model_type": "qwen3"},
    "windows": {
        "model_type": "qwen2",
        "num_hidden_layers": 4,
        "use_sliding_window": True,
        "sliding_window": 24,
        "max_window_layers": 2,
        "layer_types": ["full_attention", "full_attention", "sliding_attention", "sliding_attention"],
    },
    "dynamic rope": {
        "max_position_embeddings": 64,
        "rope_scaling": {"rope_type": "dynamic", "factor": 4.0},
    },
}


def load(folder: Path, **settings: Any) -> StepExecutor:
    config = EngineConfig(max_num_seqs=4, max_model_len=128, num_blocks=64, load_format="auto", **settings)
    executor, _ = load_executor(resolve_source(str(folder), config), config)
    return executor


@torch.inference_mode()
def logits_of(executor: StepExecutor, ids: list[int], cuts: tuple[int, ...]) -> Tensor:
    """Of all tokens of row 2, computed in chunks that end at `cuts`; row 0 computes others beside them."""
    rows = executor._rows
    for row in (0, 2):
        rows.join(RowJoin(row, row, GREEDY, prompt_tokens=len(ids)))
        for group in range(len(rows.tables)):
            rows.tables[group, row, :8] = 1 + np.random.default_rng(row).permutation(8) + 8 * (row + 4 * group)
    found = []
    for start, stop in zip((0, *cuts), (*cuts, len(ids)), strict=True):
        other = Chunk(0, start, np.array(ids[::-1][start:stop], np.int32), True)
        chunk = Chunk(2, start, np.array(ids[start:stop], np.int32), True)
        plan = StepPlan(0, (), TableEdits(NONE, NONE, NONE, NONE), NONE.reshape(0, 2), (other, chunk), NONE, False)
        tokens = lay_out_tokens(plan, rows)
        tokens = replace(tokens, sampled=np.flatnonzero(tokens.rows == 2))
        found.append(executor._model.forward(executor._builder.build(tokens, rows)).float())
    return torch.cat(found)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("cuts", [(), (40, 41, 42, 90), (1, 2, 3)], ids=str)
def test_nearer_than_torch_in_bfloat16(name: str, cuts: tuple[int, ...], tmp_path: Path) -> None:
    if native_kernels() is None:
        pytest.skip("this processor, or this machine, has no kernels of its own")
    folder = write_tiny_model(tmp_path, config={"head_dim": 32, "hidden_size": 128, **MODELS[name]})
    ids = np.random.default_rng(1).integers(0, 512, 100).tolist()
    kernels, operators = load(folder, dtype="bfloat16"), load(folder, dtype="bfloat16", native_kernels=False)
    assert isinstance(kernels._builder, KernelBatchBuilder)
    assert not isinstance(operators._builder, KernelBatchBuilder)
    exact = logits_of(load(folder, dtype="float32"), ids, ())
    rounded = (logits_of(operators, ids, cuts) - exact).abs().mean()
    assert (logits_of(kernels, ids, cuts) - exact).abs().mean() < rounded


@torch.inference_mode()
def test_a_prompt_finds_the_blocks_that_the_same_step_fills(tmp_path: Path) -> None:
    """Equal prompts that come at once, of one token more than three blocks."""
    if native_kernels() is None:
        pytest.skip("this processor, or this machine, has no kernels of its own")
    folder = write_tiny_model(tmp_path, config={"head_dim": 32, "hidden_size": 128})
    ids = np.random.default_rng(2).integers(0, 512, 49).astype(np.int32)
    executor = load(folder, dtype="bfloat16", block_size=16)
    rows = executor._rows
    for row in (0, 2):
        rows.join(RowJoin(row, row, GREEDY, prompt_tokens=len(ids)))
        rows.tables[0, row, :4] = (1, 2, 3, 4 + row)
    plan = StepPlan(
        0,
        (),
        TableEdits(NONE, NONE, NONE, NONE),
        NONE.reshape(0, 2),
        (Chunk(0, 0, ids, True), Chunk(2, 48, ids[48:], True)),
        NONE,
        False,
    )
    batch = executor._builder.build(lay_out_tokens(plan, rows), rows)
    first, second = executor._model.forward(batch).float()
    exact = logits_of(load(folder, dtype="float32"), ids.tolist(), ())[-1]
    operators = load(folder, dtype="bfloat16", native_kernels=False)
    rounded = (logits_of(operators, ids.tolist(), ())[-1] - exact).abs().mean()
    for found in (first, second):
        assert (found - exact).abs().mean() < 2 * rounded
    lone = replace(plan, chunks=(Chunk(0, 47, ids[47:48], True), Chunk(2, 48, ids[48:], True)))
    decoding = replace(plan, chunks=(), decode_rows=np.array([0, 2], np.int32))
    for plan, reads_new in ((lone, True), (decoding, False)):
        layers = executor._builder.build(lay_out_tokens(plan, rows), rows).layers
        assert layers is not None
        assert layers.reads_new is reads_new


def test_heads_of_another_size_go_layer_by_layer(tmp_path: Path) -> None:
    executor = load(write_tiny_model(tmp_path), dtype="bfloat16")  # heads of 16
    assert not isinstance(executor._builder, KernelBatchBuilder)
    assert logits_of(executor, list(range(50)), (20,)).isfinite().all()
