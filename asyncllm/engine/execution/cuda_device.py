"""The GPU that an engine uses: which one, and the stream and the memory on it that are the engine's alone."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from asyncllm.engine.execution.cuda_driver import DriverError, cuda_driver, streams
from asyncllm.errors import ConfigError
from asyncllm.kernels.language import TRITON_AVAILABLE

_LEAST_CAPABILITY = (8, 0)
_NO_GPU = ("No CUDA GPUs are available", "Found no NVIDIA driver", "CUDA driver initialization failed, you might not")
"""How torch begins to say that there is none, or may be none."""


def find_cuda_device(name: str) -> torch.device | None:
    """The GPU that the setting `device` means; None for the CPU.

    "auto" means the first GPU that is usable, and the CPU only where there is none. Raises `ConfigError` where a GPU is
    asked for by name and is not usable, and where there are some but none is usable, or torch cannot use their driver:
    who has a GPU must ask for the CPU.
    """
    if name == "cpu":
        return None
    if name == "auto":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if not count:
            if (reason := _unusable_driver()) is not None:
                raise ConfigError(f'device="auto": {reason}; device="cpu" would do')
            return None
        usable = [index for index in range(count) if _unusable(index) is None]
        index = usable[0] if usable else 0
    else:
        index = int(name.partition(":")[2] or 0)
    reason = _unusable(index)
    if reason is None:
        return torch.device("cuda", index)
    raise ConfigError(f'device={name!r}: {reason}; device="cpu" would do')


def _unusable_driver() -> str | None:
    """What torch says where there is an NVIDIA driver that it cannot use; None where there is no driver, or no GPU, or
    this torch is built without CUDA."""
    if torch.version.cuda is None:
        return None
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    except RuntimeError as error:
        said = str(error).partition("\n")[0]
        return None if said.startswith(_NO_GPU) else f"torch cannot use the NVIDIA driver: {said}"
    return None


def _unusable(index: int) -> str | None:
    if not torch.cuda.is_available():
        build = "" if torch.version.cuda else " (this torch is built without CUDA)"
        return f"torch sees no CUDA device{build}"
    if index >= torch.cuda.device_count():
        return f"torch sees {torch.cuda.device_count()} CUDA devices"
    if not TRITON_AVAILABLE:
        return "the kernels need the triton package, which is not installed"
    capability = torch.cuda.get_device_capability(index)
    if capability < _LEAST_CAPABILITY:
        least, has = (".".join(map(str, each)) for each in (_LEAST_CAPABILITY, capability))
        return f"{torch.cuda.get_device_name(index)} has compute capability {has}, and the kernels need {least}"
    return None


def is_device_fault(error: BaseException) -> bool:
    """Whether after this error nothing more can be done on the device, by anyone in the process."""
    if isinstance(error, DriverError):
        return error.is_fault
    return isinstance(error, torch.AcceleratorError) or "Triton Error [CUDA]" in str(error)


class CudaSpace:
    """A stream, and memory that is used on this stream only.

    So what is allocated within may be taken again at once when it is dropped, by a captured graph too: launches follow
    one another on the stream. But a captured graph goes on using what its launches took and dropped: what is to keep
    its contents while graphs run must be there before the first of them, or be `lasting`. Memory goes back to the
    device in `close`, and not to torch's cache.
    """

    def __init__(self, device: torch.device) -> None:
        assert device.index is not None
        self.device = device
        with torch.cuda.device(device):
            torch.cuda.mem_get_info(device)  # makes the context and puts it in place for this thread
            self._stream_handle = streams.take(device.index)
            self.stream = torch.cuda.ExternalStream(  # type: ignore[no-untyped-call]  # torch leaves it untyped
                self._stream_handle, device=device
            )
            self._pool: torch.cuda.MemPool | None = torch.cuda.MemPool()
            self._lasting: torch.cuda.MemPool | None = torch.cuda.MemPool()

    @contextmanager
    def entered(self) -> Iterator[None]:
        """The calling thread works on the stream, allocates here, and does not record gradients."""
        assert self._pool is not None
        with (
            torch.inference_mode(),
            torch.cuda.stream(self.stream),
            torch.cuda.use_mem_pool(self._pool, self.device),
        ):
            yield

    @contextmanager
    def lasting(self) -> Iterator[None]:
        """The same, but what is allocated is taken from memory that no graph has ever used."""
        assert self._lasting is not None
        with (
            torch.inference_mode(),
            torch.cuda.stream(self.stream),
            torch.cuda.use_mem_pool(self._lasting, self.device),
        ):
            yield

    @contextmanager
    def outside_memory(self) -> Iterator[None]:
        """The same, but what is allocated is torch's: for what torch keeps for ever."""
        with torch.inference_mode(), torch.cuda.stream(self.stream):
            yield

    @contextmanager
    def capture(self) -> Iterator[Graph]:
        """What is launched within becomes a graph. Everything that it uses must have run before."""
        graph = Graph(self._stream_handle)
        with self.entered(), cuda_driver().capture(self._stream_handle) as capture:
            yield graph
        graph.handle = capture.graph

    def reserved_bytes(self) -> int:
        """Memory taken from the device, whether in use or not."""
        return _reserved(self._pool) + self.lasting_bytes()

    def lasting_bytes(self) -> int:
        """Those of it that are lasting."""
        return _reserved(self._lasting)

    def close(self) -> None:
        """Give everything back; nothing allocated here may be in use any more. Idempotent."""
        if self._pool is not None:
            self.stream.synchronize()
            self._pool = self._lasting = None
            assert self.device.index is not None
            streams.give_back(self.device.index, self._stream_handle)

    def abandon(self) -> None:
        """Instead of `close`, after a device fault: torch would end the process if it had to give memory back now."""
        if self._pool is not None:
            for pool in (self._pool, self._lasting):
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(pool))  # not freed at exit either
            self._pool = self._lasting = None


def _reserved(pool: torch.cuda.MemPool | None) -> int:
    assert pool is not None
    segments = torch.cuda.memory_snapshot(pool.id)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return sum(segment["total_size"] for segment in segments)


class Graph:
    """A sequence of launches that is launched at once. Destroy it."""

    def __init__(self, stream: int) -> None:
        self._stream = stream
        self.handle = 0

    def launch(self) -> None:
        """Enqueue it; costs the host some microseconds, in which it keeps the interpreter lock."""
        cuda_driver().launch_graph(self.handle, self._stream)

    def destroy(self) -> None:
        """When no launch of it is left."""
        cuda_driver().destroy_graph(self.handle)
