"""What a graph does after its memsets have become kernels."""

from __future__ import annotations

import pytest
import torch

from asyncllm.engine.execution import cuda_driver, graph_memsets
from asyncllm.engine.execution.cuda_device import CudaSpace


@pytest.mark.parametrize("size", [1, 3, 129, 100_000])
def test_memsets_become_kernels(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    replaced: list[int] = []

    def replace(*arguments: object) -> int:
        replaced.append(graph_memsets.replace_memsets(*arguments))  # type: ignore[arg-type]
        return replaced[-1]

    monkeypatch.setattr(cuda_driver, "replace_memsets", replace)
    space = CudaSpace(torch.device("cuda", 0))
    with space.entered():
        numbers = torch.zeros(size + 2, dtype=torch.int32, device="cuda")
        cleared, odd = numbers[1:-1], torch.zeros(7, dtype=torch.int8, device="cuda")
    with space.capture() as graph:
        numbers.add_(5)
        cleared.zero_()
        odd.add_(3)
        odd.zero_()  # 7 bytes are no whole words: this stays a memset
        numbers.add_(1)
    for round_ in (1, 2):
        with space.entered():
            graph.launch()
            space.stream.synchronize()
            assert (cleared == 1).all()
            assert not odd.any()
            assert numbers[[0, -1]].tolist() == [6 * round_, 6 * round_]
    assert replaced == [1]
    graph.destroy()
    del numbers, cleared, odd
    space.close()
