"""The fastest way to multiply by shape and number of rows: measures, and writes the table that the engine ships.

    python -m benchmarks.tune [MODEL ...] [--rows 1 16 ...] [--output FILE]

The models are folders of `benchmarks/models`; of a table that is there already, other entries stay. Each product is
timed as a step does it, from a CUDA graph over weights that no cache holds: the library's with the kernels that it
needs beside it, and ours with as many tilings as make sense, each checked first. Beside the table, the best times
go to `benchmarks/results/products-DEVICE.json`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from asyncllm.kernels import skinny_linear as skinny
from asyncllm.kernels.activation import Activation, gated_activation
from asyncllm.kernels.language import ceil_div, next_power_of_2
from asyncllm.kernels.rms_norm import rms_norm
from asyncllm.kernels.skinny_linear import (
    MOST_ROWS,
    SPLIT_TILES,
    RowNorm,
    Tiling,
    VectorTiling,
    skinny_linear,
    skinny_linear_reference,
)
from asyncllm.layers.product_table import AnyTiling, Product, read_table, table_path, write_table
from asyncllm.models.registry import read_model_config
from asyncllm.weights.source import resolve_source
from benchmarks.gpu import SETTINGS
from benchmarks.kernels import copies
from benchmarks.model_folders import model_folder, model_names

ROOT = Path(__file__).parent
ROWS = (1, 16, 32, 64, 128, 256)
SHARED_BYTES = 220_000  # of a multiprocessor, that the stages of its programs may take
MULTIPROCESSORS = 132  # of an H200
PROGRAMS = range(90, 1100)
WORTH = 0.98
"""Ours must take at most this part of the library's time: what differs less is a matter of chance."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds of one product; no tiling: the library's."""

    tiling: AnyTiling | None
    microseconds: float


@dataclass(frozen=True, slots=True)
class Operands:
    """What one product works on."""

    x: torch.Tensor
    weights: Sequence[torch.Tensor]
    norm: RowNorm | None
    activation: Activation | None
    residual: torch.Tensor | None
    arrivals: torch.Tensor


def products_of(folder: Path) -> list[Product]:
    """Those of a layer, and the head's."""
    config = read_model_config(resolve_source(str(folder), SETTINGS).config)
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    hidden, inner = config.hidden_size, config.intermediate_size
    return [
        Product(queries + 2 * keys, hidden),
        Product(hidden, queries, adds=True),
        Product(inner, hidden, gated=True),
        Product(hidden, inner, adds=True),
        Product(config.vocab_size, hidden),
    ]


