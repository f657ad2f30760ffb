"""HeadStart: what the start of an engine on a GPU needs besides torch, begun before torch is imported: that takes
seconds, in which other processors and the GPU have nothing to do."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Self

from asyncllm.engine.execution.compile_processes import CompileProcesses
from asyncllm.engine.execution.cuda_driver import cuda_driver
from asyncllm.kernels.triton_key import hash_triton

DRIVERS = ("/dev/nvidiactl", "/dev/dxg")
"""One of them is there where NVIDIA's driver is: on Linux, and on Linux within Windows."""


class HeadStart:
    """From `begin` to `close`. Before, it holds processes that compile nothing. What fails here is not told: it is done
    again by who needs it, and fails again."""

    def __init__(self) -> None:
        self.processes = CompileProcesses()
        self._context: Future[int] | None = None
        self._pool: ThreadPoolExecutor | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def begin(self, device: str) -> None:
        """If the setting `device` may mean a GPU. Once, and on the thread that is to import torch: two threads must not
        import at once what imports each other."""
        if device == "cpu" or not any(Path(path).exists() for path in DRIVERS):
            return
        self.processes.start()
        with suppress(ModuleNotFoundError):
            import_module("triton")
        self._pool = ThreadPoolExecutor(2, "asyncllm-start")
        self._context = self._pool.submit(_make_context, int(device.partition(":")[2] or 0))
        self._pool.submit(hash_triton)

    def wait(self) -> None:
        """Until what threads of this process do is done."""
        if self._pool is not None:
            self._pool.shutdown()

    def close(self) -> None:
        """The start is over, however it went. Idempotent."""
        self.processes.close()
        self.wait()
        context, self._context = self._context, None
        if context is not None and context.exception() is None:
            cuda_driver().release_context(context.result())  # whoever has used it meanwhile keeps it


def _make_context(device: int) -> int:
    """On the device of this index, where torch is going to make it."""
    cuda_driver().make_context(device)
    return device
