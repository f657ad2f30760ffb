"""The language that the kernels are written in. Where Triton is missing (macOS, Windows), modules still import.

Triton is imported only here and in `compilation`, which says when a kernel is compiled. Without it a kernel is a
placeholder, and launching it raises `ModuleNotFoundError`. Compiled for a GPU; under `TRITON_INTERPRET=1`, set before
the first import, kernels run on CPU tensors instead.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Protocol

import torch

from asyncllm.kernels.compilation import CompiledGluonKernel, CompiledKernel

try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
except ModuleNotFoundError:
    TRITON_AVAILABLE = False
    triton = tl = TensorDescriptor = None
    constexpr: Callable[[int], Any] = int
else:
    TRITON_AVAILABLE = True
    constexpr = tl.constexpr
"""Makes a number of a module known to its kernels. Not to a function that several kernels call: Triton 3.6 then has a
key of a kernel in its cache that depends on which of them came first, and so differs between processes."""

load_block: Any = None
store_block: Any = None
barrier: Any = None
try:
    if not TRITON_AVAILABLE or triton.knobs.runtime.interpret:
        raise ImportError("Gluon has no interpreter")
    if [int(part) for part in triton.__version__.split(".")[:2]] < [3, 6]:
        raise ImportError("Gluon was another language")
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia import hopper
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor

    # their names in newer versions, and before
    load_block = getattr(hopper.tma, "async_load", None) or hopper.tma.async_copy_global_to_shared
    store_block = getattr(hopper.tma, "async_store", None) or hopper.tma.async_copy_shared_to_global
    barrier = getattr(gl, "barrier", None) or gl.thread_barrier
except (ImportError, AttributeError):  # it is experimental: a version to come may name them otherwise
    GLUON_AVAILABLE = False
    gl = hopper = GluonDescriptor = None
else:
    GLUON_AVAILABLE = True
"""Whether kernels of `gluon_jit` can be launched."""

__all__ = [
    "GLUON_AVAILABLE",
    "SHARED_FIRST",
    "TRITON_AVAILABLE",
    "GluonDescriptor",
    "Kernel",
    "TensorDescriptor",
    "await_previous",
    "barrier",
    "ceil_div",
    "constexpr",
    "gl",
    "gluon_jit",
    "hopper",
    "jit",
    "jit_unspecialized",
    "launch_next",
    "load_block",
    "next_power_of_2",
    "overlap_options",
    "store_block",
    "tl",
]


class Kernel(Protocol):
    """What `jit` makes: `kernel[grid](*arguments)` launches it; other kernels call it like a function."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        """A launcher of one program per point of `grid`."""

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Inline the function in the kernel that calls it."""


class _Missing:
    def __init__(self, name: str) -> None:
        self._name = name

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        raise ModuleNotFoundError(f"kernel {self._name} needs the triton package, which is not installed")

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self[()]


def jit(function: Callable[..., Any]) -> Kernel:
    """Compile `function` with Triton at its first launch; without Triton, a placeholder."""
    return jit_unspecialized()(function)


def jit_unspecialized(*names: str) -> Callable[[Callable[..., Any]], Kernel]:
    """As `jit`, but not anew for other values of the integers with these names: those that differ from step to step."""

    def decorate(function: Callable[..., Any]) -> Kernel:
        if not TRITON_AVAILABLE:
            return _Missing(function.__qualname__)
        make = triton.jit if triton.knobs.runtime.interpret else CompiledKernel
        kernel: Kernel = make(function, do_not_specialize=names)
        return kernel

    return decorate


def gluon_jit(function: Callable[..., Any]) -> Kernel:
    """As `jit`, for a kernel in Gluon, Triton's lower language; where that is missing, a placeholder."""
    kernel: Kernel = CompiledGluonKernel(function) if GLUON_AVAILABLE else _Missing(function.__qualname__)
    return kernel


SHARED_FIRST = 100
"""`CARVE_OUT` (see `compilation`) of a small kernel that stands between two that use much shared memory: so that
neither it nor the next must wait for multiprocessors to be idle."""

# Programmatic dependent launch: a kernel launched with `overlap_options` may begin while the one before it on the
# stream still runs: once all programs of that one have called `launch_next` or have ended. It must not read what that
# one writes, nor write anything, before `await_previous`. As every kernel calls `launch_next` after `await_previous`
# only, whatever was launched before the previous kernel is complete when a program begins, and may be read at once.


@jit
def await_previous(OVERLAP: tl.constexpr) -> None:
    """Wait until the kernel launched before this one is complete, and what it wrote is there."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()


@jit
def launch_next(OVERLAP: tl.constexpr) -> None:
    """Let the next kernel begin, when every program has come here. Only after `await_previous`."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()


def overlap_options(device: torch.device, wanted: bool = True) -> dict[str, bool]:
    """Arguments of a launch of a kernel with a parameter `OVERLAP`: overlapped where wanted and possible."""
    return {"OVERLAP": True, "launch_pdl": True} if wanted and _can_overlap(device) else {"OVERLAP": False}


@cache
def _can_overlap(device: torch.device) -> bool:
    if device.type == "meta":  # stands for the GPU there is: what is launched on it is only compiled
        return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 9
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def ceil_div(a: int, b: int) -> int:
    """The smallest whole number that is at least a / b."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n, for n >= 1."""
    return 1 << (n - 1).bit_length()
