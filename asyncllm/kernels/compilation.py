"""How kernels are compiled: at their first launch, or many at once, beside other work and in other processes.

A kernel is compiled at its first launch, and again for arguments of another kind: other types, constants or alignment,
and integers that are one or divisible by 16, but for those that it names to `jit_unspecialized`. Within
`Compilation.launches` a launch is not run, but has its kernel compiled by the threads of a pool. What is not in the
cache that Triton keeps on disk, a thread has a `Compiler` compile into it, in a process of its own: Triton holds the
interpreter lock while it makes its own representation of a kernel.

A kernel may have a parameter `CARVE_OUT`, a constant: the percentage of a multiprocessor's fast memory that it would
have as shared memory, the rest as first-level cache. A kernel that states nothing takes what the one before has left,
and after attention that is little cache. But a multiprocessor that changes its division must be idle first.
"""

from __future__ import annotations

import ctypes
import logging
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cache, partial
from importlib import import_module
from threading import RLock
from typing import Any, NamedTuple, Protocol

import torch

try:
    import triton
    from triton import JITFunction
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.tools.tensor_descriptor import TensorDescriptor
except ModuleNotFoundError:  # then nothing here is used
    JITFunction = ASTSource = TensorDescriptor = object
try:
    from triton.experimental.gluon._runtime import GluonASTSource
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
except ImportError:  # an older Triton
    GluonASTSource, GluonDescriptor = object, TensorDescriptor

__all__ = ["Compilation", "CompiledGluonKernel", "CompiledKernel", "Compiler", "compiling", "load_kernel", "run_job"]

logger = logging.getLogger("asyncllm")


class Compiler(Protocol):
    """Compiles somewhere else."""

    def compile(self, job: bytes) -> bytes | None:
        """What `run_job` answers to this job; None where it cannot be asked. Called on many threads at once."""


class Compilation:
    """Kernels that are compiled at once, each of them once."""

    def __init__(
        self, pool: Executor, compiler: Compiler | None = None, use: Callable[[Any], object] | None = None
    ) -> None:
        """Without a compiler the pool's threads compile. `use` is called on them with each kernel."""
        self.compiler = compiler
        self.kinds: set[tuple[Any, ...]] = set()
        """A kernel and what its arguments were like, of each launch; several may be one to Triton."""
        self._pool = pool
        self._use = use
        self._kernels: dict[tuple[Any, ...], Future[None]] = {}
        self._launched: list[Future[None]] = []

    @contextmanager
    def launches(self) -> Iterator[list[Future[None]]]:
        """What this thread launches of our kernels within is not run but compiled: the list is of what there is to wait
        for. Tensors may be on the device "meta". Other work of the thread is done as ever. Not under the interpreter,
        which compiles nothing."""
        launched: list[Future[None]] = []
        self._launched = launched
        token = _compilation.set(self)
        try:
            yield launched
        finally:
            _compilation.reset(token)

    def is_new(self, kind: tuple[Any, ...]) -> bool:
        """Whether nothing of this kind was launched before."""
        count = len(self.kinds)
        self.kinds.add(kind)
        return len(self.kinds) > count

    def submit(self, key: tuple[Any, ...], compile_kernel: Callable[[], Any]) -> None:
        """Have a kernel compiled."""
        if key not in self._kernels:
            self._kernels[key] = self._pool.submit(self._run, compile_kernel)
        self._launched.append(self._kernels[key])

    def _run(self, compile_kernel: Callable[[], Any]) -> None:
        token = _compiler.set(self.compiler)
        try:
            kernel = compile_kernel()
        finally:
            _compiler.reset(token)
        if self._use is not None:
            self._use(kernel)


@contextmanager
def compiling(threads: int, compiler: Compiler | None = None) -> Iterator[Compilation]:
    """What this thread launches of our kernels within is compiled and not run; all of it is there at the end."""
    with ThreadPoolExecutor(threads, "asyncllm-compile") as pool:
        compilation = Compilation(pool, compiler)
        with compilation.launches() as launched:
            yield compilation
        for kernel in launched:
            kernel.result()


_compilation: ContextVar[Compilation | None] = ContextVar("compilation", default=None)
"""Whose the launches of this thread are."""
_compiler: ContextVar[Compiler | None] = ContextVar("compiler", default=None)
"""Who compiles for this thread."""

# Some Pythons (3.11 among them) fail when two threads parse source at once (python/cpython#106905), as Triton does
# for a kernel and all that it calls. It holds the interpreter lock meanwhile in any case.
_parsing = RLock()


class _NotCached(Exception):
    """A kernel is not in Triton's cache."""


class _Source(ASTSource):  # type: ignore[misc]  # triton is untyped
    """What is compiled."""

    only_cached = False

    def make_ir(self, *arguments: Any, **named: Any) -> Any:
        if self.only_cached:
            raise _NotCached
        with _parsing:
            return super().make_ir(*arguments, **named)


class CompiledKernel(JITFunction):  # type: ignore[misc]  # triton is untyped
    """A kernel that may be compiled without being launched."""

    def create_binder(self) -> Any:
        """As Triton's, and sets what it is compiled by."""
        binder = super().create_binder()
        self.ASTSource = _Source
        self.compile = _compile
        return binder

    @property
    def cache_key(self) -> str:
        """As Triton's."""
        with _parsing:
            key: str = super().cache_key
            return key

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        compilation = _compilation.get()
        if compilation is None:
            return super().__getitem__(grid)  # type: ignore[no-any-return]  # triton is untyped
        return partial(self._warm_up, compilation, grid)

    def _warm_up(self, compilation: Compilation, grid: tuple[int, ...], *arguments: Any, **named: Any) -> None:
        if compilation.is_new((self.fn, *map(_kind, arguments), *((name, _kind(named[name])) for name in named))):
            self.warmup(*arguments, grid=grid, **named)

    def _do_compile(self, key: Any, *arguments: Any, **named: Any) -> Any:
        compile_kernel = partial(super()._do_compile, key, *arguments, **named)
        compilation = _compilation.get()
        if compilation is None:
            return compile_kernel()
        compilation.submit((self.fn, key), compile_kernel)
        return None  # there is nothing to launch


