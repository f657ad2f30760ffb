"""Models whose layers are one kernel, through the batches that real steps use, against the same in float32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncllm.config import EngineConfig
from asyncllm.engine.execution.cpu_runner import StepExecutor
from asyncllm.engine.execution.kernel_batch import KernelBatchBuilder
from asyncllm.engine.execution.loading import load_executor
from asyncllm.engine.execution.processor import native_kernels
from asyncllm.engine.execution.row_state import RowState
from asyncllm.engine.execution.step_batch import lay_out_tokens
from asyncllm.engine.plan import NO_TOKEN, Chunk, RowJoin, RowSampling, StepPlan, TableEdits
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


PLAIN = (GREEDY, replace(GREEDY, temperature=1.0, seed=5), replace(GREEDY, temperature=0.7, seed=2**64 - 3, choice=2))


def plan_of(
    decode: NDArray[np.int32], *, joins: Sequence[RowJoin] = (), chunks: Sequence[Chunk] = (), step: int = 0
) -> StepPlan:
    no_edits = TableEdits(NONE, NONE, NONE, NONE)
    return StepPlan(step, tuple(joins), no_edits, NONE.reshape(0, 2), tuple(chunks), decode, False)


def give_blocks(executor: StepExecutor, row: int) -> None:
    for group in range(len(executor._rows.tables)):
        executor._rows.tables[group, row, :8] = 1 + np.arange(8) + 8 * (row + 4 * group)


@torch.inference_mode()
def decoded(executor: StepExecutor, settings: Sequence[RowSampling], *, anew: bool) -> list[list[int]]:
    """The tokens of steps in which rows with these settings join, decode for a while, and are joined by one more.

    `anew`: each plan names its rows by another array, so that its batch is made anew.
    """

    def tell(tokens: object) -> None:
        raise AssertionError("no row is late")

    def run(plan: StepPlan) -> None:
        found.append(executor.execute(plan, tell).token_ids.tolist())

    found: list[list[int]] = []
    prompts = [np.arange(7, 12 + 11 * row, dtype=np.int32) for row in range(len(settings))]
    joins = [
        RowJoin(row, row, each, len(ids), ids) for row, (each, ids) in enumerate(zip(settings, prompts, strict=True))
    ]
    chunks = [Chunk(row, 0, ids, True) for row, ids in enumerate(prompts)]
    for join, chunk in zip(joins, chunks, strict=True):
        plan = plan_of(NONE, joins=[join])  # a step of no tokens: a row that joins forgets its table
        executor.execute(plan, tell)
        give_blocks(executor, join.row)
        if join.row < 2:
            run(plan_of(NONE, chunks=[chunk]))
    few, all_rows = np.array([1, 0], np.int32), np.array([1, 0, 2], np.int32)
    for _ in range(18):
        run(plan_of(few.copy() if anew else few))
    text = executor.text_features(np.arange(40, dtype=np.int32))  # of another cache, between two steps
    assert text.advance() is not None
    run(plan_of(few.copy() if anew else few))
    run(plan_of(few.copy() if anew else few, chunks=chunks[2:]))
    for _ in range(12):
        run(plan_of(all_rows.copy() if anew else all_rows))
    return found


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "last",
    [
        PLAIN[2],
        replace(PLAIN[2], top_k=7),
        replace(PLAIN[2], repetition_penalty=1.4),
        replace(GREEDY, suppressed=tuple(range(0, 512, 3)), suppress_before=36),
        replace(PLAIN[1], suppressed=tuple(range(256)), suppress_before=33),
    ],
    ids=["plain", "top_k", "penalty", "suppressed, greedy", "suppressed, drawn"],
)
def test_a_batch_that_goes_on_is_as_one_made_anew(
    name: str, last: RowSampling, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what the kernel draws is what the sampler draws of its logits."""
    if native_kernels() is None:
        pytest.skip("this processor, or this machine, has no kernels of its own")
    folder = write_tiny_model(tmp_path, config={"head_dim": 32, "hidden_size": 128, **MODELS[name]})
    settings = (*PLAIN[:2], last)
    executor = load(folder, dtype="bfloat16")
    assert executor._model.draws_tokens
    found = decoded(executor, settings, anew=False)
    assert (executor._run is not None) is not (last.top_k > 0 or last.counts_tokens)
    assert found == decoded(executor, settings, anew=True)
    monkeypatch.setattr(RowState, "draws", lambda *arguments: None)
    assert found == decoded(executor, settings, anew=False)
    assert len({token for step in found for token in step}) > 10


@torch.inference_mode()
def test_rows_without_numbers_have_no_token(tmp_path: Path) -> None:
    if native_kernels() is None:
        pytest.skip("this processor, or this machine, has no kernels of its own")
    executor = load(write_tiny_model(tmp_path, config={"head_dim": 32, "hidden_size": 128}), dtype="bfloat16")
    executor._model.embedding.weight[3] = torch.nan
    tokens = np.array([4, 3, 5], np.int32)
    for row, settings in enumerate(PLAIN):
        executor.execute(plan_of(NONE, joins=[RowJoin(row, row, settings)]), print)
        give_blocks(executor, row)
    chunks = [Chunk(row, 0, tokens[row : row + 1], True) for row in range(3)]
    executor._rows.tables[:, 1] += 24
    decode = np.arange(3, dtype=np.int32)
    for plan in (plan_of(NONE, chunks=chunks), plan_of(decode), plan_of(decode), plan_of(decode.copy())):
        found = executor.execute(plan, print).token_ids
        assert (found == NO_TOKEN).tolist() == [False, True, False]
        assert executor._rows.last_token[1] == 0
