"""Where the time of a step goes on the CPU, by kinds of operators: the engine's runner, without the engine.

python -m benchmarks.cpu_steps [MODEL] [--threads N]

The shares are the profiler's, whose own work is in them; beside them stands what a step takes undisturbed, in time that
passes and in processor time of its thread. What neither an operator nor one of our kernels takes is the interpreter's:
the batch, the layers' Python.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from asyncllm.cli import find_smollm2
from asyncllm.config import EngineConfig
from asyncllm.engine.execution.cpu_runner import StepExecutor
from asyncllm.engine.execution.loading import load_executor
from asyncllm.engine.execution.runner import ModelFacts
from asyncllm.engine.plan import Chunk, Int32Array, RowJoin, RowSampling, StepPlan, TableEdits
from asyncllm.kernels.cpu.decoder import DecoderCall
from asyncllm.layers.cpu_product import KernelProduct
from asyncllm.weights.source import resolve_source
from benchmarks.profile_report import table

ROWS, PROMPT, HISTORY, ROUNDS = 16, 512, 64, 12
_NO_ROWS = np.zeros(0, np.int32)
ROLES = {
    "layers, head, draw, our kernel": ("kernel: step",),
    "products, our kernel": ("kernel: product",),
    "packed products": ("int4pack_mm",),
    "dense products": ("linear_pointwise", "addmm", "aten::mm", "mkldnn_linear"),
    "attention": ("scaled_dot_product",),
    "cache": ("index_copy_", "index_fill_", "index_select"),
    "norms": ("layer_norm", "batch_norm", "vector_norm", "pow_", "div_", "zeros_like"),
    "rope, signs of norms": ("roll", "aten::cat", "aten::mul", "addcmul_"),
    "activation, residual": ("silu", "gelu", "add_"),
    "sampling": ("exp_", "cumsum", "amax", "aten::sub", "aten::sum", "searchsorted", "gather"),
    "views, copies, memory": ("aten::",),
}
"""By a part of an operator's name, the first that fits."""


class Steps:
    """Steps written by hand, of rows that have all computed `HISTORY` tokens."""

    def __init__(self, executor: StepExecutor, facts: ModelFacts) -> None:
        self._executor = executor
        blocks = -(-2 * PROMPT // facts.block_size)
        entries = np.arange(ROWS * blocks, dtype=np.int32)
        self._ids = np.random.default_rng(0).integers(0, facts.vocab_size, 2 * PROMPT).astype(np.int32)
        drawn = RowSampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)
        self.run(
            [(row, 0, HISTORY) for row in range(ROWS)],
            joins=tuple(RowJoin(row, row, drawn) for row in range(ROWS)),
            tables=TableEdits(np.zeros_like(entries), entries // blocks, entries % blocks, entries + 1),
        )

    def run(
        self,
        chunks: Sequence[tuple[int, int, int]] = (),
        decode: Int32Array = _NO_ROWS,
        joins: tuple[RowJoin, ...] = (),
        tables: TableEdits | None = None,
    ) -> None:
        """Compute chunks of (row, first position, tokens), and the next token of each row of `decode`."""
        plan = StepPlan(
            step=0,
            joins=joins,
            tables=tables or TableEdits(_NO_ROWS, _NO_ROWS, _NO_ROWS, _NO_ROWS),
            copies=_NO_ROWS.reshape(0, 2),
            chunks=tuple(Chunk(row, start, self._ids[start : start + count], True) for row, start, count in chunks),
            decode_rows=decode,
            decode_changed=False,
        )
        self._executor.execute(plan, lambda tokens: None)


def name_kernels() -> None:
    """Let the profiler see calls of our kernels, which are no operators."""

    def named(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(*arguments: Any, **options: Any) -> Any:
            with record_function(name):
                return call(*arguments, **options)

        return recorded

    for name, kind in (("kernel: step", DecoderCall), ("kernel: product", KernelProduct)):
        for method in ("__call__", "normed"):
            if hasattr(kind, method):
                setattr(kind, method, named(name, getattr(kind, method)))


def kinds(steps: Steps) -> dict[str, Callable[[], None]]:
    """What is looked at, by name: a step. Decoding rows go on by a token each time."""
    every = np.arange(ROWS, dtype=np.int32)
    return {
        "decode, 1 row": partial(steps.run, decode=every[1:2]),
        f"decode, {ROWS} rows": partial(steps.run, decode=every),
        f"the first {PROMPT} tokens of a prompt": partial(steps.run, [(0, 0, PROMPT)]),
        f"the next {PROMPT}": partial(steps.run, [(0, PROMPT, PROMPT)]),
        f"{ROWS} prompts of {PROMPT // ROWS} tokens": partial(
            steps.run, [(row, 0, PROMPT // ROWS) for row in range(ROWS)]
        ),
    }


def report(name: str, step: Callable[[], None]) -> str:
    """One step's table."""
    step()
    passed, worked = [], []
    for _ in range(ROUNDS):
        wall, thread = time.perf_counter(), time.thread_time()
        step()
        worked.append(time.thread_time() - thread)
        passed.append(time.perf_counter() - wall)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        start = time.perf_counter()
        for _ in range(ROUNDS):
            step()
        whole = (time.perf_counter() - start) / ROUNDS
    times: dict[str, float] = defaultdict(float)
    calls: dict[str, float] = defaultdict(float)
    for event in profiled.key_averages():
        role = next((role for role, parts in ROLES.items() if any(part in event.key for part in parts)), None)
        if role is not None:
            times[role] += event.self_cpu_time_total / 1e6 / ROUNDS
            calls[role] += event.count / ROUNDS
    times["interpreter"] = max(0.0, whole - sum(times.values()))
    rows = [
        (role, f"{calls[role]:.0f}" if calls[role] else "", f"{1000 * seconds:.2f}", f"{seconds / whole:.0%}")
        for role, seconds in sorted(times.items(), key=lambda item: -item[1])
    ]
    took = (
        f"Undisturbed {1000 * min(passed):.1f} ms at best, {1000 * median(passed):.1f} in the middle; processor time "
        f"of its thread {1000 * min(worked):.1f} and {1000 * median(worked):.1f} ms."
    )
    return "\n".join([f"## {name}", "", took, "", *table(["work", "calls", "ms", "share"], rows)])


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table for each kind of step."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cpu_steps", description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", help="a Hub id, a folder or a .gguf file (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--threads", type=int)
    chosen = parser.parse_args(arguments)
    name_kernels()
    config = EngineConfig(max_num_seqs=ROWS, max_model_len=2 * PROMPT, threads=chosen.threads)
    executor, facts = load_executor(resolve_source(chosen.model or find_smollm2(), config), config)
    print(f"# {facts.dtype}, {torch.get_num_threads()} threads\n")
    with torch.inference_mode():
        for name, step in kinds(Steps(executor, facts)).items():
            print(report(name, step))


if __name__ == "__main__":
    main()