class _GluonSource(_Source, GluonASTSource):  # type: ignore[misc]  # triton is untyped
    """What is compiled of Gluon, Triton's lower language."""


class CompiledGluonKernel(CompiledKernel):
    """A kernel written in Gluon."""

    def create_binder(self) -> Any:
        """As Triton's, and sets what it is compiled by."""
        binder = super().create_binder()
        self.ASTSource = _GluonSource
        return binder

    def is_gluon(self) -> bool:
        """As Gluon's."""
        return True


def _kind(value: Any) -> Any:
    """What a kernel is compiled for of an argument, or more than that."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, (TensorDescriptor, GluonDescriptor)):
        return value.base.dtype, *value.block_shape
    return value


def load_kernel(kernel: Any) -> None:
    """Put a compiled kernel on the current device, as its first launch would."""
    _ = kernel.run


_CARVE_OUT = 9
"""CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT"""

_carve_outs: dict[str, int] = {}
"""Of the kernels that state one, by their hash."""


def _set_carve_out(module: int, function: int, name: str, metadata_group: object, hash: str) -> None:
    """Called by Triton for each kernel that it has put on a device, anybody's."""
    percent = _carve_outs.get(hash)
    if percent is not None:
        code = _driver().cuFuncSetAttribute(ctypes.c_void_p(function), _CARVE_OUT, ctypes.c_int(percent))
        if code:  # it is a wish: without it the kernel is slower
            logger.warning("%s was refused a carve-out of %d %% (CUDA error %d)", name, percent, code)


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _carve_out(source: _Source) -> int | None:
    """What the kernel states."""
    names = source.fn.arg_names
    if "CARVE_OUT" not in names:
        return None
    percent: int = source.constants[(names.index("CARVE_OUT"),)]
    return percent


if JITFunction is not object:
    triton.knobs.runtime.kernel_load_end_hook.add(_set_carve_out)


class _Job(NamedTuple):
    """What `triton.compile` takes, by names that another process finds."""

    module: str
    kernel: str
    signature: dict[str, Any]
    constants: dict[Any, Any]
    attributes: dict[Any, Any]
    target: GPUTarget
    options: dict[str, Any]
    cache_folder: str


class _Answer(NamedTuple):
    """What came of a job, in seconds; `failure` says why nothing did."""

    seconds: float = 0.0
    representation: float = 0.0  # of them, to make Triton's own representation of a kernel
    failure: str | None = None


def _compile(source: _Source, target: GPUTarget, options: dict[str, Any], **named: Any) -> Any:
    """In place of `triton.compile`, which any thread may call."""
    kernel = _compile_anywhere(source, target, options, **named)
    if (percent := _carve_out(source)) is not None:
        _carve_outs[kernel.hash] = percent
    return kernel


def _compile_anywhere(source: _Source, target: GPUTarget, options: dict[str, Any], **named: Any) -> Any:
    compiler = _compiler.get()
    if compiler is not None:
        source.only_cached = True
        try:
            return triton.compile(source, target=target, options=options, **named)
        except _NotCached:
            source.only_cached = False
        _compile_elsewhere(compiler, source, target, options)
    return triton.compile(source, target=target, options=options, **named)


def _compile_elsewhere(compiler: Compiler, source: _Source, target: GPUTarget, options: dict[str, Any]) -> None:
    """Where that fails, nothing is in the cache."""
    function = source.fn
    job = _Job(
        module=function.__module__,
        kernel=function.__name__,
        signature=source.signature,
        constants=source.constants,
        attributes=source.attrs,
        target=target,
        options=options,
        cache_folder=triton.knobs.cache.dir,
    )
    text = compiler.compile(pickle.dumps(job))
    if text is None:
        return
    answer: _Answer = pickle.loads(text)
    if answer.failure is not None:
        logger.warning("%s was not compiled in a process of its own: %s", source.name, answer.failure)
    else:
        logger.debug(
            "compiled %s in %.2f s, %.2f s of them for its representation",
            source.name,
            answer.seconds,
            answer.representation,
        )


def run_job(text: bytes) -> bytes:
    """In the other process: compile into the cache."""
    try:
        answer = _run(pickle.loads(text))
    except Exception as error:
        answer = _Answer(failure=repr(error))
    return pickle.dumps(answer)


def _run(job: _Job) -> _Answer:
    times: list[Any] = []
    triton.knobs.cache.dir = job.cache_folder
    triton.knobs.compilation.listener = lambda **told: times.append(told["times"])
    function = getattr(import_module(job.module), job.kernel)
    kind = _GluonSource if isinstance(function, CompiledGluonKernel) else _Source
    source = kind(function, job.signature, job.constants, job.attributes)
    kernel = triton.compile(source, target=job.target, options=job.options)
    # Triton 3.6 has a C compiler make a launcher of each kernel, kept in the same cache. That needs libcuda.
    with suppress(Exception):
        import_module("triton.backends.nvidia.driver").CudaLauncher(source, kernel.metadata)
    return _Answer(times[0].total / 1e6, times[0].ir_initialization / 1e6)
