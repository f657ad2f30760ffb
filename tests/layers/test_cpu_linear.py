from __future__ import annotations

import pytest
import torch

from asyncllm.errors import CheckpointError
from asyncllm.layers.cpu_linear import CpuLinear
from asyncllm.layers.linear import Linear, make_linear
from asyncllm.layers.parameter import CheckpointTensor, Placement, dense
from asyncllm.layers.product_forms import ProductForms
from asyncllm.weights.grouped import GroupedTensor
from tests.layers.test_cpu_product import grouped, rows_of

FORMS = ProductForms(packed_rows={4: 5, 8: 2})
PARTS = {"q_proj": 32, "k_proj": 16, "v_proj": 16}


def make(dtype: torch.dtype = torch.float32, *, bias: bool = False, parts: dict[str, int] = PARTS) -> CpuLinear:
    placement = Placement(dtype, torch.device("cpu"), products=FORMS)
    linear = make_linear(64, parts, bias=bias, placement=placement)
    assert isinstance(linear, CpuLinear)
    return linear


def load(linear: CpuLinear, tensors: dict[str, CheckpointTensor]) -> None:
    slots = dict(linear.slots(""))
    for name, tensor in tensors.items():
        slots[f"{name}.weight"].load(tensor)


def plain(rows: int) -> torch.Tensor:
    return torch.randn(rows, 64, generator=torch.Generator().manual_seed(rows)) / 8


@pytest.mark.parametrize("order", [("q_proj", "k_proj", "v_proj"), ("v_proj", "q_proj", "k_proj")])
@pytest.mark.parametrize(
    "tensors",
    [
        pytest.param({name: plain(size) for name, size in PARTS.items()}, id="plain"),
        pytest.param({name: grouped(size, 64, 4) for name, size in PARTS.items()}, id="packed"),
        pytest.param({name: grouped(PARTS[name], 64, 8 if name == "k_proj" else 4) for name in PARTS}, id="bits"),
        pytest.param({"q_proj": grouped(32, 64, 4), "k_proj": grouped(16, 64, 4), "v_proj": plain(16)}, id="mixed"),
    ],
)
def test_parts_of_any_kind_in_any_order(tensors: dict[str, CheckpointTensor], order: tuple[str, ...]) -> None:
    linear = make()
    load(linear, {name: tensors[name] for name in order})
    expected = torch.cat([dense(tensors[name]) for name in PARTS])
    for count in (1, 9):
        x = rows_of(count, 64, torch.float32)
        torch.testing.assert_close(linear(x), x @ expected.T, rtol=0.02, atol=0.02)
    assert linear.weight_bytes > 0


def test_mixed_parts_are_multiplied_exactly() -> None:
    tensors: dict[str, CheckpointTensor] = {"q_proj": grouped(32, 64, 4), "k_proj": plain(16), "v_proj": plain(16)}
    linear = make()
    load(linear, tensors)
    x = rows_of(1, 64, torch.float32)
    expected = x @ torch.cat([dense(tensor) for tensor in tensors.values()]).T
    torch.testing.assert_close(linear(x), expected, rtol=1e-5, atol=1e-5)
    assert (linear.weight_bytes, linear.copy_bytes) == (64 * 64 * 4, 0)


def test_bias_may_come_last() -> None:
    linear = make(bias=True)
    load(linear, {name: plain(size) for name, size in PARTS.items()})
    slots = dict(linear.slots("a."))
    assert list(slots) == [f"a.{part}.{kind}" for part in PARTS for kind in ("weight", "bias")]
    for name, size in PARTS.items():
        slots[f"a.{name}.bias"].load(torch.full((size,), float(size)))
    found = linear(torch.zeros(2, 64))
    assert found[1].tolist() == [32.0] * 32 + [16.0] * 32
    assert linear.weight_bytes == 64 * 64 * 4 + 64 * 4


def test_a_matrix_outlives_the_file_it_is_mapped_from() -> None:
    linear, matrix = make(parts={"o_proj": 16}), plain(16)
    load(linear, {"o_proj": matrix})
    x, expected = rows_of(1, 64, torch.float32), rows_of(1, 64, torch.float32) @ matrix.T
    matrix.zero_()
    torch.testing.assert_close(linear(x), expected)


def test_another_shape_is_refused() -> None:
    slot = dict(make().slots(""))["q_proj.weight"]
    for tensor in (torch.zeros(64, 64), grouped(64, 64, 4)):
        with pytest.raises(CheckpointError, match=r"\(64, 64\).*\(32, 64\)"):
            slot.load(tensor)


@pytest.mark.parametrize("packed", [False, True])
def test_a_tied_head_is_the_table(packed: bool) -> None:
    tensor: CheckpointTensor = grouped(32, 64, 8) if packed else plain(32)
    table = torch.empty(32, 64)
    head = make(parts={"lm_head": 0})
    slot = head.tie(table)
    assert slot.shape == table.shape
    slot.load(tensor)
    torch.testing.assert_close(table, dense(tensor))
    for count in (1, 9):
        x = rows_of(count, 64, torch.float32)
        torch.testing.assert_close(head(x), x @ table.T, rtol=0.02, atol=0.02)
    assert head.copy_bytes == 0  # the dense form is the table itself
    assert (head.weight_bytes > 0) == isinstance(tensor, GroupedTensor)
    head.replace(plain(32))
    torch.testing.assert_close(head(x), x @ plain(32).T)
    assert head.weight_bytes == 32 * 64 * 4


def test_stand_ins_are_those_of_the_plain_layer() -> None:
    linear = make(parts={"o_proj": 16})
    other = Linear(64, {"o_proj": 16}, bias=False, placement=Placement(torch.float32, torch.device("cpu")))
    for each in (linear, other):
        dict(each.slots(""))["o_proj.weight"].fill(7)
    x = rows_of(2, 64, torch.float32)
    assert torch.equal(linear(x), other(x))
