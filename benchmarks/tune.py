"""The fastest way to multiply by shape and number of rows: measures, and writes the table that the engine ships.

    python -m benchmarks.tune [MODEL ...] [--rows 1 16 ...] [--specialized] [--output FILE]

The models are folders of `benchmarks/models`; of a table that is there already, other entries stay. A product is timed
where it stands: in a decode step of the model with a few of its layers, whose weights no cache holds, from a CUDA
graph: kernels overlap with those beside them, so that the fastest by itself need not make the fastest step. And it is
timed when it has run for a while: under load a GPU lowers its clock to stay within its power.
A step of more rows than `skinny_linear` takes is one of prompts.
Each product in turn takes the tiling that makes the step fastest; then again, among the best, beside what the others
have become, and with other divisions of the fast memory. Tilings are checked first. A table that is no faster than the
one before is not kept. Beside the table, all times go to `benchmarks/results/products-DEVICE.json`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from asyncllm.engine.execution.kv_cache import allocate_device_cache, make_cache_layout
from asyncllm.kernels import gated_linear as gated
from asyncllm.kernels import skinny_linear as skinny
from asyncllm.kernels import specialized_linear
from asyncllm.kernels.activation import Activation
from asyncllm.kernels.attention_plan import AttentionShape, Sequences, make_attention_plan, plan_attention
from asyncllm.kernels.gated_linear import GatedTiling, gated_linear
from asyncllm.kernels.language import next_power_of_2
from asyncllm.kernels.skinny_linear import (
    MOST_ROWS,
    SPLIT_TILES,
    RowNorm,
    Tiling,
    VectorTiling,
    linear_parts,
    skinny_linear,
    skinny_linear_reference,
)
from asyncllm.layers.linear import GatedLinear, KernelLinear
from asyncllm.layers.paged_attention import PagedBatch
from asyncllm.layers.parameter import Placement
from asyncllm.layers.product_table import AnyTiling, Product, ProductTable, read_table, table_path, write_table
from asyncllm.models.checkpoint import fill_weights
from asyncllm.models.configuration import ModelConfig
from asyncllm.models.forward_batch import ForwardBatch
from asyncllm.models.llama import Llama
from asyncllm.models.registry import read_model_config
from asyncllm.weights.source import resolve_source
from benchmarks.gpu import SETTINGS
from benchmarks.kernels import CACHE_BYTES
from benchmarks.model_folders import model_folder, model_names

ROOT = Path(__file__).parent
ROWS = (1, 16, 32, 64, 128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
SHARED_BYTES = 220_000  # of a multiprocessor, that the stages of its programs may take
PROGRAMS = range(60, 1100)
CONTEXT = 64  # positions that a row attends to: few, since attention's time only adds to the noise
HEAT = 1.0  # seconds of load before anything is measured
WARM, TIMED = 20, 40  # replays
SECONDS = 0.3  # of timed replays of steps of more than `MOST_ROWS`: so long that the clock is what it will be
FINALISTS = 6  # tilings of a product that are tried again
CARVE_OUTS = (0, 4, 16)  # those of one row, with each of these
SAME = 1.002
"""Of steps that take up to this many times the shortest, one whose kernel serves other rows as well is taken: each
kernel is compiled when an engine starts."""
WORTH = 0.999
"""A step with ours must take at most this part of the library's time: what differs less is a matter of chance."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds of the step, with this choice for the product; no tiling: the library's."""

    tiling: AnyTiling | None
    microseconds: float


@dataclass(frozen=True, slots=True)
class Operands:
    """What one product works on, to be checked or compiled."""

    x: torch.Tensor
    weight: torch.Tensor
    norm: RowNorm | None
    activation: Activation | None
    residual: torch.Tensor | None
    arrivals: torch.Tensor


def read_model(folder: Path) -> ModelConfig:
    return read_model_config(resolve_source(str(folder), SETTINGS).config)


def products_of(config: ModelConfig) -> list[Product]:
    """Those of a layer, and the head's."""
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
    """For one row: a thread has 16 to 128 numbers of W in registers, and as many programs run as these allow."""
    size = next_power_of_2(product.inputs)
    for warps in (1, 2, 4, 8, 16):
        for lines in (1, 2, 4, 8, 16):
            threads = 32 * warps
            of_weight, of_x = lines * size * (2 if product.gated else 1) // threads, size // threads
            registers = of_weight + of_x + 32  # two sets of W, two numbers each
            if not 16 <= of_weight <= 128 or not 8 <= of_x <= 64 or registers > 200:
                continue
            most = min(2048 // threads, 65_536 // (threads * registers))
            for programs in sorted({max(1, most // 2), max(1, most * 3 // 4), most}):
                if programs and product.inputs * lines * programs >= 4096:
                    yield VectorTiling(lines, warps, programs)


def tile_tilings(product: Product, rows: int) -> Iterator[Tiling]:
    """For more: tiles of few or many rows, few or many stages, parts so that every multiprocessor has work."""
    halves = 2 if product.gated else 1
    kinds = [(64, 64, 4), (64, 128, 4), (64, 256, 4), (128, 64, 4), (128, 64, 8), (128, 128, 8), (256, 64, 8)]
    padded = max(16, next_power_of_2(rows))
    for at_once in (padded, padded // 2, padded // 4):
        for lines, width, warps in kinds:
            sums = lines * at_once * halves // (32 * warps)  # of a thread, in registers
            if at_once < min(padded, 32) or width > product.inputs or sums > 128 or (sums < 16 and lines > 64):
                continue
            size = 2 * width * (lines * halves + at_once)
            tiles = -(-product.outputs // lines) * (padded // at_once)
            for stages in sorted({min(SHARED_BYTES // room // size, 8) for room in (1, 2, 3)}):
                if stages < 2:
                    continue
                wanted = [
                    splits
                    for splits in (1, 2, 3, 4, 6, 8)
                    if tiles * splits in PROGRAMS and product.inputs // splits >= (1 if product.adds else 2) * width
                ]
                for splits in wanted[:3] or [1]:
                    yield Tiling(lines, width, warps, stages, splits, at_once)


def specialized_tilings(product: Product, rows: int) -> Iterator[Tiling]:
    """Those of `specialized_linear`: the ring is as long as shared memory is large."""
    halves = 2 if product.gated else 1
    padded = max(16, next_power_of_2(rows))
    for groups, width in itertools.product((1, 2), (64, 128)):
        for at_once in dict.fromkeys((padded, max(padded // 2, min(padded, 64)))):
            lines = 64 * groups
            size = 2 * width * (lines * halves + at_once)
            output = lines * at_once * (4 if product.adds else 2)  # exchanged between threads
            stages = min((226_000 - output) // size, 10)
            tiles = -(-product.outputs // lines) * (padded // at_once)
            if stages < 2 or at_once * halves > 256:
                continue
            for splits in (1, 2, 3, 4, 6, 8) if product.adds else (1,):
                if not product.adds or tiles * splits in range(60, 300):
                    yield Tiling(lines, width, 4 * groups, stages, splits, at_once, specialized=True)


def tilings(product: Product, rows: int, *, specialized: bool = False) -> list[AnyTiling]:
    """The candidates, or only those that are `specialized`."""
    if rows > MOST_ROWS:
        return [GatedTiling(2), GatedTiling(3)] if product.gated else []
    if rows == 1:
        return [] if specialized else list(vector_tilings(product))
    return [*(() if specialized else tile_tilings(product, rows)), *specialized_tilings(product, rows)]


def make_operands(product: Product, rows: int, device: torch.device) -> Operands:
    """Random, but for a CPU, where they are only looked at."""

    def make(*shape: int, scale: float = 1.0) -> torch.Tensor:
        empty = torch.empty(shape, dtype=torch.bfloat16, device=device)
        return empty.normal_(0.0, scale) if device.type == "cuda" else empty

    lines = product.outputs * (2 if product.gated else 1)
    return Operands(
        x=make(rows, product.inputs),
        weight=make(lines, product.inputs, scale=product.inputs**-0.5),
        norm=None if product.adds or rows > 1 else RowNorm(make(product.inputs), 1e-5),
        activation=Activation.SILU if product.gated else None,
        residual=make(rows, product.outputs) if product.adds else None,
        arrivals=torch.zeros(SPLIT_TILES, dtype=torch.int32, device=device),
    )


def multiply(operands: Operands, tiling: AnyTiling) -> torch.Tensor:
    """As a layer does; what that leaves in parts is added up."""
    if isinstance(tiling, GatedTiling):
        assert operands.activation is not None
        return gated_linear(operands.x, operands.weight, operands.activation, tiling=tiling)
    if operands.residual is not None and isinstance(tiling, Tiling) and tiling.splits > 1:
        parts = linear_parts(operands.x, operands.weight, tiling=tiling)
        return operands.residual.float() + parts.sum(0)
    return skinny_linear(
        operands.x,
        operands.weight,
        norm=operands.norm,
        activation=operands.activation,
        residual=operands.residual,
        arrivals=operands.arrivals,
        tiling=tiling,
    )


def checked_tilings(product: Product, rows: int, candidates: Sequence[AnyTiling]) -> list[AnyTiling]:
    """Those of the candidates that run. Raises where one is wrong; bfloat16 rounds by up to 4e-3."""
    operands = make_operands(product, rows, torch.device("cuda"))
    before = None if operands.residual is None else operands.residual.clone()
    exact = skinny_linear_reference(
        operands.x,
        operands.weight,
        norm=operands.norm,
        activation=operands.activation,
        residual=None if before is None else before.float(),
    ).float()
    found = []
    for tiling in candidates:
        if operands.residual is not None and before is not None:
            operands.residual.copy_(before)
        try:
            error = float((multiply(operands, tiling).float() - exact).norm() / exact.norm())
        except Exception as problem:  # too much shared memory, say
            print(f"{product}, {rows} rows, {tiling}: {problem}")
            continue
        if not error < 8e-3:
            raise AssertionError(f"{product}, {rows} rows, {tiling}: relative error {error:.2e}")
        found.append(tiling)
    return found


class ShortStep:
    """Steps of a model with a few of its layers, in which only products change: decode steps, and of many rows those
    that compute prompts."""

    def __init__(self, config: ModelConfig) -> None:
        device = torch.device("cuda")
        layer_bytes = sum(product.weight_bytes for product in products_of(config)[:-1])
        count = min(config.num_layers, max(3, int(CACHE_BYTES / layer_bytes) + 2))
        self.config = replace(config, num_layers=count, windows=config.windows[:count])
        self.layout = make_cache_layout(self.config.windows, config.num_kv_heads, config.head_dim, CONTEXT)
        placement = Placement(torch.bfloat16, device, kernels=True)
        self.model = Llama(self.config, self.layout.layers, CONTEXT, placement)
        fill_weights(self.model)
        self.cache = allocate_device_cache(self.layout, MOST_ROWS, torch.bfloat16, device).normal_()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch leaves it so
        self._pool = torch.cuda.graph_pool_handle()
        self._first: torch.cuda.CUDAGraph | None = None  # a pool lives as long as some graph that uses it

    def batch(self, rows: int) -> ForwardBatch:
        """Each row has a block of its own in each layer, and stands at its end; many rows are prompts that fill one."""
        each = 1 if rows <= MOST_ROWS else CONTEXT
        some = torch.arange(rows + 1, dtype=torch.int32, device="cuda")
        tokens, starts = some[:-1], some[::each].contiguous()
        numbers = some[: len(starts) - 1]
        positions = CONTEXT - each + tokens % each
        sequences = Sequences(starts, torch.full_like(numbers, CONTEXT), numbers, some[len(numbers) :][:1].clone())
        table = (numbers + 1)[:, None].contiguous()
        groups = []
        for group in self.layout.groups:
            shape = AttentionShape(
                self.config.num_heads, self.layout.num_kv_heads, self.layout.head_dim, CONTEXT, group.window
            )
            plan = make_attention_plan(
                shape,
                self.cache.dtype,
                self.cache.device,
                max_tokens=rows,
                max_sequences=len(numbers),
                least_shared=None,
            )
            plan_attention(plan, sequences, tokens=rows)
            groups.append(PagedBatch(positions, tokens // each, some[-1:].clone(), table, plan, chunks=each > 1))
        return ForwardBatch(
            token_ids=tokens,
            positions=positions,
            lengths=torch.full_like(tokens, CONTEXT) if self.model.rotary.length_dependent else None,
            sampled=None if rows <= MOST_ROWS else tokens[:MOST_ROWS],
            attention=tuple(groups),
            cache=self.cache,
        )

    def use(self, table: ProductTable) -> None:
        """In place of the device's own."""
        for linear in [*(each for layer in self.model.layers for _, each in layer.linears()), self.model.head]:
            inner = linear.linear if isinstance(linear, GatedLinear) else linear
            assert isinstance(inner, KernelLinear)
            inner.table = table

    def microseconds(self, batch: ForwardBatch, table: ProductTable) -> float:
        """Of one step among many."""
        self.use(table)
        few = len(batch.token_ids) <= MOST_ROWS
        with torch.cuda.stream(self._stream):
            # torch's own context would collect garbage each time
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(pool=self._pool)
            self.model.forward(batch)
            graph.capture_end()
            self._first = self._first or graph
            if few:
                replay(graph, WARM)
                return replay(graph, TIMED)
            count = max(1, int(1e6 * SECONDS / replay(graph, 1)))
            replay(graph, max(1, count // 2))
            return replay(graph, count)

    def warm_up(self, batch: ForwardBatch, table: ProductTable) -> None:
        """What a first launch allocates must not be in a graph, and the clock must have come down; `table` leaves
        products to the library."""
        self.use(table)
        with torch.cuda.stream(self._stream):
            torch.cuda.synchronize()
            self.model.forward(batch)
        until = time.monotonic() + HEAT
        while time.monotonic() < until:
            self.microseconds(batch, table)


def replay(graph: torch.cuda.CUDAGraph, count: int) -> float:
    """Microseconds of each of so many replays."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]  # torch's
    start.record()
    for _ in range(count):
        graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3 / count


@dataclass(frozen=True, slots=True)
class Tuned:
    """What came of one number of rows."""

    table: ProductTable
    library: float  # microseconds of a step without our products of more than one row
    before: float  # with the table as it was
    after: float
    timings: dict[str, list[Timing]]  # by product, the shortest first


def tune(step: ShortStep, rows: int, table: ProductTable, *, specialized: bool) -> Tuned:
    """The table with other choices for so many rows; if `specialized`, those that are, beside what the table has."""
    original = table
    batch = step.batch(rows)
    # the library alone multiplies many rows, but for those of a gate
    products = [each for each in products_of(step.config) if rows <= MOST_ROWS or each.gated]
    nothing = table
    for product in products:
        nothing = nothing.with_choice(product, rows, None)
    step.warm_up(batch, nothing)
    library, before = step.microseconds(batch, nothing), step.microseconds(batch, table)
    choices: dict[Product, list[AnyTiling | None]] = {}
    for product in products:
        candidates = tilings(product, rows, specialized=specialized)
        known = table.tiling(product, rows)
        if known is not None and known not in candidates:
            candidates.append(known)
        choices[product] = [None, *checked_tilings(product, rows, candidates)]
    timings: dict[str, list[Timing]] = {}
    for _ in range(2):
        for product, tried in choices.items():
            found = [Timing(each, step.microseconds(batch, table.with_choice(product, rows, each))) for each in tried]
            found.sort(key=lambda timing: timing.microseconds)
            timings.setdefault(product.name, found)
            table = table.with_choice(product, rows, choose(found, kernels_of(product, rows, table)))
            best = [each.tiling for each in found[:FINALISTS] if each.tiling is not None]
            choices[product] = [None, *dict.fromkeys(form for tiling in best for form in forms(tiling))]
    after = step.microseconds(batch, table)
    if after > before:
        table, after = original, before
    return Tuned(table, library, before, after, timings)


def forms(tiling: AnyTiling) -> list[AnyTiling]:
    """A tiling with all divisions of the fast memory that are tried."""
    if isinstance(tiling, VectorTiling):
        return [replace(tiling, carve_out=percent) for percent in CARVE_OUTS]
    return [tiling]


def choose(timings: Sequence[Timing], used: Collection[AnyTiling]) -> AnyTiling | None:
    """Of `timings`, the shortest first; what is as good and among the `used` kernels is preferred."""
    best = timings[0]
    library = next(each.microseconds for each in timings if each.tiling is None)
    if best.tiling is None or best.microseconds > WORTH * library:
        return None
    for each in timings:
        if each.tiling is not None and binary_of(each.tiling) in used and each.microseconds <= SAME * best.microseconds:
            return each.tiling
    return best.tiling


def kernels_of(product: Product, rows: int, table: ProductTable) -> set[AnyTiling]:
    """Those that other numbers of rows take for the product."""
    choices = table.choices.get(product.name, {})
    return {binary_of(tiling) for each, tiling in choices.items() if tiling is not None and each != rows}


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
    for module in (skinny, specialized_linear, gated):
        vars(module)["overlap_options"] = lambda device: {"OVERLAP": True, "launch_pdl": True}
    vars(skinny)["can_specialize"] = lambda x: True
    kernels: list[Any] = [
        skinny._vector_kernel,
        skinny._tile_kernel,
        specialized_linear._specialized_tile_kernel,
        gated._gated_product_kernel,
    ]
    for kernel in kernels:
        run = type(kernel).run

        def warm(*arguments: Any, run: Any = run, kernel: Any = kernel, **named: Any) -> Any:
            return run(kernel, *arguments, **{**named, "warmup": True})

        vars(kernel)["run"] = warm
    operands = make_operands(product, rows, torch.device("cpu"))
    try:
        multiply(operands, tiling)
    except Exception as error:
        print(f"{task}: {error}", flush=True)


def binary_of(tiling: AnyTiling) -> AnyTiling:
    """The same for all that share a binary."""
    if isinstance(tiling, VectorTiling):
        return replace(tiling, programs=0)
    return replace(tiling, splits=min(tiling.splits, 2)) if isinstance(tiling, Tiling) else tiling


def compile_all(products: Sequence[Product], rows: Sequence[int], *, specialized: bool) -> int:
    """Every kernel that will be measured; returns how many."""
    tasks = {
        (count == 1 and each.inputs, each.gated, each.adds, binary_of(tiling)): (each, count, tiling)
        for each in products
        for count in rows
        for found in tilings(each, count, specialized=specialized)
        for tiling in forms(found)
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
    parser.add_argument("--specialized", action="store_true", help="only try these beside what the table has")
    parser.add_argument("--output", type=Path, help="folder of both files, in place of where the engine looks")
    chosen = parser.parse_args()
    configs = {name: read_model(model_folder(name)) for name in chosen.model}
    products = list(dict.fromkeys(product for config in configs.values() for product in products_of(config)))
    print(compile_all(products, chosen.rows, specialized=chosen.specialized), "kernels compiled", flush=True)
    device = torch.cuda.get_device_name()
    table, times = read_table(device), []
    path = table_path(device)
    results = ROOT / "results" / f"products-{path.name}"
    if chosen.output:
        path, results = chosen.output / path.name, chosen.output / results.name
    command = " ".join(["python -m benchmarks.tune", *sys.argv[1:]])
    for name, config in configs.items():
        step = ShortStep(config)
        for rows in chosen.rows:
            tuned = tune(step, rows, table, specialized=chosen.specialized)
            table = tuned.table
            times.append(
                {
                    "model": name,
                    "layers": step.config.num_layers,
                    "rows": rows,
                    "library": tuned.library,
                    "before": tuned.before,
                    "after": tuned.after,
                    "products": {
                        product: [(each.microseconds, each.tiling and astuple(each.tiling)) for each in timings[:8]]
                        for product, timings in tuned.timings.items()
                    },
                }
            )
            print(f"{name}, {step.config.num_layers} layers, {rows} rows: library {tuned.library:.1f} µs, ", end="")
            print(f"table {tuned.before:.1f}, now {tuned.after:.1f}", flush=True)
            for product in products_of(config):
                print(f"  {product.name}: {table.tiling(product, rows)}", flush=True)
            write_table(path, table, command)
            results.write_text(json.dumps({"command": command, "device": device, "steps": times}), encoding="utf-8")


if __name__ == "__main__":
    main()
