"""Kernels on a GPU: checked against their references, then timed beside what the hardware allows. Those that sample
have a benchmark of their own (`benchmarks.sampling`).

    python -m benchmarks.kernels [--limit-bandwidth 4.45] [--limit-flops 788] [--only attention]

Times are of launches replayed from a CUDA graph, over enough copies of the data that caches do not help. The limits are
those measured on an H200: TB/s of reading, TFLOP/s of a bfloat16 matrix product.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from asyncllm.kernels import (
    activation,
    attention_plan,
    block_copy,
    embedding,
    paged_attention,
    rms_norm,
    rope_cache,
)
from asyncllm.kernels import skinny_linear as linear

DTYPE = torch.bfloat16
DEVICE = torch.device("cuda")
CACHE_BYTES = 120_000_000  # twice an H200's second-level cache: data of this size is read from memory every time


@dataclass(frozen=True)
class Work:
    """What is timed: launches that each do the same amount on other data."""

    kernel: str
    shape: str
    launches: Sequence[Callable[[], object]]
    bytes: float = 0.0  # of one launch: least that it must move
    flops: float = 0.0  # of one launch
    peer: Sequence[Callable[[], object]] = ()  # launches of another library that compute the same


def seconds_of(launches: Sequence[Callable[[], object]], repeats: int = 5) -> float:
    """Median seconds of one launch."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call] # torch leaves it so
    torch.cuda.synchronize()  # what was made on another stream is there
    with torch.cuda.stream(stream):
        for launch in launches:
            launch()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for launch in launches:
                launch()
        graph.replay()
        times = []
        for _ in range(repeats):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3 / len(launches))
    return float(statistics.median(times))


def error_of(actual: torch.Tensor, exact: torch.Tensor) -> float:
    """Norm of the difference over norm of the exact result."""
    return float((actual.double() - exact.double()).norm() / exact.double().norm())


def check(name: str, actual: torch.Tensor, exact: torch.Tensor, bound: float = 8e-3) -> None:
    """Raise where the kernel is wrong; bfloat16 rounds by up to 4e-3."""
    error = error_of(actual, exact)
    if not error < bound:
        raise AssertionError(f"{name}: relative error {error:.2e} is over {bound:.0e}")


def copies(bytes_each: float) -> int:
    """How many sets of data to go round."""
    return max(4, min(64, int(CACHE_BYTES / bytes_each) + 1))


def randn(*shape: int) -> torch.Tensor:
    """Normal bfloat16 numbers."""
    return torch.randn(shape, device=DEVICE, dtype=DTYPE)


