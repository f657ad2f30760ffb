"""What kernels state of a multiprocessor's fast memory reaches the driver."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from asyncllm.kernels import rms_norm, skinny_linear
from asyncllm.kernels.language import SHARED_FIRST
from asyncllm.kernels.skinny_linear import VectorTiling

_PREFERRED_SHARED_MEMORY_CARVEOUT = 9


def stated(kernel: Any) -> set[int]:
    """Of all binaries of a kernel, what the driver was told."""
    driver, percents = ctypes.CDLL("libcuda.so.1"), set()
    for caches in kernel.device_caches.values():
        for binary in caches[0].values():
            if binary.function is not None:
                percent = ctypes.c_int()
                code = driver.cuFuncGetAttribute(
                    ctypes.byref(percent), _PREFERRED_SHARED_MEMORY_CARVEOUT, ctypes.c_void_p(binary.function)
                )
                assert code == 0
                percents.add(percent.value)
    return percents


def test_each_binary_has_its_own() -> None:
    x, weight = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in ((1, 72), (40, 72)))
    for percent in (3, 17):
        skinny_linear.skinny_linear(x, weight, tiling=VectorTiling(8, 4, 1, percent))
    rms_norm.rms_norm(x, weight[0], 1e-5)
    assert {3, 17} <= stated(skinny_linear._vector_kernel)
    assert stated(rms_norm._rms_norm_kernel) == {SHARED_FIRST}
    assert stated(skinny_linear._tile_kernel) <= {-1}  # states nothing
