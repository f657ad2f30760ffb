"""Lines of a table, as an embedding takes them (`asyncllm_take_lines` of `source/decoder.cpp`)."""

from __future__ import annotations

from torch import Tensor

from asyncllm.kernels.cpu.build import Library


def take_lines(library: Library, table: Tensor, lines: Tensor, out: Tensor) -> None:
    """Write the lines `lines` [n] int64 of `table` [any number, width] to `out` [n, width]: all dense, items of one
    size.

    It does not give up the interpreter. Torch's operators do, each of them, and wait for whoever takes it then. Raises
    IndexError for a line that the table does not have.
    """
    width = table.itemsize * table.shape[1]
    found = library.short.asyncllm_take_lines(
        table.data_ptr(), len(table), lines.data_ptr(), len(lines), width, out.data_ptr()
    )
    if not found:
        raise IndexError(f"a line is not one of the table's {len(table)}")


def take_lines_reference(table: Tensor, lines: Tensor) -> Tensor:
    """`take_lines` in plain torch: what it writes."""
    return table[lines]
