"""Room for packed weights beside each other.

A step of one row reads every weight once and computes little with it, so how fast they can be read is what counts.
Pieces that the allocator puts anywhere are read up to a third slower than the same ones in a row.
"""

from __future__ import annotations

import mmap
import sys

import numpy as np
import torch
from torch import Tensor

_REGION = 16 << 20
"""Bytes taken at once; what is not written stays the system's."""
_PAGE = 2 << 20
"""A huge page: what a region begins at a multiple of, where the system can give such pages."""
_ALIGNMENT = 64


class WeightMemory:
    """Takes memory region by region, and gives it back with the last tensor in it."""

    def __init__(self) -> None:
        self._region = torch.empty(0, dtype=torch.uint8)

    def place(self, tensor: Tensor) -> Tensor:
        """A copy of `tensor`, behind the one before."""
        if tensor.nbytes > len(self._region):
            self._region = _take(max(_REGION, tensor.nbytes))
        placed = self._region[: tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        self._region = self._region[-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT :]
        return placed


def _take(size: int) -> Tensor:
    memory = mmap.mmap(-1, size + _PAGE)
    if sys.platform == "linux":
        memory.madvise(mmap.MADV_HUGEPAGE)
    region = torch.from_numpy(np.frombuffer(memory, np.uint8))
    start = -region.data_ptr() % _PAGE
    return region[start : start + size]
