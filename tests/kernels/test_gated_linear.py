from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch

from asyncllm.kernels import gated_linear
from asyncllm.kernels.activation import Activation
from asyncllm.kernels.gated_linear import can_multiply
from asyncllm.kernels.language import GLUON_AVAILABLE
from tests.kernels.mutants import mutant
from tests.kernels.precision import assert_as_good

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
on_hopper = pytest.mark.skipif(
    not (HOPPER and GLUON_AVAILABLE),
    reason="for Hopper GPUs; elsewhere tests/engine/execution/test_start_up_kernels.py compiles it",
)


@dataclass(frozen=True)
class Case:
    rows: int
    outputs: int
    inputs: int
    groups: int
    activation: Activation = Activation.SILU


def check(module: ModuleType, case: Case, device: torch.device, dtype: torch.dtype, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(case.rows + case.outputs + case.inputs)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    x = randn(case.rows, case.inputs + 8)[:, : case.inputs]  # rows need not be dense
    weight = randn(2 * case.outputs, case.inputs) * (scale / case.inputs**0.5)

    def reference(kind: torch.dtype) -> torch.Tensor:
        gate, up = torch.nn.functional.linear(x.to(kind), weight.to(kind)).chunk(2, dim=-1)
        if case.activation is Activation.GELU_TANH:
            return torch.nn.functional.gelu(gate, approximate="tanh") * up
        return torch.nn.functional.silu(gate) * up

    for _ in range(3):  # a race would not be there each time
        poison = torch.full((case.rows, case.outputs), float("nan"), dtype=dtype, device=device)
        del poison  # what is not written is likely to be that
        actual = module.gated_linear(x, weight, case.activation, tiling=module.GatedTiling(case.groups))
        assert_as_good(actual, reference(torch.float64), reference(dtype))


SIZES = {
    "less than a tile": (70, 40, 200),
    "fewer columns than the ring": (200, 136, 72),
    "odd": (333, 712, 1160),
    "more tiles than programs": (2049, 3080, 640),
    "several each": (4000, 8192, 1024),
}


@on_hopper
@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("groups", [2, 3])
def test_equals_reference(
    size: str, groups: int, activation: Activation, device: torch.device, dtype: torch.dtype
) -> None:
    if dtype == torch.float32:
        pytest.skip("it takes 16 bits")
    check(gated_linear, Case(*SIZES[size], groups, activation), device, dtype)


@on_hopper
@pytest.mark.parametrize("activation", Activation)
def test_gates_that_are_large(activation: Activation, device: torch.device) -> None:
    """Some are far beyond where their sigmoid is 0 or 1."""
    check(gated_linear, Case(*SIZES["odd"], 3, activation), device, torch.bfloat16, scale=100.0)


@on_hopper
def test_what_is_no_number_stays_with_its_own(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(shape, generator=generator).to(device, torch.bfloat16) for shape in ((300, 64), (272, 64)))
    tiling = gated_linear.GatedTiling(3)
    expected = gated_linear.gated_linear(x, weight, Activation.SILU, tiling=tiling)
    x[7], weight[5], weight[136 + 20] = float("nan"), float("nan"), float("inf")
    actual = gated_linear.gated_linear(x, weight, Activation.SILU, tiling=tiling)
    others = torch.ones_like(actual, dtype=torch.bool)
    others[7], others[:, 5], others[:, 20] = False, False, False
    assert torch.equal(actual[others], expected[others])
    assert actual[7].isnan().all()
    assert actual[:, 5].isnan().all()
    assert not actual[:, 20].isfinite().any()


@on_hopper
def test_no_rows(device: torch.device) -> None:
    x = torch.zeros((0, 64), dtype=torch.bfloat16, device=device)
    weight = torch.zeros((48, 64), dtype=torch.bfloat16, device=device)
    result = gated_linear.gated_linear(x, weight, Activation.SILU, tiling=gated_linear.GatedTiling(3))
    assert result.shape == (0, 24)


def test_what_it_takes(device: torch.device) -> None:
    x = torch.zeros(4, 72, dtype=torch.bfloat16, device=device)
    assert can_multiply(x, 8) == (HOPPER and GLUON_AVAILABLE and device.type == "cuda")
    assert not can_multiply(x, 12)
    assert not can_multiply(x.float(), 8)
    assert not can_multiply(x[:, 1:], 8)


GELU = Activation.GELU_TANH
ODD, MANY = SIZES["odd"], SIZES["more tiles than programs"]


@on_hopper
@pytest.mark.full
@pytest.mark.parametrize(
    ("right", "wrong", "case"),
    [
        ("half * outputs +", "0 * outputs +", Case(*ODD, 3)),
        ("slice(half * COLUMNS, COLUMNS)", "slice(0 * COLUMNS, COLUMNS)", Case(*ODD, 2)),
        ("[(row_tile * GROUPS + WHICH) * ROWS, column_tile", "[row_tile * GROUPS * ROWS, column_tile", Case(*ODD, 2)),
        ("row = (row_tile * GROUPS + group) * ROWS", "row = row_tile * GROUPS * ROWS", Case(*ODD, 3)),
        ("use_acc=step > 0", "use_acc=step > 1", Case(*ODD, 3)),
        ("span = gl.minimum(SPAN, row_tiles - band)", "span = SPAN", Case(*ODD, 3)),
        ("tile += gl.num_programs(0)", "tile += 1", Case(*MANY, 3)),
        ("gl.join(inverse * second, inverse * first)", "gl.join(inverse * first, inverse * second)", Case(*ODD, 2)),
        ("0.044715 * gate * gate", "0.044715 * gate", Case(*ODD, 2, GELU)),
        ("gl.minimum(exponent, 60.0)", "exponent", Case(*ODD, 2)),
    ],
)
def test_planted_fault_is_caught(right: str, wrong: str, case: Case, tmp_path: Path, device: torch.device) -> None:
    scale = 100.0 if "minimum(exponent" in right else 1.0
    with mutant(gated_linear, tmp_path, right, wrong) as module, pytest.raises(AssertionError):
        check(module, case, device, torch.bfloat16, scale)
