from __future__ import annotations

import torch

from asyncllm.layers import weight_memory
from asyncllm.layers.weight_memory import WeightMemory


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