def vector_tilings(product: Product) -> Iterator[VectorTiling]:
    """For one row: a thread takes 32 to 128 numbers of W at a time; some or all shared memory is W on its way."""
    size = next_power_of_2(product.inputs)
    halves = 2 if product.gated else 1
    for warps, lines in itertools.product((1, 2, 4, 8, 16), (1, 2, 4, 8)):
        threads = 32 * warps
        of_weight, of_x = lines * size * halves // threads, size // threads
        if not 32 <= of_weight <= 128 or not 8 <= of_x <= (128 if size > 8192 else 64):
            continue
        most = min(2048 // threads, 65_536 // (threads * (of_x + of_weight // 6 + 24)))
        for programs in (1, 2, 3, 4, 6, 8, 12, 16):
            if programs > most or threads * programs < 128:
                continue
            turns = ceil_div(product.outputs, MULTIPROCESSORS * programs * lines)
            turn = programs * lines * size * halves * 2  # bytes
            stages = {1 + min(shared // turn, turns, 24) for shared in (48_000, 104_000, 205_000)}
            yield from (VectorTiling(lines, warps, programs, each) for each in sorted(stages) if each > min(2, turns))


def tile_tilings(product: Product, rows: int) -> Iterator[Tiling]:
    """For more: few or many stages, parts so that every multiprocessor has something to do."""
    halves = 2 if product.gated else 1
    kinds = [(64, 128, 4), (64, 256, 4), (128, 64, 4), (128, 128, 8)]
    if rows > 64:
        kinds = [(64, 64, 4), (64, 128, 4), (128, 64, 8), (128, 128, 8), (256, 64, 8)]
    for lines, width, warps in kinds:
        if width > product.inputs or lines * rows * halves > 2 * 128 * 256:
            continue
        size = 2 * width * (lines * halves + max(16, rows))
        for stages in sorted({min(SHARED_BYTES // room // size, 8) for room in (1, 2, 3)}):
            if stages < 2:
                continue
            tiles = -(-product.outputs // lines)
            wanted = [
                splits
                for splits in (1, 2, 3, 4, 6, 8)
                if tiles * splits in PROGRAMS and product.inputs // splits >= 2 * width
            ]
            for splits in wanted[:3] or [1]:
                yield Tiling(lines, width, warps, stages, splits)


def tilings(product: Product, rows: int) -> list[AnyTiling]:
    """The candidates."""
    if rows > MOST_ROWS:
        return []
    return list(vector_tilings(product) if rows == 1 else tile_tilings(product, rows))


def make_operands(product: Product, rows: int, device: torch.device, count: int) -> Operands:
    """Random, but for a CPU, where they are only looked at."""

    def make(*shape: int, scale: float = 1.0) -> torch.Tensor:
        empty = torch.empty(shape, dtype=torch.bfloat16, device=device)
        return empty.normal_(0.0, scale) if device.type == "cuda" else empty

    lines = product.outputs * (2 if product.gated else 1)
    return Operands(
        x=make(rows, product.inputs),
        weights=[make(lines, product.inputs, scale=product.inputs**-0.5) for _ in range(count)],
        norm=None if product.adds or rows > 1 else RowNorm(make(product.inputs), 1e-5),
        activation=Activation.SILU if product.gated else None,
        residual=make(rows, product.outputs) if product.adds else None,
        arrivals=torch.zeros(SPLIT_TILES, dtype=torch.int32, device=device),
    )


def ours(operands: Operands, tiling: AnyTiling, weight: torch.Tensor) -> torch.Tensor:
    return skinny_linear(
        operands.x,
        weight,
        norm=operands.norm,
        activation=operands.activation,
        residual=operands.residual,
        arrivals=operands.arrivals,
        tiling=tiling,
    )


def library(operands: Operands, weight: torch.Tensor) -> torch.Tensor:
    x = operands.x
    if operands.norm is not None:
        x = rms_norm(x, operands.norm.weight, operands.norm.epsilon)
    if operands.residual is not None:
        return torch.addmm(operands.residual, x, weight.t(), out=operands.residual)
    result = torch.nn.functional.linear(x, weight)
    return result if operands.activation is None else gated_activation(result, operands.activation)


class Stopwatch:
    """Times launches from graphs that share memory; torch's own context would collect garbage for each of them."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch leaves it so
        self.pool = torch.cuda.graph_pool_handle()
        self.first: torch.cuda.CUDAGraph | None = None  # a pool lives as long as some graph that uses it

    def microseconds(self, launch: Callable[[torch.Tensor], object], weights: Sequence[torch.Tensor]) -> float:
        """Of one launch: the median of a few measurements of several rounds over all weights."""
        with torch.cuda.stream(self.stream):
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(pool=self.pool)
            for weight in weights:
                launch(weight)
            graph.capture_end()
            self.first = self.first or graph
            graph.replay()
            times = []
            for _ in range(3):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
                start.record()
                for _ in range(4):
                    graph.replay()
                end.record()
                end.synchronize()
                times.append(start.elapsed_time(end) * 1e3 / 4 / len(weights))
        return float(statistics.median(times))


def check(product: Product, operands: Operands, tiling: AnyTiling, exact: torch.Tensor, before: torch.Tensor) -> None:
    """Raise where the kernel is wrong; bfloat16 rounds by up to 4e-3."""
    if operands.residual is not None:
        operands.residual.copy_(before)
    actual = ours(operands, tiling, operands.weights[0])
    error = float((actual.float() - exact).norm() / exact.norm())
    if not error < 8e-3:
        raise AssertionError(f"{product}, {len(operands.x)} rows, {tiling}: relative error {error:.2e}")


def measure(product: Product, rows: int, watch: Stopwatch) -> list[Timing]:
    """The library's time first, then those of our tilings, the shortest first."""
    lines = product.outputs * (2 if product.gated else 1)
    operands = make_operands(product, rows, torch.device("cuda"), copies(2.0 * lines * product.inputs))
    before = torch.zeros(0) if operands.residual is None else operands.residual.clone()
    exact = skinny_linear_reference(
        operands.x,
        operands.weights[0],
        norm=operands.norm,
        activation=operands.activation,
        residual=None if operands.residual is None else before.float(),
    ).float()
    timings = []
    with torch.cuda.stream(watch.stream):
        torch.cuda.synchronize()
        library(operands, operands.weights[0])
        first = Timing(None, watch.microseconds(partial(library, operands), operands.weights))
        for tiling in tilings(product, rows):
            try:
                check(product, operands, tiling, exact, before)
            except Exception as error:  # too much shared memory, say
                if isinstance(error, AssertionError):
                    raise
                print(f"{product}, {rows} rows, {tiling}: {error}")
                continue
            time = watch.microseconds(partial(ours, operands, tiling), operands.weights)
            timings.append(Timing(tiling, time))
    return [first, *sorted(timings, key=lambda timing: timing.microseconds)]


def choose(timings: Sequence[Timing]) -> AnyTiling | None:
    """The fastest."""
    best = min(timings, key=lambda timing: timing.microseconds)
    return best.tiling if best.microseconds <= WORTH * timings[0].microseconds else None


# --- compiling, side by side, before the GPU is touched ---


class _Hopper:
    """Stands for the driver in processes that only compile."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget  # noqa: PLC0415

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0


def compile_product(task: tuple[Product, int, AnyTiling]) -> None:
    """Leave the binary in Triton's cache on disk."""
    import triton  # noqa: PLC0415

    product, rows, tiling = task
    triton.runtime.driver.set_active(_Hopper())
    vars(skinny)["overlap_options"] = lambda device: {"OVERLAP": True, "launch_pdl": True}
    kernels: list[Any] = [skinny._vector_kernel, skinny._tile_kernel]
    for kernel in kernels:
        run = type(kernel).run

        def warm(*arguments: Any, run: Any = run, kernel: Any = kernel, **named: Any) -> Any:
            return run(kernel, *arguments, **{**named, "warmup": True})

        vars(kernel)["run"] = warm
    operands = make_operands(product, rows, torch.device("cpu"), 1)
    try:
        ours(operands, tiling, operands.weights[0])
    except Exception as error:
        print(f"{task}: {error}", flush=True)


def compile_all(products: Sequence[Product], rows: Sequence[int]) -> int:
    """Every kernel that will be measured; returns how many."""
    tasks = {
        # what a binary depends on: of one row, not on how many programs there are
        (
            count == 1 and each.inputs,
            each.gated,
            each.adds,
            count,
            replace(tiling, programs=0) if isinstance(tiling, VectorTiling) else tiling,
        ): (each, count, tiling)
        for each in products
        for count in rows
        for tiling in tilings(each, count)
    }
    with multiprocessing.get_context("fork").Pool() as pool:
        pool.map(compile_product, tasks.values(), chunksize=4)
    return len(tasks)


def main() -> None:
    """Measure, print, write."""
    models = model_names()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tune", description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="*", default=models, help=f"of {', '.join(models)}; default: all")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--output", type=Path, help="folder of both files, in place of where the engine looks")
    chosen = parser.parse_args()
    products = list(dict.fromkeys(product for name in chosen.model for product in products_of(model_folder(name))))
    print(compile_all(products, chosen.rows), "kernels compiled", flush=True)
    device = torch.cuda.get_device_name()
    watch = Stopwatch()
    table, times = read_table(device), []
    path = table_path(device)
    results = ROOT / "results" / f"products-{path.name}"
    if chosen.output:
        path, results = chosen.output / path.name, chosen.output / results.name
    command = " ".join(["python -m benchmarks.tune", *sys.argv[1:]])
    for product in products:
        for rows in chosen.rows:
            timings = measure(product, rows, watch)
            if rows <= MOST_ROWS:
                table = table.with_choice(product, rows, choose(timings))
            times.append(
                {
                    "product": astuple(product),
                    "rows": rows,
                    "library": timings[0].microseconds,
                    "ours": [(each.microseconds, astuple(each.tiling)) for each in timings[1:7] if each.tiling],
                }
            )
            limit = product.weight_bytes / 4.45e6
            print(f"{product.name} {rows}: limit {limit:.1f}, library {timings[0].microseconds:.1f}", end="")
            print("".join(f"; {each.microseconds:.1f} {each.tiling}" for each in timings[1:4]), flush=True)
        write_table(path, table, command)
        results.write_text(json.dumps({"command": command, "device": device, "times": times}), encoding="utf-8")


if __name__ == "__main__":
    main()
