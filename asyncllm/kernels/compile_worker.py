"""`python -m asyncllm.kernels.compile_worker HOST SOCKET ...`: processes that compile kernels for the process HOST.

The sockets are file descriptors that it was handed down. This process loads what it takes to compile a kernel, once; a
fork of it for each socket does the jobs that come over that one (`run_job`), from the first of them on. None touches a
GPU. All of them end when there is something on standard input, or nothing more, or the host is gone.
"""

from __future__ import annotations

import gc
import os
import pkgutil
import selectors
import signal
import socket
import sys
import threading
from collections.abc import Iterable
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import Connection

import asyncllm.kernels
from asyncllm.kernels.compilation import run_job
from asyncllm.kernels.triton_key import hash_triton

_NICENESS = 5
"""The host's own work goes first."""
_LOOK_EVERY = 1.0
"""Seconds between looks at who the parent is: a fork of the host may keep our standard input open."""
_STANDARD_INPUT = 0


def main(host: int, descriptors: Iterable[int]) -> None:
    """Until there is nobody to compile for."""
    os.nice(_NICENESS)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a host that ignores it hands that down
    _load()
    waiting = {descriptor: socket.socket(fileno=descriptor) for descriptor in descriptors}
    selector = selectors.PollSelector()  # of a host with many connections, descriptors are too high for `select`
    for descriptor in (_STANDARD_INPUT, *waiting):
        selector.register(descriptor, selectors.EVENT_READ)
    workers = []
    while os.getppid() == host:
        ready = [key.fd for key, _ in selector.select(_LOOK_EVERY)]
        if _STANDARD_INPUT in ready:
            break
        for descriptor in ready:
            selector.unregister(descriptor)
            connection = waiting.pop(descriptor)
            worker = os.fork()
            if not worker:
                os.close(_STANDARD_INPUT)
                for other in waiting.values():
                    other.close()
                _work(Connection(connection.detach()))
            workers.append(worker)
            connection.close()
    for worker in workers:
        os.kill(worker, signal.SIGKILL)
    for worker in workers:
        os.waitpid(worker, 0)


def _load() -> None:
    """What every fork needs, and would take a second to make for itself."""
    import_module("triton")  # whole, before there are threads: imports of two that need each other's modules fail
    threads = [threading.Thread(target=work) for work in (hash_triton, _compile_utilities)]
    for thread in threads:
        thread.start()
    for module in pkgutil.iter_modules(asyncllm.kernels.__path__, "asyncllm.kernels."):
        if module.name != "asyncllm.kernels.compile_worker":
            import_module(module.name)
    for thread in threads:  # nobody forks beside another thread
        thread.join()
    gc.freeze()  # so that collections of the forks leave alone what they share


def _compile_utilities() -> None:
    """Triton has a C compiler make its binding of the driver, kept in the same cache. The host needs it first."""
    with suppress(Exception):
        import_module("triton.backends.nvidia.driver").CudaUtils()


def _work(connection: Connection) -> None:
    """In a fork."""
    with suppress(EOFError, OSError):
        while True:
            connection.send_bytes(run_job(connection.recv_bytes()))
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), map(int, sys.argv[2:]))
    os._exit(0)  # the host waits, and taking down what was loaded takes a third of a second
