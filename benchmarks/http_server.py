"""What `benchmarks.http` measures, in a process of its own: a server, or the engine alone; and what its threads do."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

import uvloop

from asyncllm import AsyncEngine, SamplingParams
from asyncllm.api import create_asgi_app
from asyncllm.api.settings import ApiSettings
from asyncllm.config import EngineConfig
from asyncllm.flags import add_fields
from asyncllm.serve import ENGINE_DEFAULTS, ServerSettings, ServeSettings, read_settings
from benchmarks.http_clients import Readings, StreamFigures, chat_body, summarise

KINDS = ("process", "thread", "uvicorn", "engine")
"""`asyncllm serve` with either isolation; the app under uvicorn, its engine in a process; an engine in a thread, whose
streams are read where it is, without HTTP."""

READY = re.compile(r"on http://([\d.]+):(\d+)")


@dataclass(slots=True)
class MeasuredProcess:
    """One of them."""

    kind: str
    process: subprocess.Popen[str]
    port: int = 0

    def wait_ready(self) -> None:
        """Until it listens; raises RuntimeError where it does not come up."""
        said = []
        assert self.process.stderr is not None
        for line in self.process.stderr:
            said.append(line)
            if (found := READY.search(line)) is not None:
                self.port = int(found[2])
                return
        raise RuntimeError(f"{self.kind} ended: {''.join(said)}")

    def read(self, streams: int, tokens: int, first: int) -> StreamFigures:
        """Of the kind "engine": as `drive`, by tasks beside it."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([streams, tokens, first]) + "\n")
        self.process.stdin.flush()
        found = json.loads(self.process.stdout.readline())
        return summarise([Readings(**found)])

    def thread_seconds(self) -> dict[str, float]:
        """Processor time so far of each thread of it and of its children: the processes are `host` and `engine`, the
        thread that began a process is its `main`. Empty where there is no /proc."""
        found = {}
        for name, pid in (("host", self.process.pid), *(("engine", child) for child in _children(self.process.pid))):
            for task in Path(f"/proc/{pid}/task").glob("*"):
                try:
                    fields = (task / "stat").read_text().rsplit(")", 1)[1].split()
                except OSError:  # it has ended
                    continue
                thread = "main" if task.name == str(pid) else task.name
                found[f"{name} {thread}"] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return found


def _children(pid: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = path.read_text().rsplit(")", 1)[1].split()[1]
        except OSError:
            continue
        if int(parent) == pid:
            found.append(int(path.parent.name))
    return found


@contextmanager
def measured(kind: str, model: str, flags: Sequence[str]) -> Iterator[MeasuredProcess]:
    """Begin to start it; it ends with the block."""
    own = [model, "--port", "0", "--log-level", "warning", *flags]
    if kind in ("process", "thread"):
        command = [sys.executable, "-m", "asyncllm", "serve", *own, "--isolation", kind]
    else:
        isolation = "thread" if kind == "engine" else "process"
        command = [sys.executable, "-m", "benchmarks.http_server", kind, *own, "--isolation", isolation]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            yield MeasuredProcess(kind, process)
        finally:
            process.terminate()
            assert process.stderr is not None
            process.stderr.read()


# --- in that process ---


async def serve_uvicorn(engine: AsyncEngine, settings: Any) -> None:
    """Until a signal ends it."""
    import uvicorn  # noqa: PLC0415  # the other kinds do without it

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            print(f"on http://{host}:{port}", file=sys.stderr, flush=True)

    app = create_asgi_app(engine, settings=settings)
    await Server(uvicorn.Config(app, port=0, log_level="error", access_log=False)).serve()


async def serve_tasks(engine: AsyncEngine, orders: IO[str]) -> None:
    """Until there are no more orders."""
    async with engine:
        print("on http://127.0.0.1:0", file=sys.stderr, flush=True)
        while line := await asyncio.to_thread(orders.readline):
            print(json.dumps(asdict(await _read_streams(engine, *json.loads(line)))), flush=True)


async def _read_streams(engine: AsyncEngine, streams: int, tokens: int, first: int) -> Readings:
    times: list[list[float]] = [[] for _ in range(streams)]

    async def consume(place: int, body: Mapping[str, Any]) -> None:
        params = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=1.0, seed=body["seed"])
        async with engine.stream(body["messages"], params) as stream:
            async for delta in stream:
                if delta.text:
                    times[place].append(time.perf_counter())

    bodies = [chat_body(first + place, tokens) for place in range(streams)]
    start = time.perf_counter()
    await asyncio.gather(*(consume(place, body) for place, body in enumerate(bodies)))
    return Readings(
        start=start,
        end=time.perf_counter(),
        tokens=streams * tokens,
        firsts=[own[0] - start for own in times],
        gaps=[after - before for own in times for before, after in pairwise(own)],
        processor_seconds=0.0,  # there are no clients
    )


def _settings(flags: Sequence[str]) -> ServeSettings:
    """As `asyncllm serve` reads them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.set_defaults(config=None)
    for settings, defaults in ((ServerSettings, {}), (ApiSettings, {}), (EngineConfig, ENGINE_DEFAULTS)):
        add_fields(parser.add_argument_group(), settings, defaults)
    return read_settings(parser.parse_args(flags))


def main(arguments: Sequence[str] | None = None) -> None:
    kind, *flags = sys.argv[1:] if arguments is None else arguments
    settings = _settings(flags)
    engine = AsyncEngine(settings.model, config=settings.engine)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if kind == "uvicorn":
            runner.run(serve_uvicorn(engine, settings.api))
        else:
            runner.run(serve_tasks(engine, sys.stdin))


if __name__ == "__main__":
    main()
