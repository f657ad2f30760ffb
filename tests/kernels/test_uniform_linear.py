from __future__ import annotations

import pytest
import torch

from asyncllm.kernels.uniform_linear import uniform_linear, uniform_linear_reference
from tests.kernels.precision import assert_as_good


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 48, 64), (70, 130, 80), (17, 33, 200)])
@pytest.mark.parametrize("biased", [False, True])
def test_equals_reference(
    rows: int, outputs: int, inputs: int, *, biased: bool, device: torch.device, dtype: torch.dtype
) -> None:
    x, weight = normal(rows, inputs).to(device, dtype), normal(outputs, inputs).to(device, dtype)
    bias = normal(outputs).to(device, dtype) if biased else None
    exact = uniform_linear_reference(x.float(), weight.float(), None if bias is None else bias.float())
    plain = torch.nn.functional.linear(x, weight, bias)
    assert_as_good(uniform_linear(x, weight, bias), exact, plain)


def test_more_rows_than_a_band_of_tiles(device: torch.device) -> None:
    x, weight = normal(32 * 9 + 5, 16).to(device), normal(70, 16).to(device)
    torch.testing.assert_close(uniform_linear(x, weight), uniform_linear_reference(x, weight), rtol=1e-5, atol=1e-5)