def make_step(
    shape: attention_plan.AttentionShape, lengths: list[int], queries: list[int]
) -> tuple[attention_plan.Sequences, torch.Tensor, int]:
    """Sequences, a block table with blocks in random order, and how many blocks the cache has."""
    needed = [-(-length // shape.block_size) for length in lengths]
    blocks = sum(needed) + 1
    order = (torch.randperm(blocks - 1, device=DEVICE) + 1).int()
    table = torch.zeros((len(lengths), max(needed)), dtype=torch.int32, device=DEVICE)
    start = 0
    for row, count in enumerate(needed):
        table[row, :count] = order[start : start + count]
        start += count

    def on_device(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    starts = torch.tensor([0, *queries]).cumsum(0).tolist()
    sequences = attention_plan.Sequences(
        on_device(starts), on_device(lengths), on_device(list(range(len(lengths)))), on_device([len(lengths)])
    )
    return sequences, table, blocks


def attention_work(
    shape: attention_plan.AttentionShape,
    lengths: list[int],
    queries: list[int],
    name: str,
    *,
    verify: bool = True,
) -> Work:
    """Paged attention of one step; reading the keys and values, and two products of causal size, are the least."""
    sequences, table, blocks = make_step(shape, lengths, queries)
    tokens = sum(queries)
    seen = [min(length, shape.window or length) for length in lengths]
    size = 2 * sum(seen) * shape.kv_heads * shape.head_dim * DTYPE.itemsize
    pairs = sum(q * length - q * (q - 1) // 2 for q, length in zip(queries, lengths, strict=True))
    caches = [randn(2, blocks, shape.kv_heads, shape.block_size, shape.head_dim) for _ in range(min(copies(size), 8))]
    query = randn(tokens, shape.q_heads, shape.head_dim)
    plan = attention_plan.make_attention_plan(shape, DTYPE, DEVICE, max_tokens=tokens, max_sequences=len(lengths))
    attention_plan.plan_attention(plan, sequences, tokens=tokens)
    scale = shape.head_dim**-0.5
    chunks = any(each > 1 for each in queries)
    output = torch.empty_like(query)

    def launch(cache: torch.Tensor) -> torch.Tensor:
        return paged_attention.paged_attention(query, cache, table, plan, scale=scale, chunks=chunks, output=output)

    if verify:
        actual = launch(caches[0]).clone()
        exact = paged_attention.paged_attention_reference(query, caches[0], table, shape, sequences, scale=scale)
        check(f"attention {name}", actual, exact)
        again = launch(caches[0])
        if not torch.equal(actual, again):
            raise AssertionError(f"attention {name}: two runs differ")
    return Work(
        "attention",
        name,
        [partial(launch, cache) for cache in caches],
        bytes=float(size) if not chunks else 0.0,
        flops=4.0 * pairs * shape.head_dim * shape.q_heads if chunks else 0.0,
    )


LLAMA = attention_plan.AttentionShape(32, 8, 128, 64, None)
QWEN = attention_plan.AttentionShape(16, 8, 128, 64, None)
DECODE = [(128, 300), (128, 1024), (128, 4000), (1, 300), (1, 2000), (1, 32_768), (16, 1024), (256, 700)]
PREFILL = [(4, 4096), (1, 4096), (1, 16_384)]


def attention() -> Iterator[Work]:
    """Decode and mixed steps of Llama-3.1-8B."""
    for rows, length in DECODE:
        yield attention_work(LLAMA, [length] * rows, [1] * rows, f"decode {rows} × {length}")
    uneven = torch.randint(100, 2000, (128,), generator=torch.Generator().manual_seed(0)).tolist()
    yield attention_work(LLAMA, uneven, [1] * 128, "decode 128 × 100..2000")
    yield attention_work(LLAMA, [20_000, *[300] * 63], [1] * 64, "decode 63 × 300 and 20,000")
    yield attention_work(LLAMA, [8192, *[1000] * 63], [512, *[1] * 63], "512 of 8,192 beside 63 × 1,000")
    yield attention_work(LLAMA, [32_768], [64], "64 of 32,768")


def prefill() -> Iterator[Work]:
    """Whole prompts, beside cuDNN, and chunks."""
    for name, shape in (("", LLAMA), (" (Qwen3-0.6B)", QWEN)):
        for rows, length in PREFILL:
            work = attention_work(
                shape, [length] * rows, [length] * rows, f"prefill {rows} × {length}{name}", verify=length <= 4096
            )
            yield replace(work, peer=cudnn_launches(shape, rows, length))
    yield attention_work(LLAMA, [10_240] * 2, [2048] * 2, "2,048 of 10,240, twice")
    yield attention_work(LLAMA, [8192], [640], "640 of 8,192")


def cudnn_launches(shape: attention_plan.AttentionShape, rows: int, length: int) -> list[Callable[[], object]]:
    """cuDNN's attention on contiguous tensors, for comparison."""

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

    heads = (shape.q_heads, shape.kv_heads, shape.kv_heads)
    return [partial(attend, *(randn(rows, each, length, shape.head_dim) for each in heads)) for _ in range(3)]


def planning() -> Iterator[Work]:
    """What is paid once a step for all layers."""
    for rows in (128, 1024):
        sequences, _, _ = make_step(LLAMA, [300] * rows, [1] * rows)
        plan = attention_plan.make_attention_plan(LLAMA, DTYPE, DEVICE, max_tokens=rows, max_sequences=rows)
        launch = partial(attention_plan.plan_attention, plan, sequences, tokens=rows)
        yield Work("plan attention", f"{rows} rows", [launch] * 20)


def norms() -> Iterator[Work]:
    """RMSNorm at widths of Llama-3.1-8B and Qwen3-0.6B."""
    for rows, size in [(1, 4096), (128, 4096), (128, 1024), (8192, 4096)]:
        moved = 2.0 * rows * size * DTYPE.itemsize
        sets = [randn(rows, size) for _ in range(copies(moved))]
        weight = randn(size)
        check("rms_norm", rms_norm.rms_norm(sets[0], weight, 1e-5), rms_norm.rms_norm_reference(sets[0], weight, 1e-5))
        launches = [partial(rms_norm.rms_norm, x, weight, 1e-5) for x in sets]
        yield Work("rms_norm", f"{rows} × {size}", launches, bytes=moved)


def activations() -> Iterator[Work]:
    """SiLU·mul."""
    for rows, size in [(1, 14_336), (128, 14_336), (8192, 14_336)]:
        moved = 3.0 * rows * size * DTYPE.itemsize
        sets = [randn(rows, 2 * size) for _ in range(copies(moved))]
        kind = activation.Activation.SILU
        check(
            "activation",
            activation.gated_activation(sets[0], kind),
            activation.gated_activation_reference(sets[0], kind),
        )
        yield Work(
            "silu · mul",
            f"{rows} × {size}",
            [partial(activation.gated_activation, x, kind) for x in sets],
            bytes=moved,
        )


def ropes() -> Iterator[Work]:
    """Rotation and cache write, Llama-3.1-8B; with qk-norm, Qwen3-0.6B."""
    for q_heads, norm in [(32, False), (16, True)]:
        for tokens in (1, 128, 8192):
            yield _rope(q_heads, tokens, norm)


def _rope(q_heads: int, tokens: int, norm: bool) -> Work:
    dim, kv_heads, size = 128, 8, 64
    table = torch.rand((40_960, dim), device=DEVICE)
    blocks = torch.randperm(tokens, device=DEVICE).int()[:, None].expand(-1, 20).contiguous()
    rows = torch.arange(tokens, dtype=torch.int32, device=DEVICE)
    positions = torch.randint(0, 1200, (tokens,), dtype=torch.int32, device=DEVICE)
    count = torch.tensor([tokens], dtype=torch.int32, device=DEVICE)
    moved = 2.0 * tokens * (q_heads + 2 * kv_heads) * dim * DTYPE.itemsize
    cache = torch.zeros((2, tokens + 1, kv_heads, size, dim), dtype=DTYPE, device=DEVICE)
    weights = rope_cache.HeadNorm(randn(dim), randn(dim), 1e-6) if norm else None
    sets = [randn(tokens, (q_heads + 2 * kv_heads) * dim) for _ in range(copies(moved))]

    def launch(qkv: torch.Tensor) -> torch.Tensor:
        return rope_cache.rope_cache(
            qkv, positions, rows, count, table=table, cache=cache, block_table=blocks, norm=weights
        )

    expected = torch.zeros_like(cache)
    exact = rope_cache.rope_cache_reference(
        sets[0], positions, rows, count, table=table, cache=expected, block_table=blocks, norm=weights
    )
    check("rope_cache", launch(sets[0]), exact)
    check("rope_cache's cache", cache, expected)
    name = f"{tokens} × ({q_heads} + 2 · {kv_heads}) heads{', norm' if norm else ''}"
    return Work("rope + cache", name, [partial(launch, x) for x in sets], bytes=moved)


def small_ones() -> Iterator[Work]:
    """Embedding and block copies."""
    table = randn(128_256, 4096)
    for tokens in (128, 8192):
        ids = torch.randint(0, 128_256, (tokens,), dtype=torch.int32, device=DEVICE)
        if not torch.equal(embedding.embedding(table, ids), embedding.embedding_reference(table, ids)):
            raise AssertionError("embedding")
        yield Work(
            "embedding",
            f"{tokens} × 4096",
            [partial(embedding.embedding, table, ids)] * 8,
            bytes=2.0 * tokens * 4096 * DTYPE.itemsize,
        )
    pool = randn(32, 2, 64, 8, 64, 128)
    pairs = torch.tensor([[i, i + 32] for i in range(8)], dtype=torch.int32, device=DEVICE)
    expected = pool.clone()
    block_copy.copy_blocks_reference(expected, pairs)
    block_copy.copy_blocks(pool, pairs)
    if not torch.equal(pool, expected):
        raise AssertionError("block_copy")
    moved = 2.0 * 8 * pool[:, :, 0].numel() * DTYPE.itemsize
    yield Work("block copy", "8 blocks, 32 layers", [partial(block_copy.copy_blocks, pool, pairs)] * 4, bytes=moved)


def linears() -> Iterator[Work]:
    """Matrices of one layer of Llama-3.1-8B, with the library's product beside ours; `benchmarks.tune` looks closer."""
    for rows in (1, 16, 32, 64):
        for outputs, inputs in [(6144, 4096), (4096, 4096), (28_672, 4096), (4096, 14_336), (128_256, 4096)]:
            weights = [randn(outputs, inputs) for _ in range(copies(2.0 * outputs * inputs))]
            x = randn(rows, inputs)
            exact = linear.skinny_linear_reference(x, weights[0])
            check(f"skinny_linear {rows} × {outputs} × {inputs}", linear.skinny_linear(x, weights[0]), exact)
            products: dict[str, Callable[..., object]] = {
                "linear": linear.skinny_linear,
                "cuBLAS": torch.nn.functional.linear,
            }
            for kernel, product in products.items():
                yield Work(
                    kernel,
                    f"{rows} × {outputs} × {inputs}",
                    [partial(product, x, weight) for weight in weights],
                    bytes=2.0 * outputs * inputs,
                )


GROUPS: dict[str, Callable[[], Iterator[Work]]] = {
    "attention": attention,
    "prefill": prefill,
    "plan": planning,
    "norm": norms,
    "activation": activations,
    "rope": ropes,
    "small": small_ones,
    "linear": linears,
}


def main() -> None:
    """Check and time what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit-bandwidth", type=float, default=4.45, help="TB/s")
    parser.add_argument("--limit-flops", type=float, default=788.0, help="TFLOP/s")
    parser.add_argument("--only", choices=GROUPS, action="append")
    options = parser.parse_args()
    torch.manual_seed(0)
    print(f"{'kernel':20} {'shape':48} {'µs':>9} {'rate':>15} {'of limit':>8}")
    for name in options.only or GROUPS:
        for work in GROUPS[name]():
            seconds = seconds_of(work.launches)
            rate, share, beside = "", "", ""
            if work.flops:
                rate = f"{work.flops / seconds / 1e12:.0f} TFLOP/s"
                share = f"{work.flops / seconds / 1e12 / options.limit_flops:.0%}"
            elif work.bytes:
                rate = f"{work.bytes / seconds / 1e12:.2f} TB/s"
                share = f"{work.bytes / seconds / 1e12 / options.limit_bandwidth:.0%}"
            if work.peer:
                peer = seconds_of(work.peer)
                beside = f"   {peer / seconds:.0%} of cuDNN's rate, {work.flops / peer / 1e12:.0f} TFLOP/s"
            print(f"{work.kernel:20} {work.shape:48} {seconds * 1e6:9.1f} {rate:>15} {share:>8}{beside}", flush=True)


if __name__ == "__main__":
    main()
