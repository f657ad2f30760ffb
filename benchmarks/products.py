"""What a model's matrix products take by themselves: the least that an engine can take on this processor.

python -m benchmarks.products MODEL          by number of rows, in bfloat16

A process of its own, as each engine has, started between theirs. Each matrix of each layer is its own piece of memory,
as in the model; the head is left out, since a prompt needs it for one row only.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from asyncllm.config import EngineConfig
from asyncllm.layers.cpu_product import CpuProduct, make_product
from asyncllm.layers.product_forms import ProductForms
from asyncllm.models.configuration import ModelConfig
from asyncllm.models.registry import read_model_config
from asyncllm.weights.source import resolve_source
from benchmarks.figures import ProductRate

ROWS = (1, 16, 512)
ROUNDS = 20
ROOT = Path(__file__).parent.parent


def measure_products(model: str) -> list[ProductRate]:
    """The rates, measured in a process of its own."""
    output = subprocess.run(
        [sys.executable, "-m", "benchmarks.products", model], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    return [ProductRate(**rate) for rate in json.loads(output)]


def matrix_shapes(config: ModelConfig) -> list[tuple[int, int]]:
    """(out, in) of the products of one layer, those of the same input as one."""
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    hidden, inner = config.hidden_size, config.intermediate_size
    return [(queries + 2 * keys, hidden), (hidden, queries), (2 * inner, hidden), (hidden, inner)]


def _has_blocks() -> bool:
    return hasattr(torch.ops.mkldnn, "_linear_pointwise") and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _measure(config: ModelConfig, forms: ProductForms) -> list[float]:
    """Seconds for each of `ROWS`: of all layers once, the fastest of some rounds."""
    products: list[tuple[int, CpuProduct]] = []
    for _ in range(config.num_layers):
        for shape in matrix_shapes(config):
            weight = torch.empty(shape, dtype=torch.bfloat16).uniform_(-0.1, 0.1)
            products.append((shape[1], make_product(weight, None, torch.bfloat16, forms).product))
    found = []
    for rows in ROWS:
        inputs = {size: torch.rand(rows, size).bfloat16() for size, _ in products}
        seconds = []
        for _ in range(ROUNDS):
            start = time.perf_counter()
            for size, product in products:
                product(inputs[size])
            seconds.append(time.perf_counter() - start)
        found.append(min(seconds))
    return found


def main(arguments: Sequence[str]) -> None:
    """Measure and print JSON."""
    config = read_model_config(resolve_source(arguments[0], EngineConfig()).config)
    with torch.inference_mode():
        plain = _measure(config, ProductForms())
        blocked: list[float] | list[None] = [None] * len(ROWS)
        if _has_blocks():
            blocked = _measure(config, ProductForms(blocked=True))
    rates = [
        ProductRate(rows=rows, seconds=seconds, blocked_seconds=other)
        for rows, seconds, other in zip(ROWS, plain, blocked, strict=True)
    ]
    print(json.dumps([asdict(rate) for rate in rates]))


if __name__ == "__main__":
    main(sys.argv[1:])
