"""An engine behind a real server on a real socket, in a thread of its own: clients may be blocking or async."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import uvicorn
from aiohttp import web
from granian.server.embed import Server as Granian
from hypercorn.asyncio import serve as hypercorn_serve
from hypercorn.config import Config as HypercornConfig

from asyncllm import AsyncEngine
from asyncllm.api import create_aiohttp_app, create_asgi_app

KINDS = ("aiohttp", "uvicorn", "hypercorn")

Result = TypeVar("Result")


@dataclass
class Running:
    """A server that runs."""

    port: int
    engine: AsyncEngine
    loop: asyncio.AbstractEventLoop

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def run(self, make: Callable[[], Awaitable[Result]]) -> Result:
        """On the server's loop."""

        async def call() -> Result:
            return await make()

        return asyncio.run_coroutine_threadsafe(call(), self.loop).result(30)


@contextmanager
def running(kind: str, make_engine: Callable[[], AsyncEngine], **settings: Any) -> Iterator[Running]:
    """Serve until the block is left. The app starts the engine and closes it."""
    ready: Future[Running] = Future()
    ended = threading.Event()

    async def main() -> None:
        engine = make_engine()
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        async with serving(kind, engine, **settings) as port:
            ready.set_result(Running(port, engine, loop))
            stopper = loop.run_in_executor(None, ended.wait)
            stopper.add_done_callback(lambda _: stop.set())
            await stop.wait()

    def thread_main() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:
            if ready.done():
                raise
            ready.set_exception(error)

    thread = threading.Thread(target=thread_main, name=f"server-{kind}")
    thread.start()
    try:
        yield ready.result(60)
    finally:
        ended.set()
        thread.join(60)
        assert not thread.is_alive()


@asynccontextmanager
async def serving(kind: str, engine: AsyncEngine, **settings: Any) -> AsyncIterator[int]:
    """The same on the running loop; gives the port."""
    if kind == "aiohttp":
        runner = web.AppRunner(create_aiohttp_app(engine, **settings))
        await runner.setup()
        listener = open_listener()
        await web.SockSite(runner, listener).start()
        try:
            yield listener.getsockname()[1]
        finally:
            await runner.cleanup()
        return
    app = create_asgi_app(engine, **settings)
    async with serving_asgi(kind, app) as port:
        yield port


@asynccontextmanager
async def serving_asgi(kind: str, app: Any) -> AsyncIterator[int]:
    """Any ASGI app under uvicorn, hypercorn or granian."""
    listener = open_listener()
    port = listener.getsockname()[1]
    if kind == "uvicorn":
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=5))
        server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign]  # not in a test's process
        task = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started and not task.done():  # noqa: ASYNC110  # uvicorn has no event for it
            await asyncio.sleep(0.005)
        try:
            yield port
        finally:
            server.should_exit = True
            await task
    elif kind == "granian":
        listener.close()  # it takes no socket that is open
        granian = Granian(app, port=port, interface="asgi", log_enabled=False)
        task = asyncio.create_task(granian.serve())
        try:
            await _connectable(port)
            yield port
        finally:
            granian.stop()
            await task
    else:
        config = HypercornConfig()
        config.bind = [f"fd://{listener.fileno()}"]
        config.graceful_timeout = 5
        config.loglevel = "ERROR"
        stop = asyncio.Event()
        task = asyncio.create_task(hypercorn_serve(app, config, shutdown_trigger=stop.wait))  # type: ignore[arg-type]
        await asyncio.sleep(0.05)
        try:
            yield port
        finally:
            stop.set()
            await task
            listener.detach()  # the server closed it


async def _connectable(port: int) -> None:
    while True:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except ConnectionError:
            await asyncio.sleep(0.01)
        else:
            return writer.close()


def open_listener() -> socket.socket:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", 0))
    listener.listen(1024)
    return listener
