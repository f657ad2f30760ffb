from __future__ import annotations

from dataclasses import astuple, dataclass, replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from asyncllm.kernels import skinny_linear
from asyncllm.kernels.activation import Activation
from asyncllm.kernels.skinny_linear import Tiling, VectorTiling
from tests.kernels.mutants import mutant
from tests.kernels.precision import assert_as_good


@dataclass(frozen=True)
class Case:
    rows: int
    outputs: int
    inputs: int
    bias: bool = False
    norm: bool = False
    activation: Activation | None = None
    add: bool = False
    tiling: Tiling | VectorTiling | None = None


def check(module: ModuleType, case: Case, device: torch.device, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(case.rows + case.outputs + case.inputs)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    x = randn(case.rows, case.inputs + 8)[:, : case.inputs]  # rows need not be dense
    lines = case.outputs * (1 if case.activation is None else 2)
    weight = randn(lines, case.inputs) / case.inputs**0.5
    bias = randn(lines) if case.bias else None
    norm = module.RowNorm(randn(case.inputs), 1e-5) if case.norm else None
    residual = randn(case.rows, case.outputs) if case.add else None
    before = None if residual is None else residual.clone()

    def reference(kind: torch.dtype) -> torch.Tensor:
        """In plain torch of this type."""
        values = x.to(kind)
        if norm is not None:
            values = torch.nn.functional.rms_norm(values, (case.inputs,), norm.weight.to(kind), norm.epsilon)
        result = torch.nn.functional.linear(values, weight.to(kind), None if bias is None else bias.to(kind))
        if case.activation is not None:
            gate, up = result.chunk(2, dim=-1)
            silu = case.activation is Activation.SILU
            result = torch.nn.functional.silu(gate) if silu else torch.nn.functional.gelu(gate, approximate="tanh")
            result = result * up
        return result if before is None else before.to(kind) + result

    tiling = case.tiling
    if tiling is not None:  # of the module's own class
        tiling = getattr(module, type(tiling).__name__)(*astuple(tiling))
    counters = torch.zeros(module.SPLIT_TILES, dtype=torch.int32, device=device)
    for _ in range(2):  # the second time with what the first has left in the counters
        if residual is not None:
            residual.copy_(before)
        actual = module.skinny_linear(
            x,
            weight,
            bias,
            norm=norm,
            activation=case.activation,
            residual=residual,
            arrivals=counters,
            tiling=tiling,
        )
        assert_as_good(actual, reference(torch.float64), reference(dtype))
        assert not counters.any()
    if residual is not None:
        assert actual is residual


SHAPES = [(1, 5, 64), (1, 33, 100), (1, 2, 2500), (2, 40, 64), (17, 33, 100), (64, 65, 96), (130, 37, 72)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bias", [False, True])
def test_equals_reference(shape: tuple[int, int, int], bias: bool, device: torch.device, dtype: torch.dtype) -> None:
    check(skinny_linear, Case(*shape, bias=bias), device, dtype)


@pytest.mark.parametrize("shape", [(1, 33, 100), (1, 3, 1100), (7, 70, 136)])
@pytest.mark.parametrize("activation", Activation)
def test_gated_activation(
    shape: tuple[int, int, int], activation: Activation, device: torch.device, dtype: torch.dtype
) -> None:
    check(skinny_linear, Case(*shape, bias=True, activation=activation), device, dtype)


@pytest.mark.parametrize("shape", [(1, 33, 100), (1, 3, 1100)])
@pytest.mark.parametrize("activation", [None, Activation.SILU])
def test_norm(
    shape: tuple[int, int, int], activation: Activation | None, device: torch.device, dtype: torch.dtype
) -> None:
    check(skinny_linear, Case(*shape, norm=True, bias=True, activation=activation), device, dtype)


@pytest.mark.parametrize("shape", [(1, 33, 100), (5, 33, 100), (20, 70, 64)])
def test_residual(shape: tuple[int, int, int], device: torch.device, dtype: torch.dtype) -> None:
    check(skinny_linear, Case(*shape, add=True, bias=True), device, dtype)


TILINGS = {
    "one row, programs go on": Case(1, 37, 200, tiling=VectorTiling(8, 4, 1)),
    "one row, all of it": Case(1, 37, 200, bias=True, norm=True, add=True, tiling=VectorTiling(16, 2, 2)),
    "one row, odd": Case(1, 9, 33, norm=True, activation=Activation.SILU, tiling=VectorTiling(2, 1, 3)),
    "narrow": Case(5, 37, 200, tiling=Tiling(16, 64, 8, 2)),
    "split": Case(5, 150, 200, tiling=Tiling(64, 32, 4, 2, splits=3)),
    "more parts than columns": Case(3, 37, 70, tiling=Tiling(16, 32, 4, 2, splits=8)),
    "split, all of it": Case(33, 70, 328, bias=True, add=True, tiling=Tiling(64, 32, 4, 3, splits=4)),
    "tiles of rows": Case(40, 70, 200, bias=True, tiling=Tiling(16, 64, 4, 2, rows=16)),
    "tiles of rows, whole": Case(32, 32, 65, add=True, tiling=Tiling(16, 32, 4, 2, rows=16)),
    "tiles of rows, all of it": Case(
        40, 70, 328, bias=True, activation=Activation.SILU, tiling=Tiling(32, 64, 4, 2, splits=3, rows=16)
    ),
    "split, gated": Case(20, 70, 328, bias=True, activation=Activation.SILU, tiling=Tiling(64, 32, 4, 3, splits=2)),
    # elsewhere than on a Hopper GPU, and in float32, the same tiles by the same kernel as those above
    "specialized": Case(40, 200, 328, tiling=Tiling(64, 64, 4, 3, rows=64, specialized=True)),
    "specialized, all of it": Case(
        50, 200, 584, bias=True, activation=Activation.SILU, tiling=Tiling(128, 64, 4, 3, rows=32, specialized=True)
    ),
    "specialized, gelu": Case(
        7, 70, 328, activation=Activation.GELU_TANH, tiling=Tiling(64, 128, 4, 2, specialized=True)
    ),
    "specialized, added": Case(
        20, 150, 1160, bias=True, add=True, tiling=Tiling(64, 128, 4, 4, rows=16, specialized=True)
    ),
    "specialized, fewer columns than its ring": Case(
        3, 8, 72, add=True, tiling=Tiling(128, 64, 4, 4, specialized=True)
    ),
    "specialized, columns that cannot be copied": Case(
        3, 37, 70, bias=True, tiling=Tiling(64, 64, 4, 3, specialized=True)
    ),
}


@pytest.mark.parametrize("name", TILINGS)
def test_tilings(name: str, device: torch.device, dtype: torch.dtype) -> None:
    check(skinny_linear, TILINGS[name], device, dtype)


PARTS = {
    "one": Case(20, 37, 200, bias=True, tiling=Tiling(16, 64, 4, 2, rows=16)),
    "some": Case(40, 70, 328, tiling=Tiling(64, 32, 4, 3, splits=3, rows=32)),
    "more than columns": Case(3, 37, 70, bias=True, tiling=Tiling(16, 32, 4, 2, splits=8)),
    "odd columns": Case(1, 37, 71, tiling=Tiling(16, 32, 4, 2, splits=2)),
    "specialized": Case(33, 200, 1224, bias=True, tiling=Tiling(64, 64, 4, 3, splits=3, specialized=True)),
    "specialized, two groups": Case(
        70, 200, 584, bias=True, tiling=Tiling(128, 64, 4, 3, splits=2, rows=64, specialized=True)
    ),
    "specialized, more than columns": Case(
        5, 72, 136, bias=True, tiling=Tiling(64, 64, 4, 2, splits=8, specialized=True)
    ),
}


def check_parts(module: ModuleType, case: Case, device: torch.device, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(case.rows + case.outputs + case.inputs)
    x, weight, bias = (
        torch.randn(shape, generator=generator).to(device, dtype)
        for shape in ((case.rows, case.inputs), (case.outputs, case.inputs), (case.outputs,))
    )
    weight /= case.inputs**0.5
    assert isinstance(case.tiling, Tiling)
    own_bias = bias if case.bias else None
    parts = module.linear_parts(x, weight, own_bias, tiling=module.Tiling(*astuple(case.tiling)))
    assert parts.shape == (case.tiling.splits, case.rows, case.outputs)
    assert parts.dtype == torch.float32

    def reference(kind: torch.dtype) -> torch.Tensor:
        return torch.nn.functional.linear(x.to(kind), weight.to(kind), bias.to(kind) if case.bias else None)

    assert_as_good(parts.sum(0).to(dtype), reference(torch.float64), reference(dtype))


@pytest.mark.parametrize("name", PARTS)
def test_parts(name: str, device: torch.device, dtype: torch.dtype) -> None:
    check_parts(skinny_linear, PARTS[name], device, dtype)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("tl.where(part == 0, outputs, 0)", "outputs"),
        ("partial + (part * rows + row)", "partial + row"),
    ],
)
def test_planted_fault_in_parts_is_caught(right: str, wrong: str, tmp_path: Path, device: torch.device) -> None:
    case = replace(PARTS["some"], bias=True)
    with mutant(skinny_linear, tmp_path, right, wrong) as module, pytest.raises(AssertionError):
        check_parts(module, case, device, torch.float32)


def test_refuses_many_rows(device: torch.device) -> None:
    weight = torch.ones(16, 16, device=device)
    with pytest.raises(ValueError, match="at most 256 rows, got 257"):
        skinny_linear.skinny_linear(torch.ones(257, 16, device=device), weight)
    with pytest.raises(ValueError, match="at most 256 rows, got 257"):
        skinny_linear.linear_parts(torch.ones(257, 16, device=device), weight, tiling=Tiling(16, 16, 4))
    norm = skinny_linear.RowNorm(torch.ones(16, device=device), 1e-5)
    with pytest.raises(ValueError, match="norm of a single row, got 2"):
        skinny_linear.skinny_linear(torch.ones(2, 16, device=device), weight, norm=norm)


def test_no_rows(device: torch.device) -> None:
    weight = torch.ones(5, 16, device=device)
    none = torch.ones(0, 16, device=device)
    assert skinny_linear.skinny_linear(none, weight).shape == (0, 5)
    assert skinny_linear.linear_parts(none, weight, tiling=Tiling(16, 16, 4, splits=2)).shape == (2, 0, 5)


VECTOR = Case(1, 300, 80, bias=True, norm=True, activation=Activation.SILU, tiling=VectorTiling(2, 2, 1))
ADDED = Case(1, 300, 80, add=True, tiling=VectorTiling(1, 2, 1))
TILES = Case(3, 34, 600, bias=True, tiling=Tiling(16, 128, 4, 2))
SPLIT = Case(3, 34, 600, add=True, tiling=Tiling(16, 128, 4, 2, splits=2))
POINTERS = Case(3, 34, 601, tiling=Tiling(16, 128, 4, 2))
ROW_TILES = Case(40, 34, 200, add=True, tiling=Tiling(16, 128, 4, 2, splits=2, rows=16))


@pytest.mark.parametrize(
    ("right", "wrong", "case"),
    [
        ("tl.load(x + columns", "tl.load(x + columns // 2", VECTOR),
        ("tl.load(norm + columns", "tl.load(norm + columns // 2", VECTOR),
        ("squares = tl.sum(x_low * x_low", "squares = tl.sum(x_low", VECTOR),
        ("next_below = _load_lines(", "next_below = 0 * _load_lines(", VECTOR),
        ("of_below = _load_lines(weight + outputs", "of_below = _load_lines(weight + 0 * outputs", VECTOR),
        ("_low(of_below, element, PAIRS) * x_low", "_low(of_weight, element, PAIRS) * x_low", VECTOR),
        ("result_below += tl.load(bias + outputs + lines", "result_below += tl.load(bias + lines", VECTOR),
        ("result += before", "result -= before", ADDED),
        ("next_below, lines + step", "next_below, lines", ADDED),
        ("next_weight = _load_lines(weight, lines + step", "next_weight = _load_lines(weight, lines", ADDED),
        ("x_descriptor.load([first_row, start])", "x_descriptor.load([first_row, 0])", TILES),
        ("x_descriptor.load([first_row, start])", "x_descriptor.load([0, start])", ROW_TILES),
        ("row = first_row + tl.arange", "row = tl.arange", ROW_TILES),
        ("first_line = tile // row_tiles", "first_line = tile", ROW_TILES),
        ("weight_descriptor.load([first_line, start])", "weight_descriptor.load([0, start])", TILES),
        ("total += tl.load(bias + lines", "total += tl.load(bias + lines // 2", TILES),
        ("x + row[:, None] * x_stride", "x + row[:, None] * inputs", POINTERS),
        ("left = tl.load(line_starts + start", "left = tl.load(line_starts", POINTERS),
        ("begin = part * share", "begin = 0", SPLIT),
        ("mine = parts + part", "mine = parts + 0 * part", SPLIT),
        ("tl.store(arrivals + tile, 0)", "tl.store(arrivals + tile, 1)", SPLIT),
        ("total += tl.load(target", "total -= tl.load(target", SPLIT),
    ],
)
def test_planted_fault_is_caught(right: str, wrong: str, case: Case, tmp_path: Path, device: torch.device) -> None:
    if case.rows == 1 and device.type == "cpu":
        case = replace(case, outputs=9)  # more than programs take at once; on a large GPU that takes more
    with mutant(skinny_linear, tmp_path, right, wrong) as module, pytest.raises(AssertionError):
        check(module, case, device, torch.float32)
