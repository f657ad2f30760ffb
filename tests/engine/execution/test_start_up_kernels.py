"""What the GPU compiles at start-up, compiled for a Hopper on any machine: nothing is run."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncllm.config import EngineConfig
from asyncllm.engine.execution import compile_processes
from asyncllm.engine.execution.compile_processes import CompileProcesses
from asyncllm.engine.execution.cuda_executor import CudaExecutor
from asyncllm.engine.execution.device_rows import DeviceRows, RowSizes
from asyncllm.engine.execution.first_steps import first_plans
from asyncllm.engine.execution.kv_cache import allocate_device_cache, make_cache_layout
from asyncllm.engine.execution.rare_kernels import launch_rare_kernels
from asyncllm.engine.execution.step_program import StepProgram
from asyncllm.engine.execution.step_ring import StepRing
from asyncllm.engine.plan import Chunk, Fork, LateSamples, LogprobsRequest, RowJoin, RowSampling, StepPlan, TableEdits
from asyncllm.kernels import compilation, gated_linear, language, skinny_linear, specialized_attention
from asyncllm.kernels.activation import Activation
from asyncllm.kernels.attention_plan import AttentionShape, default_tilings, make_attention_plan
from asyncllm.kernels.block_copy import copy_blocks
from asyncllm.kernels.compilation import compiling
from asyncllm.kernels.language import GLUON_AVAILABLE, TRITON_AVAILABLE
from asyncllm.kernels.paged_attention import paged_attention
from asyncllm.kernels.row_join import RECORD_WORDS, join_rows
from asyncllm.kernels.skinny_linear import VectorTiling
from asyncllm.kernels.step_layout import StepWords
from asyncllm.layers.parameter import Placement
from asyncllm.models.registry import find_architecture, read_model_config
from asyncllm.testing.tiny_models import write_tiny_model
from asyncllm.weights.source import resolve_source
from tests.engine.execution.test_cuda_executor import MODELS, SMALL, HostSpace

if TRITON_AVAILABLE:
    import triton
    from triton.backends.compiler import GPUTarget

ROWS, TOKENS, LENGTH = 24, 96, 64


class Hopper:
    """Stands for Triton's driver: it says what to compile for."""

    def get_current_device(self) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_stream(self, device: int) -> int:
        return 0


@dataclass
class Compiled:
    """Names of kernels that came to be, with a cache on disk that was empty."""

    names: list[str]
    cached: list[str]  # those of them that were found there


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiled:
    found = Compiled([], [])

    def listen(src: Any, cache_hit: bool, **_: Any) -> None:
        found.names.append(src.fn.fn.__name__)
        found.cached += [src.fn.fn.__name__] * cache_hit

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(language, "_can_overlap", lambda device: True)
    monkeypatch.setattr(triton.knobs.compilation, "listener", listen)
    monkeypatch.setattr(triton.runtime.driver, "_active", Hopper())
    for name, module in [*sys.modules.items()]:
        if name.startswith("asyncllm.kernels."):
            for kernel in vars(module).values():
                if isinstance(kernel, triton.JITFunction):
                    kernel.device_caches.clear()  # what earlier tests have compiled
    return found


