"""The few calls of the CUDA driver that torch does not offer in a form that we can use.

Graphs: torch's own capture marks the process-wide random generator as captured, so that meanwhile a dropout of the host
fails in another thread; it also waits for the whole device and empties the allocator's cache. And torch gives the
interpreter lock up to launch a graph, which against Python work in the host can cost 5 ms a step. What is left of it:
while a graph is captured (for most of a second at the start, then up to a tenth of one for each that is added), CUDA
refuses other threads to wait for the whole device; to wait for a stream or an event is allowed.
Streams: torch's come from a pool of 32, and so may be the host's as well.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: does not wait for the default stream
_THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL: other threads may do what a capture forbids
_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY


class DriverError(RuntimeError):
    """A call of the driver failed."""

    def __init__(self, call: str, name: str, code: int) -> None:
        super().__init__(f"{call} failed: {name}")
        self.code = code

    @property
    def is_fault(self) -> bool:
        """Whether the device is of no more use to this process; else only memory is short."""
        return self.code != _OUT_OF_MEMORY


class CudaDriver:
    """The driver of this machine. Raises OSError where there is none, and `DriverError` where a call fails.

    Handles are plain numbers. Calls work on the context that is current in the calling thread.
    """

    def __init__(self) -> None:
        name = "libcuda.so.1"
        self._driver = ctypes.CDLL(name)  # gives the interpreter lock up during a call
        self._quick = ctypes.PyDLL(name)  # keeps it: for calls of a microsecond or two

    def make_context(self, device: int) -> None:
        """The context that all of a process use of this device: made if it is not there, and kept."""
        context = ctypes.c_void_p()
        self._check(self._driver, "cuInit", ctypes.c_uint(0))
        self._check(self._driver, "cuDevicePrimaryCtxRetain", ctypes.byref(context), ctypes.c_int(device))

    def release_context(self, device: int) -> None:
        """Undo one `make_context`: the context is gone unless others have use for it."""
        self._check(self._driver, "cuDevicePrimaryCtxRelease_v2", ctypes.c_int(device))

    def create_stream(self) -> int:
        """A stream that nobody else has."""
        stream = ctypes.c_void_p()
        self._check(self._driver, "cuStreamCreate", ctypes.byref(stream), ctypes.c_uint(_NON_BLOCKING))
        return stream.value or 0

    @contextmanager
    def capture(self, stream: int) -> Iterator[Capture]:
        """What the calling thread launches on `stream` meanwhile is not run but becomes a graph."""
        capture, graph = Capture(), ctypes.c_void_p()
        handle = ctypes.c_void_p(stream)
        self._check(self._quick, "cuStreamBeginCapture_v2", handle, ctypes.c_int(_THREAD_LOCAL))
        try:
            yield capture
        except BaseException:
            self._quick.cuStreamEndCapture(handle, ctypes.byref(graph))
            if graph:
                self._driver.cuGraphDestroy(graph)
            raise
        self._check(self._quick, "cuStreamEndCapture", handle, ctypes.byref(graph))
        try:
            ready = ctypes.c_void_p()
            self._check(self._driver, "cuGraphInstantiateWithFlags", ctypes.byref(ready), graph, ctypes.c_ulonglong(0))
            self._check(self._driver, "cuGraphUpload", ready, handle)
        finally:
            self._driver.cuGraphDestroy(graph)
        capture.graph = ready.value or 0

    def launch_graph(self, graph: int, stream: int) -> None:
        """Run a captured graph. Keeps the interpreter lock."""
        self._check(self._quick, "cuGraphLaunch", ctypes.c_void_p(graph), ctypes.c_void_p(stream))

    def destroy_graph(self, graph: int) -> None:
        """Give a graph back, when no launch of it is left."""
        self._check(self._driver, "cuGraphExecDestroy", ctypes.c_void_p(graph))

    def _check(self, library: ctypes.CDLL, call: str, *arguments: object) -> None:
        code: int = getattr(library, call)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._quick.cuGetErrorName(code, ctypes.byref(text))
            raise DriverError(call, (text.value or b"unknown error").decode(), code)


class Capture:
    """A capture under way; `graph` is there when it is over."""

    graph: int = 0


@cache
def cuda_driver() -> CudaDriver:
    """The driver, loaded once."""
    return CudaDriver()


class StreamStore:
    """Streams of our own, kept and used again: torch keeps a workspace of cuBLAS for each that it has ever seen."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: dict[int, list[int]] = {}  # by device index

    def take(self, device: int) -> int:
        """A stream of this device, whose context is current."""
        with self._lock:
            idle = self._idle.get(device)
            return idle.pop() if idle else cuda_driver().create_stream()

    def give_back(self, device: int, stream: int) -> None:
        """The stream is idle."""
        with self._lock:
            self._idle.setdefault(device, []).append(stream)


streams = StreamStore()
