"""The language that the kernels are written in. Where Triton is missing (macOS, Windows), modules still import.

Triton is imported only here. Without it a kernel is a placeholder, and launching it raises `ModuleNotFoundError`.
Compiled for a GPU; under `TRITON_INTERPRET=1`, set before the first import, kernels run on CPU tensors instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
except ModuleNotFoundError:
    TRITON_AVAILABLE = False
    triton = tl = TensorDescriptor = None
else:
    TRITON_AVAILABLE = True

__all__ = ["TRITON_AVAILABLE", "Kernel", "TensorDescriptor", "ceil_div", "jit", "next_power_of_2", "tl"]


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
    if not TRITON_AVAILABLE:
        return _Missing(function.__qualname__)
    kernel: Kernel = triton.jit(function)
    return kernel


def ceil_div(a: int, b: int) -> int:
    """The smallest whole number that is at least a / b."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n, for n >= 1."""
    return 1 << (n - 1).bit_length()
