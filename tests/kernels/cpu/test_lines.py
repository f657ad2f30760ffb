"""Lines of a table."""

import pytest
import torch

from asyncllm.kernels.cpu.build import Library
from asyncllm.kernels.cpu.lines import take_lines, take_lines_reference


@pytest.mark.parametrize("rows", [0, 1, 7])
def test_takes_the_bits_of_each_line(library: Library, rows: int) -> None:
    table = torch.randn(11, 24).bfloat16()
    lines = torch.randint(0, 11, (rows,))
    out = torch.full((rows, 24), torch.nan, dtype=torch.bfloat16)
    take_lines(library, table, lines, out)
    assert torch.equal(out, take_lines_reference(table, lines))


@pytest.mark.parametrize("line", [-1, 11, 1 << 40])
def test_a_line_that_is_not_there(library: Library, line: int) -> None:
    with pytest.raises(IndexError, match="table's 11"):
        take_lines(library, torch.zeros(11, 24), torch.tensor([3, line]), torch.empty(2, 24))