class Device:
    """An executor on CPU tensors, whose kernels are never run."""

    def __init__(self, folder: Path, dtype: torch.dtype, *, deterministic: bool = False) -> None:
        source = resolve_source(str(folder), EngineConfig())
        config = read_model_config(source.config)
        layout = make_cache_layout(config.windows, config.num_kv_heads, config.head_dim, 16)
        device, space = torch.device("cpu"), HostSpace()
        with torch.inference_mode():
            placement = Placement(dtype, device, kernels=True, deterministic=deterministic)
            model = find_architecture(source.config).model(config, layout.layers, LENGTH, placement)
            cache = allocate_device_cache(layout, 40, dtype, device)
            ring = StepRing(StepWords(ROWS, 16, TOKENS), 4, device)
            blocks = -(-LENGTH // layout.block_size)
            self.sizes = RowSizes(ROWS, len(layout.groups), blocks, config.vocab_size, LENGTH, 4, dtype)
            rows = DeviceRows(self.sizes, device, processed_logprobs=deterministic)
            program = StepProgram(model, layout, cache, rows, ring, deterministic=deterministic)
        self.executor = CudaExecutor(space, program, rows, ring, cache)  # type: ignore[arg-type]

    def launch(self, plan: StepPlan) -> None:
        self.executor.enqueue(plan, 0)


def step(join: RowJoin | None, chunk: list[int], decoding: int) -> StepPlan:
    none = np.zeros(0, np.int32)
    return StepPlan(
        step=0,
        joins=() if join is None else (join,),
        tables=TableEdits(none, none, none, none),
        copies=np.zeros((0, 2), np.int32),
        chunks=(Chunk(0, 0, np.array(chunk, np.int32), samples=True),) if chunk else (),
        decode_rows=np.arange(1, 1 + decoding, dtype=np.int32),
        decode_changed=True,
    )


if TRITON_AVAILABLE and not triton.knobs.runtime.interpret:

    @pytest.mark.full
    @pytest.mark.parametrize(
        ("model", "deterministic"), [("llama", False), ("llama", True), ("qwen3", False), ("windows", False)]
    )
    def test_no_kernel_is_left_for_a_later_step(
        model: str, deterministic: bool, tmp_path: Path, compiled: Compiled
    ) -> None:
        """All compile for a Hopper. Then no request that a first step was not like has another one compiled."""
        folder = write_tiny_model(tmp_path, config={**SMALL, **MODELS[model]})
        device = Device(folder, torch.bfloat16, deterministic=deterministic)
        with compiling(2) as compiled_at_once:
            for plan in first_plans(ROWS, TOKENS, LENGTH):
                device.launch(plan)
            launch_rare_kernels(device.executor, device.sizes, processed_logprobs=deterministic)
        assert {"_rope_cache_kernel", "_plan_kernel", "_draw_wide_kernel", "_rare_filters_kernel"} < set(compiled.names)
        assert len(compiled_at_once.kinds) >= len(compiled.names)
        plain = RowSampling(temperature=0.7, top_k=0, top_p=1.0, min_p=0.0, seed=0)
        rare = replace(
            plain, repetition_penalty=2.0, typical_p=0.5, banned=(4,), logprobs=LogprobsRequest(2), late=True
        )
        many = replace(
            rare,
            logit_bias=tuple((i, 1.0) for i in range(101)),
            suppressed=tuple(range(3, 120)),
            suppress_before=9,
            logprobs=LogprobsRequest(3, tuple(range(30))),
        )
        with compiling(2):
            del compiled.names[:]
            for sampling in (plain, rare, many):
                history = np.array([5, 6, 7], np.int32)
                plan = step(RowJoin(0, 0, sampling, 3, history), [5, 6, 7], 0)
                device.launch(plan)
                joins = (*plan.joins, RowJoin(2, 1, replace(sampling, choice=1), 3, history))
                device.launch(replace(plan, joins=joins, forks=(Fork(0, 2),), copies=np.array([[1, 2]], np.int32)))
                if sampling.late:
                    words = {"masks": np.zeros((1, -(-device.sizes.vocabulary // 32)), np.uint32), "biases": (None,)}
                    device.launch(replace(step(None, [], 0), late=LateSamples(np.zeros(1, np.int32), 1, **words)))
                for decoding in (1, 2, 3, 7, 11, 23):
                    device.launch(step(None, [], decoding))
                    device.launch(step(None, [5] * 13, decoding))
            for length in (1, 60):
                text = device.executor.text(np.full(length, 5, np.int32))
                while not text.launch():
                    pass
                text.close()
        assert compiled.names == []

    def test_what_compiles_is_not_run(compiled: Compiled) -> None:
        """Once for all that are alike, and for integers that differ from step to step."""
        settings, seeds = torch.zeros((8, 3), dtype=torch.int32), torch.zeros(3, dtype=torch.int64)
        records = torch.ones((1, RECORD_WORDS), dtype=torch.int32)
        with compiling(2) as compiled_at_once:
            for most in (1, 16, 33, 33):
                join_rows(settings, seeds, torch.zeros((3, most), dtype=torch.int32), records, records[0])
        assert compiled.names == ["_row_join_kernel"]
        assert len(compiled_at_once.kinds) == 3
        assert not settings.any()
        with compiling(2):
            join_rows(settings, seeds, torch.zeros((3, 5), dtype=torch.int32), records, records[0])
        assert compiled.names == ["_row_join_kernel"]

    def test_a_wish_for_cache_is_known_by_the_binary(compiled: Compiled) -> None:
        """Before it is loaded, and from the cache on disk too."""
        x, weight = torch.zeros((1, 72), dtype=torch.bfloat16), torch.zeros((40, 72), dtype=torch.bfloat16)
        for _ in range(2):
            compilation._carve_outs.clear()
            skinny_linear._vector_kernel.device_caches.clear()  # type: ignore[attr-defined]  # Triton's own
            with compiling(1):
                for percent in (3, 17):
                    skinny_linear.skinny_linear(x, weight, tiling=VectorTiling(8, 4, 1, percent))
                launch_two(3)  # which wish for nothing
            assert sorted(compilation._carve_outs.values()) == [3, 17]
        assert compiled.cached.count("_vector_kernel") == 2

    def launch_two(rows: int) -> None:
        settings, seeds = torch.zeros((8, rows), dtype=torch.int32), torch.zeros(rows, dtype=torch.int64)
        records = torch.ones((1, RECORD_WORDS), dtype=torch.int32)
        join_rows(settings, seeds, torch.zeros((rows, 3), dtype=torch.int32), records, records[0])
        copy_blocks(torch.zeros((1, 2, 4, 1, 16, 16)), torch.zeros((1, 2), dtype=torch.int32))

    def test_processes_compile_into_the_cache(
        compiled: Compiled, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """So this one finds it there. Where they die, it compiles itself."""
        monkeypatch.setattr(compile_processes, "MOST_PROCESSES", 1)
        caplog.set_level("DEBUG", "asyncllm")
        with CompileProcesses() as processes:
            processes.start()
            with compiling(1, processes):
                launch_two(3)
            assert sorted(compiled.names) == sorted(compiled.cached) == ["_block_copy_kernel", "_row_join_kernel"]
            assert sum("compiled _" in record.getMessage() for record in caplog.records) == 2
            assert processes.compile(b"no job") is not None
            monkeypatch.setattr(Connection, "send_bytes", lambda connection, data: connection.close())
            del compiled.names[:], compiled.cached[:]
            with compiling(1, processes):
                launch_two(4)
            assert compiled.cached == []

    @pytest.mark.skipif(not GLUON_AVAILABLE, reason="needs Triton 3.6")
    @pytest.mark.parametrize("dim", [64, 128])
    def test_large_tiles_are_attended_at_full_speed(dim: int, compiled: Compiled) -> None:
        """Compiled in a process of its own, as a Gluon kernel is. The machine code neither keeps registers in memory
        nor waits for each product."""
        shape = AttentionShape(8, 2, dim, 64, None)
        tilings = default_tilings(
            shape, torch.bfloat16, multiprocessors=132, descriptors=True, specialized=True, deterministic=False
        )
        assert tilings[1].programs == 132
        plan = make_attention_plan(
            shape, torch.bfloat16, torch.device("cpu"), max_tokens=256, max_sequences=2, tilings=tilings
        )
        query = torch.zeros((256, 8, dim), dtype=torch.bfloat16)
        cache, table = torch.zeros((2, 9, 2, 64, dim), dtype=torch.bfloat16), torch.zeros((2, 8), dtype=torch.int32)
        with CompileProcesses() as processes:
            processes.start()
            with compiling(2, processes):
                paged_attention(query, cache, table, plan, scale=0.1)
        names = ["_attention_kernel", "_specialized_attention_kernel"]
        assert sorted(compiled.names) == sorted(compiled.cached) == names
        specialized: Any = specialized_attention._specialized_attention_kernel
        ((kernels, *_),) = specialized.device_caches.values()
        (kernel,) = kernels.values()
        code = kernel.asm["sass"]
        assert 0 < code.count("WARPGROUP.DEPBAR") * 4 < code.count("HGMMA"), "waits and products of the matrix units"
        assert "STL" not in code

    @pytest.mark.skipif(not GLUON_AVAILABLE, reason="needs Triton 3.6")
    @pytest.mark.parametrize("groups", [2, 3])
    def test_many_rows_are_multiplied_at_full_speed(groups: int, compiled: Compiled) -> None:
        """As above; the number of rows is nothing that a kernel is compiled for."""
        tiling, weight = gated_linear.GatedTiling(groups), torch.zeros((48, 64), dtype=torch.bfloat16)
        with CompileProcesses() as processes:
            processes.start()
            with compiling(2, processes):
                for rows in (1000, 1001):
                    gated_linear.gated_linear(weight.new_zeros((rows, 64)), weight, Activation.SILU, tiling=tiling)
        assert compiled.names == compiled.cached == ["_gated_product_kernel"]
        kernel: Any = gated_linear._gated_product_kernel
        ((kernels, *_),) = kernel.device_caches.values()
        (binary,) = kernels.values()
        code = binary.asm["sass"]
        assert code.count("HGMMA.64x256x16") == 4 * groups
        assert code.count("WARPGROUP.DEPBAR") == groups
        assert "STL" not in code
