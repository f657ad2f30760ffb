"""The language that the kernels are written in. Where Triton is missing (macOS, Windows), modules still import.

Triton is imported only here. Without it a kernel is a placeholder, and launching it raises `ModuleNotFoundError`.
Compiled for a GPU; under `TRITON_INTERPRET=1`, set before the first import, kernels run on CPU tensors instead.

A kernel is compiled at its first launch, and again for arguments of another kind: other types, constants or alignment,
and integers that are one or divisible by 16, but for those that it names to `jit_unspecialized`. `compiling` has many
compiled at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, partial
from threading import RLock
from typing import Any, Protocol

import torch

try:
    import triton
    import triton.compiler
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
except ModuleNotFoundError:
    TRITON_AVAILABLE = False
    triton = tl = TensorDescriptor = None
    constexpr: Callable[[int], Any] = int
else:
    TRITON_AVAILABLE = True
    constexpr = tl.constexpr
"""Makes a number of a module known to its kernels."""

COMPILED = constexpr(TRITON_AVAILABLE and not triton.knobs.runtime.interpret)
"""Kernels are not interpreted, and so may hold instructions of the GPU's own."""

__all__ = [
    "COMPILED",
    "TRITON_AVAILABLE",
    "Kernel",
    "TensorDescriptor",
    "await_previous",
    "ceil_div",
    "compiling",
    "constexpr",
    "jit",
    "jit_unspecialized",
    "launch_next",
    "next_power_of_2",
    "overlap_options",
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


@dataclass(slots=True)
class Compilation:
    """What was launched within `compiling`."""

    kinds: set[tuple[Any, ...]] = field(default_factory=set)
    """A kernel and what its arguments were like; several may be one to Triton."""


_compilation: ContextVar[Compilation | None] = ContextVar("compilation", default=None)


if TRITON_AVAILABLE and not triton.knobs.runtime.interpret:
    # Some Pythons (3.11 among them) fail when two threads parse source at once (python/cpython#106905), as Triton does
    # for a kernel and all that it calls. It holds the interpreter lock meanwhile in any case.
    _parsing = RLock()

    class _Source(triton.compiler.ASTSource):  # type: ignore[misc]  # triton is untyped
        """What is compiled."""

        def make_ir(self, *arguments: Any, **named: Any) -> Any:
            with _parsing:
                return super().make_ir(*arguments, **named)

    class _Compiled(triton.JITFunction):  # type: ignore[misc]  # triton is untyped
        """A kernel that may be compiled without being launched, several at once."""

        def create_binder(self) -> Any:
            binder = super().create_binder()
            self.ASTSource = _Source
            return binder

        @property
        def cache_key(self) -> str:
            with _parsing:
                key: str = super().cache_key
                return key

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
            compilation = _compilation.get()
            if compilation is None:
                return super().__getitem__(grid)  # type: ignore[no-any-return]
            return partial(self._compile, compilation, grid)

        def _compile(self, compilation: Compilation, grid: tuple[int, ...], *arguments: Any, **named: Any) -> None:
            kind = (self.fn, *map(_kind, arguments), *((name, _kind(value)) for name, value in named.items()))
            if kind not in compilation.kinds:
                compilation.kinds.add(kind)
                self.warmup(*arguments, grid=grid, **named)

    _make_kernel: Callable[..., Any] = _Compiled
elif TRITON_AVAILABLE:
    _make_kernel = triton.jit


def _kind(value: Any) -> Any:
    """What a kernel is compiled for of an argument, or more than that."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, TensorDescriptor):
        return value.base.dtype, *value.block_shape
    return value


def jit(function: Callable[..., Any]) -> Kernel:
    """Compile `function` with Triton at its first launch; without Triton, a placeholder."""
    return jit_unspecialized()(function)


def jit_unspecialized(*names: str) -> Callable[[Callable[..., Any]], Kernel]:
    """As `jit`, but not anew for other values of the integers with these names: those that differ from step to step."""

    def decorate(function: Callable[..., Any]) -> Kernel:
        if not TRITON_AVAILABLE:
            return _Missing(function.__qualname__)
        kernel: Kernel = _make_kernel(function, do_not_specialize=names)
        return kernel

    return decorate


@contextmanager
def compiling(threads: int) -> Iterator[Compilation]:
    """What this thread launches of our kernels within is not run but compiled, by so many threads side by side; all of
    it is there at the end. Tensors may be on the device "meta". Other work of the thread is done as ever.

    Triton gives the interpreter lock up for nine tenths of a compilation. Not under the interpreter, which compiles
    nothing.
    """
    compilation = Compilation()
    token = _compilation.set(compilation)
    try:
        with ThreadPoolExecutor(threads, "asyncllm-compile") as pool, triton.AsyncCompileMode(pool):
            yield compilation
    finally:
        _compilation.reset(token)


# Programmatic dependent launch: a kernel launched with `overlap_options` may begin while the one before it on the
# stream still runs: once all programs of that one have called `launch_next` or have ended. It must not read what that
# one writes, nor write anything, before `await_previous`. As every kernel calls `launch_next` after `await_previous`
# only, whatever was launched before the previous kernel is complete when a program begins, and may be read at once.


@jit
def await_previous(OVERLAP: tl.constexpr) -> None:
    """Wait until the kernel launched before this one is complete, and what it wrote is there."""
    if OVERLAP:
        _griddepcontrol("griddepcontrol.wait; // $0")


@jit
def launch_next(OVERLAP: tl.constexpr) -> None:
    """Let the next kernel begin, when every program has come here. Only after `await_previous`."""
    if OVERLAP:
        _griddepcontrol("griddepcontrol.launch_dependents; // $0")


@jit
def _griddepcontrol(INSTRUCTION: tl.constexpr) -> None:
    # by hand: newer Tritons do not pipeline the loads of a loop with their own `gdc_wait` in it
    tl.inline_asm_elementwise(INSTRUCTION, "=r", [], dtype=tl.int32, is_pure=False, pack=1)


def overlap_options(device: torch.device, wanted: bool = True) -> dict[str, bool]:
    """Arguments of a launch of a kernel with a parameter `OVERLAP`: overlapped where wanted and possible."""
    return {"OVERLAP": True, "launch_pdl": True} if wanted and _can_overlap(device) else {"OVERLAP": False}


@cache
def _can_overlap(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def ceil_div(a: int, b: int) -> int:
    """The smallest whole number that is at least a / b."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n, for n >= 1."""
    return 1 << (n - 1).bit_length()
