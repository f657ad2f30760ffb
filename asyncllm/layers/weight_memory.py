"""Room in main memory for what every step reads: huge pages, and packed weights beside each other in them.

A step of one row reads every weight once and computes little with it, so how fast they can be read is what counts.
Pieces that the allocator puts anywhere are read up to a third slower than the same ones in a row.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import numpy as np
import torch
from torch import Tensor

_REGION = 16 << 20
"""Bytes taken at once; what is not written stays the system's."""
_PAGE = 2 << 20
"""A huge page: what a region begins at a multiple of, where the system can give such pages."""
_ALIGNMENT = 64
_COLLAPSE = 25
"""`MADV_COLLAPSE` of Linux 6.1, which Python's `mmap` does not name: put pages that were written into a huge one."""


_POPULATE = 23
"""`MADV_POPULATE_WRITE` of Linux 5.14, which Python's `mmap` does not name: take pages as a write would."""


class WeightMemory:
    """Takes memory region by region, and gives it back with the last tensor in it."""

    def __init__(self) -> None:
        self._region = torch.empty(0, dtype=torch.uint8)

    def place(self, tensor: Tensor) -> Tensor:
        """A copy of `tensor`, behind the one before."""
        if tensor.nbytes > len(self._region):
            self._region = take_memory(max(_REGION, tensor.nbytes))
        placed = self._region[: tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        self._region = self._region[-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT :]
        return placed


def take_memory(size: int) -> Tensor:
    """[size] bytes of zeros, in huge pages where the system has them; a page is taken when it is first written."""
    if sys.platform == "win32":
        memory = mmap.mmap(-1, size + _PAGE)
    else:  # shared memory, which is what mmap takes unasked, has huge pages hardly anywhere
        memory = mmap.mmap(-1, size + _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if sys.platform == "linux":
        with suppress(OSError):  # a kernel that was built without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    region = torch.from_numpy(np.frombuffer(memory, np.uint8))
    start = -region.data_ptr() % _PAGE
    return region[start : start + size]


def collapse_pages(address: int, size: int) -> None:
    """Put memory that another has taken and filled into huge pages, where the system can: it stays where it is.

    Pages are taken whole, with what lies beside; one that is not the process's as a whole is left as it is.
    """
    if sys.platform != "linux":
        return
    advise = ctypes.CDLL(None).madvise
    for page in range(address // _PAGE * _PAGE, address + size, _PAGE):
        advise(ctypes.c_void_p(page), ctypes.c_size_t(_PAGE), _COLLAPSE)  # what it cannot do it refuses


@contextmanager
def taking_pages(pieces: Sequence[Tensor]) -> Iterator[None]:
    """Take the pages of these pieces of `take_memory` on a thread beside the block, which ends when both are done.

    A step that writes to a huge page first waits for the system to clear it, and in a virtual machine for the host to
    give it: up to 5 ms each.
    """
    if sys.platform != "linux":
        yield
        return
    thread = threading.Thread(target=_take_pages, args=(pieces,), name="asyncllm-pages", daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def _take_pages(pieces: Sequence[Tensor]) -> None:
    advise = ctypes.CDLL(None).madvise  # one page at a time: the system makes nobody else wait for longer
    for piece in pieces:
        first = piece.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
        end = piece.data_ptr() + piece.nbytes
        while first < end:
            last = min(end, first // _PAGE * _PAGE + _PAGE)
            if advise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _POPULATE):
                return  # what the system cannot do, the steps will
            first = last
