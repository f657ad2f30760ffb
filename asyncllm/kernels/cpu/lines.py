"""Lines of a table, as an embedding takes them (`asyncllm_take_lines` of `source/decoder.cpp`)."""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from torch import Tensor

from asyncllm.kernels.cpu.build import Library


def take_lines(library: Library, table: Tensor, lines: Tensor) -> Tensor:
    """[n, width] int16: the bits of `table` [any number, width] bfloat16 in the lines `lines` [n] int64.

    It does not give up the interpreter. Torch's operators do, each of them, and wait for whoever takes it then. Raises
    IndexError for a line that the table does not have.
    """
    out = np.empty((len(lines), table.shape[1]), np.int16)
    found = library.short.asyncllm_take_lines(
        ctypes.c_void_p(table.data_ptr()),
        ctypes.c_int64(len(table)),
        ctypes.c_void_p(lines.data_ptr()),
        ctypes.c_int64(len(lines)),
        ctypes.c_int64(out.itemsize * table.shape[1]),
        ctypes.c_void_p(out.ctypes.data),
    )
    if not found:
        raise IndexError(f"a line is not one of the table's {len(table)}")
    return torch.from_numpy(out)


def take_lines_reference(table: Tensor, lines: Tensor) -> Tensor:
    """`take_lines` in plain torch."""
    return table[lines].view(torch.int16)
