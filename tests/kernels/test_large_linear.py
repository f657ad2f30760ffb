from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch

from asyncllm.kernels import large_linear
from asyncllm.kernels.activation import Activation
from asyncllm.kernels.language import GLUON_AVAILABLE
from asyncllm.kernels.large_linear import can_multiply
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
    activation: Activation | None = None
    add: bool = False


def check(module: ModuleType, case: Case, device: torch.device, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(case.rows + case.outputs + case.inputs)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    x = randn(case.rows, case.inputs + 8)[:, : case.inputs]  # rows need not be dense
    weight = randn(case.outputs * (1 if case.activation is None else 2), case.inputs) / case.inputs**0.5
    # what is there must survive beside the rows
    around = randn(case.rows + 2, case.outputs)
    residual, before = (around[1:-1], around.clone()) if case.add else (None, around)

    def reference(kind: torch.dtype) -> torch.Tensor:
        result = torch.nn.functional.linear(x.to(kind), weight.to(kind))
        if case.activation is not None:
            gate, up = result.chunk(2, dim=-1)
            silu = case.activation is Activation.SILU
            result = torch.nn.functional.silu(gate) if silu else torch.nn.functional.gelu(gate, approximate="tanh")
            result = result * up
        return before[1:-1].to(kind) + result if case.add else result

    for _ in range(3):  # a race would not be there each time
        around.copy_(before)
        actual = module.large_linear(
            x, weight, tiling=module.LargeTiling(case.groups), activation=case.activation, residual=residual
        )
        assert_as_good(actual, reference(torch.float64), reference(dtype))
        if residual is not None:
            assert actual is residual
            assert torch.equal(around[[0, -1]], before[[0, -1]])


SIZES = {
    "less than a tile": (70, 40, 200),
    "fewer columns than the ring": (200, 136, 72),
    "odd": (333, 712, 1160),
    "more tiles than programs": (2049, 3080, 640),
    "several each": (4000, 8192, 1024),
}
KINDS = {
    "plain": (None, False),
    "added": (None, True),
    "silu": (Activation.SILU, False),
    "gelu": (Activation.GELU_TANH, False),
}


@on_hopper
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("groups", [2, 3])
def test_equals_reference(size: str, kind: str, groups: int, device: torch.device, dtype: torch.dtype) -> None:
    if dtype == torch.float32:
        pytest.skip("it takes 16 bits")
    check(large_linear, Case(*SIZES[size], groups, *KINDS[kind]), device, dtype)


@on_hopper
def test_no_rows(device: torch.device) -> None:
    x = torch.zeros((0, 64), dtype=torch.bfloat16, device=device)
    weight = torch.zeros((24, 64), dtype=torch.bfloat16, device=device)
    assert large_linear.large_linear(x, weight, tiling=large_linear.LargeTiling(3)).shape == (0, 24)


def test_refuses_a_gated_product_that_is_added(device: torch.device) -> None:
    x = torch.zeros((4, 64), dtype=torch.bfloat16, device=device)
    with pytest.raises(ValueError, match="gated"):
        large_linear.large_linear(
            x,
            torch.zeros((16, 64), dtype=torch.bfloat16, device=device),
            tiling=large_linear.LargeTiling(2),
            activation=Activation.SILU,
            residual=torch.zeros((4, 8), dtype=torch.bfloat16, device=device),
        )


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
        ("half * outputs", "0 * outputs", Case(*ODD, 3, Activation.SILU)),
        ("slice(half * (LINES // HALVES),", "slice(0 * (LINES // HALVES),", Case(*ODD, 3, Activation.SILU)),
        ("row = (row_tile * GROUPS + WHICH) * ROWS", "row = row_tile * GROUPS * ROWS", Case(*ODD, 2)),
        ("row = (row_tile * GROUPS + group) * ROWS", "row = row_tile * GROUPS * ROWS", Case(*ODD, 3)),
        ("use_acc=step > 0", "use_acc=step > 1", Case(*ODD, 3)),
        ("(x_descriptor.shape[1] + WIDTH - 1) // WIDTH", "x_descriptor.shape[1] // WIDTH", Case(*ODD, 3)),
        ("span = gl.minimum(SPAN, row_tiles - band)", "span = SPAN", Case(*ODD, 3)),
        ("tile += gl.num_programs(0)", "tile += 1", Case(*MANY, 3)),
        ("values += result.load", "values -= result.load", Case(*ODD, 3, None, True)),
        ("row, column + WRITTEN, ROWS, WRITTEN)", "row, column, ROWS, WRITTEN)", Case(*ODD, 3, None, True)),
        ("right, row, column + WRITTEN, added", "right, row, column, added", Case(*ODD, 2)),
        (
            "gate_up_product(left, right, GELU)",
            "gate_up_product(right, left, GELU)",
            Case(*ODD, 2, Activation.GELU_TANH),
        ),
    ],
)
def test_planted_fault_is_caught(right: str, wrong: str, case: Case, tmp_path: Path, device: torch.device) -> None:
    with mutant(large_linear, tmp_path, right, wrong) as module, pytest.raises(AssertionError):
        check(module, case, device, torch.bfloat16)
