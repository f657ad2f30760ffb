from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from asyncllm.layers import weight_memory
from asyncllm.layers.weight_memory import WeightMemory, take_memory


def test_tensors_lie_beside_each_other() -> None:
    memory = WeightMemory()
    tensors = [torch.arange(65, dtype=torch.uint8), torch.randn(3, 5).bfloat16(), torch.randn(7)]
    placed = [memory.place(tensor) for tensor in tensors]
    for copy, tensor in zip(placed, tensors, strict=True):
        assert torch.equal(copy, tensor)
        assert copy.data_ptr() % 64 == 0
    assert [copy.data_ptr() - placed[0].data_ptr() for copy in placed] == [0, 128, 192]


def test_what_does_not_fit_gets_a_region_of_its_own() -> None:
    memory, size = WeightMemory(), weight_memory._REGION
    parts = [torch.full((length,), value, dtype=torch.uint8) for value, length in enumerate((size - 10, 100, size + 5))]
    placed = [memory.place(part) for part in parts]
    assert all(torch.equal(copy, part) for copy, part in zip(placed, parts, strict=True))


def test_memory_is_of_zeros_and_ends_where_it_was_asked_to() -> None:
    memory = take_memory(10_000_000)
    assert memory.shape == (10_000_000,)
    assert not memory.any()
    assert memory.data_ptr() % weight_memory._PAGE == 0


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's own account of a process's memory")
def test_memory_is_private() -> None:
    """Shared memory is in huge pages hardly anywhere."""
    memory = take_memory(8 * weight_memory._PAGE).fill_(1)
    flags: list[str] | None = None
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):  # a mapping begins: "first-end permissions …"
            first, _, end = words[0].partition("-")
            inside = int(first, 16) <= memory.data_ptr() < int(end, 16)
        elif inside and words[0] == "VmFlags:":
            flags = words[1:]
    assert flags is not None
    assert "sh" not in flags


@pytest.mark.skipif(sys.platform != "linux", reason="huge pages are asked of Linux")
def test_collapsing_changes_nothing_and_may_be_refused() -> None:
    tensor = torch.randn(3 << 20)
    before = tensor.clone()
    weight_memory.collapse_pages(tensor.data_ptr(), tensor.nbytes)
    weight_memory.collapse_pages(0, 10)  # nobody's
    assert torch.equal(tensor, before)
