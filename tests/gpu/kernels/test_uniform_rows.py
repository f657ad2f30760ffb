"""What a row gives must be the same bits beside any others: products, norms, rotations."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from asyncllm.kernels.activation import Activation, gated_activation
from asyncllm.kernels.rms_norm import rms_norm
from asyncllm.kernels.rope_cache import HeadNorm, rope_cache
from asyncllm.kernels.uniform_linear import uniform_linear, uniform_linear_reference

DEVICE = torch.device("cuda")
ROWS = 4100
PARTS = [(0, 1), (5, 6), (70, 73), (100, 164), (64, 129), (1000, 1200), (512, 1024), (700, 1213), (1024, 4100)]


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE, dtype)


def check(compute: Callable[[int, int], torch.Tensor]) -> None:
    whole = compute(0, ROWS)
    for start, end in PARTS:
        assert torch.equal(compute(start, end), whole[start:end]), (start, end)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("outputs", "inputs"), [(1536, 1024), (1000, 584)])
def test_products(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    x, weight, bias = (normal(*shape, dtype=dtype) for shape in ((ROWS, inputs), (outputs, inputs), (outputs,)))
    check(lambda start, end: uniform_linear(x[start:end], weight, bias))
    exact = uniform_linear_reference(x, weight, bias).double()
    assert (uniform_linear(x, weight, bias) - exact).norm() / exact.norm() < 8e-3


def test_norm_and_activation() -> None:
    x, weight = normal(ROWS, 2048), normal(2048)
    check(lambda start, end: rms_norm(x[start:end].contiguous(), weight, 1e-5))
    check(lambda start, end: gated_activation(x[start:end].contiguous(), Activation.SILU))


@pytest.mark.parametrize("normed", [False, True])
def test_rotation(normed: bool) -> None:
    qkv, table = normal(ROWS, 8 * 128), torch.rand((ROWS, 128), device=DEVICE)
    norm = HeadNorm(normal(128), normal(128), 1e-6) if normed else None
    caches = torch.zeros((2, 2, ROWS // 64 + 1, 2, 64, 128), dtype=torch.bfloat16, device=DEVICE)
    blocks = torch.arange(caches.shape[2], dtype=torch.int32, device=DEVICE)[None]

    def compute(start: int, end: int, cache: torch.Tensor = caches[1]) -> torch.Tensor:
        positions = torch.arange(start, end, dtype=torch.int32, device=DEVICE)
        number = torch.full((1,), end - start, dtype=torch.int32, device=DEVICE)
        torch.cuda.synchronize()
        return rope_cache(
            qkv[start:end],
            positions,
            torch.zeros_like(positions),
            number,
            table=table,
            cache=cache,
            block_table=blocks,
            norm=norm,
            uniform=True,
        )

    compute(0, ROWS, caches[0])
    check(compute)
    assert torch.equal(caches[0], caches[1])
