"""What a model's matrix products take by themselves: the least that an engine can take on this processor.

python -m benchmarks.products MODEL          by number of rows, with bfloat16 activations

A process of its own, as each engine has, started between theirs. Each matrix of each layer is its own piece of memory,
as in the model. In bfloat16 the head is left out, since a prompt needs it for one row only. Beside that the model's own
products in the forms that asyncllm chose for them, with the head: what no decode step can fall below.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from asyncllm.config import EngineConfig
from asyncllm.engine.execution.processor import product_forms
from asyncllm.layers.attention import LayerCache
from asyncllm.layers.cpu_linear import CpuLinear
from asyncllm.layers.cpu_product import make_product
from asyncllm.layers.parameter import Placement
from asyncllm.layers.product_forms import ProductForms
from asyncllm.models.checkpoint import load_weights
from asyncllm.models.configuration import ModelConfig
from asyncllm.models.registry import find_architecture, read_model_config
from asyncllm.weights.source import ModelSource, resolve_source
from asyncllm.weights.tensors import iterate_grouped
from benchmarks.figures import ProductRate

ROWS = (1, 16, 512)
MOST_HEADS = 16
"""Of more rows than these, which are a prompt's, the head is multiplied with one."""
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


Products = Sequence[tuple[int, Callable[[torch.Tensor], torch.Tensor]]]
"""(size of the input, product) of each."""


def _dense(config: ModelConfig, forms: ProductForms) -> Products:
    products = []
    for _ in range(config.num_layers):
        for shape in matrix_shapes(config):
            weight = torch.empty(shape, dtype=torch.bfloat16).uniform_(-0.1, 0.1)
            products.append((shape[1], make_product(weight, None, torch.bfloat16, forms).product))
    return products


def _own(source: ModelSource, config: ModelConfig) -> Products:
    """The head's last."""
    forms = product_forms(torch.bfloat16, packs=True, copies=True)
    placement = Placement(torch.bfloat16, torch.device("cpu"), products=forms)
    model = find_architecture(source.config).model(config, [LayerCache(0, 0)] * config.num_layers, 1, placement)
    load_weights(model, iterate_grouped(source))
    linears = [*(linear for layer in model.layers for _, linear in layer.linears()), model.head]
    return [(linear.in_features, linear) for linear in linears if isinstance(linear, CpuLinear)]


def _measure(products: Products, head: Products = ()) -> list[float]:
    """Seconds for each of `ROWS`: of all products once, the fastest of some rounds."""
    found = []
    for rows in ROWS:
        inputs = {size: torch.rand(rows, size).bfloat16() for size, _ in products}
        seconds = []
        for _ in range(ROUNDS):
            start = time.perf_counter()
            for size, product in products:
                product(inputs[size])
            for size, product in head:
                product(inputs[size][: rows if rows <= MOST_HEADS else 1])
            seconds.append(time.perf_counter() - start)
        found.append(min(seconds))
    return found


def main(arguments: Sequence[str]) -> None:
    """Measure and print JSON."""
    source = resolve_source(arguments[0], EngineConfig())
    config = read_model_config(source.config)
    with torch.inference_mode():
        plain = _measure(_dense(config, ProductForms()))
        blocked: list[float] | list[None] = [None] * len(ROWS)
        if _has_blocks():
            blocked = _measure(_dense(config, ProductForms(blocked=True)))
        *own, head = _own(source, config)
        all_own = _measure(own, [head])
    rates = [
        ProductRate(rows=rows, seconds=seconds, blocked_seconds=other, own_seconds=whole)
        for rows, seconds, other, whole in zip(ROWS, plain, blocked, all_own, strict=True)
    ]
    print(json.dumps([asdict(rate) for rate in rates]))


if __name__ == "__main__":
    main(sys.argv[1:])
