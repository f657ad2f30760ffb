"""Decode attention as a layer runs it, behind the kernel that writes its keys: every tiling that may be worth it.

    python -m benchmarks.attention [--only TEXT] [--cache-dtype float8_e4m3fn]

Times are of (rope and cache write, attention) pairs replayed from a CUDA graph over caches that no cache of the GPU
holds, less the time of rope and cache write alone. The limit is the bandwidth of reading, 4.45 TB/s on an H200.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch

from asyncllm.kernels.attention_plan import (
    AttentionPlan,
    AttentionShape,
    Sequences,
    Tiling,
    default_tilings,
    make_attention_plan,
    plan_attention,
)
from asyncllm.kernels.paged_attention import paged_attention, paged_attention_reference
from asyncllm.kernels.rope_cache import rope_cache
from benchmarks.kernels import DEVICE, DTYPE, check, seconds_of

BLOCK = 64
LLAMA = AttentionShape(32, 8, 128, BLOCK, None)
QWEN = AttentionShape(16, 8, 128, BLOCK, None)
LIMIT = 4.45e12
QWEN_LOADS = ("1 × 300", "8 × 300", "128 × 300", "64 × 2,150, 1,500 shared", "64 × 1,900..2,600, 1,500 shared")
MOST_BYTES = 8_000_000_000  # of all copies of the cache


@dataclass(frozen=True)
class Load:
    """Decoding rows; the first `shared` tokens of all are the same."""

    name: str
    lengths: tuple[int, ...]
    shared: int = 0


LOADS = [
    Load("1 × 130", (130,)),
    Load("1 × 300", (300,)),
    Load("8 × 300", (300,) * 8),
    Load("128 × 300", (300,) * 128),
    Load("32 × 600", (600,) * 32),
    Load("128 × 1,000", (1000,) * 128),
    Load("128 × 4,000", (4000,) * 128),
    Load("64 × 2,150", (2150,) * 64),
    Load("64 × 2,150, 1,500 shared", (2150,) * 64, 1500),
    Load("64 × 1,900..2,600, 1,500 shared", tuple(1900 + 700 * (i * 29 % 64) // 63 for i in range(64)), 1500),
    Load("32 × 2,150, 1,500 shared", (2150,) * 32, 1500),
    Load("64 × 650", (650,) * 64),
    Load("1 × 32,768", (32_768,)),
    Load("128 × 100..2,000", tuple(100 + 1900 * (i * 79 % 128) // 127 for i in range(128))),
]


@dataclass(frozen=True)
class Variant:
    """How it is done."""

    name: str
    tiling: Tiling
    overlap: bool = True
    shares: bool = True


def variants(shape: AttentionShape, dtype: torch.dtype) -> Iterator[Variant]:
    """The default, and what could be better."""
    count = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    small, _ = default_tilings(shape, dtype, multiprocessors=count, descriptors=True)
    yield Variant("default", small)
    if small.many is None:
        yield Variant("4 warps", replace(small, warps=4))
        yield Variant("5 stages", replace(small, stages=5))
        return
    yield Variant("that of few tokens", replace(small, many=None))
    yield Variant("that of many tokens", replace(small.many, many=None))
    yield Variant("that of many, 3 stages", replace(small.many, many=None, stages=3))
    yield Variant("no overlap", small, overlap=False)
    yield Variant("nothing shared", small, shares=False)
    yield Variant("4 warps", replace(small, many=None, warps=4))


@dataclass(frozen=True)
class Bench:
    """A load on the device."""

    shape: AttentionShape
    sequences: Sequences
    table: torch.Tensor
    caches: list[torch.Tensor]
    qkv: torch.Tensor
    angles: torch.Tensor
    positions: torch.Tensor
    bytes: float

    @classmethod
    def make(cls, shape: AttentionShape, load: Load, dtype: torch.dtype, *, copies: int = 16) -> Bench:
        """Blocks in random order."""
        rows = len(load.lengths)
        common = load.shared // BLOCK
        needed = [-(-length // BLOCK) - common for length in load.lengths]
        order = (torch.randperm(sum(needed) + common, device=DEVICE) + 1).int()
        table = torch.zeros((rows, max(needed) + common), dtype=torch.int32, device=DEVICE)
        table[:, :common] = order[:common]
        start = common
        for row, count in enumerate(needed):
            table[row, common : common + count] = order[start : start + count]
            start += count
        lengths = torch.tensor(load.lengths, dtype=torch.int32, device=DEVICE)
        each = 2 * (len(order) + 1) * shape.kv_heads * BLOCK * shape.head_dim
        caches = [
            (0.5 * torch.randn((2, len(order) + 1, shape.kv_heads, BLOCK, shape.head_dim), device=DEVICE)).to(dtype)
            for _ in range(max(2, min(copies, MOST_BYTES // (each * dtype.itemsize))))
        ]
        tokens = sum(load.lengths) - (rows - 1) * common * BLOCK
        return cls(
            shape=shape,
            sequences=Sequences(
                torch.arange(rows + 1, dtype=torch.int32, device=DEVICE),
                lengths,
                torch.arange(rows, dtype=torch.int32, device=DEVICE),
                torch.tensor([rows], dtype=torch.int32, device=DEVICE),
            ),
            table=table,
            caches=caches,
            qkv=torch.randn((rows, (shape.q_heads + 2 * shape.kv_heads) * shape.head_dim), device=DEVICE, dtype=DTYPE),
            angles=torch.rand((40_000, shape.head_dim), device=DEVICE),
            positions=lengths - 1,
            bytes=2.0 * tokens * shape.kv_heads * shape.head_dim * dtype.itemsize,
        )

    def plan(self, variant: Variant) -> AttentionPlan:
        """Ready for launches."""
        rows = len(self.qkv)
        _, large = default_tilings(self.shape, self.caches[0].dtype, multiprocessors=132, descriptors=True)
        plan = make_attention_plan(
            self.shape,
            self.caches[0].dtype,
            DEVICE,
            max_tokens=rows,
            max_sequences=max(rows, 2),
            tilings=(variant.tiling, large),
            least_shared=256 if variant.shares else None,
        )
        plan_attention(plan, self.sequences, tokens=rows, block_table=self.table)
        return plan

    def rope(self, cache: torch.Tensor) -> torch.Tensor:
        """The kernel before."""
        return rope_cache(
            self.qkv,
            self.positions,
            self.sequences.rows,
            self.sequences.num_sequences,
            table=self.angles,
            cache=cache,
            block_table=self.table,
        )

    def attend(self, cache: torch.Tensor, plan: AttentionPlan, variant: Variant) -> torch.Tensor:
        """As a layer does."""
        query = self.rope(cache)
        return paged_attention(query, cache, self.table, plan, scale=0.09, chunks=False, overlap=variant.overlap)

    def exact(self) -> torch.Tensor:
        """What the first cache should give."""
        query, cache = self.rope(self.caches[0]), self.caches[0]
        return paged_attention_reference(query, cache, self.table, self.shape, self.sequences, scale=0.09)

    def verify(self, plan: AttentionPlan, variant: Variant, exact: torch.Tensor, name: str) -> None:
        """Compare with the reference, and two runs."""
        cache = self.caches[0]
        actual = self.attend(cache, plan, variant)
        check(name, actual, exact)
        if not torch.equal(actual, self.attend(cache, plan, variant)):
            raise AssertionError(f"{name}: two runs differ")


def compile_one(job: tuple[AttentionShape, Variant, str]) -> None:
    """In a process of its own, so that the measuring one finds the kernels compiled."""
    shape, variant, dtype = job
    for load in (LOADS[0], LOADS[2], LOADS[3]):
        bench = Bench.make(shape, load, getattr(torch, dtype), copies=2)
        bench.attend(bench.caches[0], bench.plan(variant), variant)
    torch.cuda.synchronize()


def main() -> int:
    """Compile side by side, then check and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="variants whose name has this, beside the default")
    parser.add_argument("--cache-dtype", action="append", choices=("bfloat16", "float8_e4m3fn"))
    parser.add_argument("--compile", action="store_true", help="only have the kernels compiled, for a later run")
    chosen = parser.parse_args()
    torch.manual_seed(0)
    shapes = {"Llama-3.1-8B": LLAMA, "Qwen3-0.6B": QWEN}
    dtypes = chosen.cache_dtype or ["bfloat16", "float8_e4m3fn"]
    jobs = [
        (shape, variant, dtype)
        for dtype in dtypes
        for shape in shapes.values()
        for variant in variants(shape, getattr(torch, dtype))
        if chosen.only in variant.name or variant.name == "default"
    ]
    with multiprocessing.get_context("spawn").Pool(14) as pool:
        pool.map(compile_one, jobs, chunksize=1)
    if chosen.compile:
        return 0
    wrong = False
    for dtype in dtypes:
        for name, shape in shapes.items():
            tried = [variant for other, variant, its in jobs if other is shape and its == dtype]
            for load in LOADS if shape is LLAMA else [each for each in LOADS if each.name in QWEN_LOADS]:
                bench = Bench.make(shape, load, getattr(torch, dtype))
                wrong |= not measure(f"{name}, {dtype}, {load.name}", bench, tried)
    return int(wrong)


def measure(name: str, bench: Bench, tried: list[Variant]) -> bool:
    """Print the times of a load; whether all results are right."""
    right = True
    alone = seconds_of([partial(bench.rope, cache) for cache in bench.caches])
    exact = bench.exact()
    print(f"\n{name}: limit {bench.bytes / LIMIT * 1e6:.1f} µs, rope alone {alone * 1e6:.1f} µs", flush=True)
    for variant in tried:
        plan = bench.plan(variant)
        try:
            bench.verify(plan, variant, exact, f"{name}, {variant.name}")
        except AssertionError as error:
            right = False
            print(f"  WRONG {error}")
        seconds = seconds_of([partial(bench.attend, each, plan, variant) for each in bench.caches]) - alone
        print(f"  {seconds * 1e6:8.1f} µs {bench.bytes / LIMIT / seconds:5.0%}  {variant.name}", flush=True)
    return right


if __name__ == "__main__":
    sys.exit(main())
