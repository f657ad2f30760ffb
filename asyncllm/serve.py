"""`asyncllm serve`: an engine and its API in a process of their own, until a signal ends it.

A command is an application of its own: here, and in `cli`, signals have a meaning, logging is set up, and text is
printed. Settings come from flags, else from environment variables, else from a TOML file.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import logging
import signal
import socket
import sys
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

from asyncllm import AsyncEngine, api
from asyncllm.api.settings import ApiSettings
from asyncllm.config import EngineConfig, read_environment
from asyncllm.errors import ConfigError
from asyncllm.flags import chosen_fields, text_fields
from asyncllm.metrics import EngineState

if TYPE_CHECKING:
    from aiohttp import web

    from asyncllm.api.service import Service

OK, FAILED = 0, 1

ENGINE_DEFAULTS: dict[str, Any] = {"isolation": "process"}
"""Where they differ from `EngineConfig`'s own: what serves faster (`python -m benchmarks.serving`)."""

LOOK_EVERY = 0.5
"""Seconds between looks at whether the engine lives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Where and how the server listens and logs."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for all."""
    port: int = 8000
    """0 takes any that is free."""
    log_format: Literal["text", "json"] = "text"
    """One line a request, without anything of its prompt."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """What is logged."""

    def __post_init__(self) -> None:
        if not isinstance(self.host, str) or not self.host:
            raise ConfigError(f"host must be an address, got {self.host!r}")
        if isinstance(self.port, bool) or not isinstance(self.port, int) or not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be a number from 0 to 65535, got {self.port!r}")
        for name, allowed in (
            ("log_format", ("text", "json")),
            ("log_level", ("debug", "info", "warning", "error")),
        ):
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """All that the command was told."""

    model: str
    engine: EngineConfig
    api: ApiSettings
    server: ServerSettings


def serve_command(chosen: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C. Returns 0 after that, 1 if the engine died; raises what it cannot start for."""
    settings = read_settings(chosen)
    _set_up_logging(settings.server)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(_serve(settings))


def read_settings(chosen: argparse.Namespace) -> ServeSettings:
    """Flags before environment variables before the file. Raises `ConfigError`."""
    kinds: dict[str, type[Any]] = {"engine": EngineConfig, "api": ApiSettings, "server": ServerSettings}
    file = {} if chosen.config is None else _read_file(chosen.config)
    names = {"model"}.union(*({field.name for field in fields(kind)} for kind in kinds.values()))
    environment = read_environment(sorted(names))
    model = chosen.model or environment.get("model") or file.pop("model", None)
    if not isinstance(model, str) or not model:
        raise ConfigError("which model? asyncllm serve MODEL, ASYNCLLM_MODEL, or model in the TOML file")
    given = {}
    for table, kind in kinds.items():
        section = file.pop(table, {})
        if not isinstance(section, Mapping):
            raise ConfigError(f"{table} in the TOML file must be a table")
        unknown = sorted(section.keys() - {field.name for field in fields(kind)})
        if unknown:
            raise ConfigError(f"unknown setting {unknown[0]!r} in the TOML file's table {table}")
        own = ENGINE_DEFAULTS if kind is EngineConfig else {}
        given[table] = kind(**{**own, **section, **text_fields(kind, environment), **chosen_fields(kind, chosen)})
    file.pop("model", None)
    if file:
        raise ConfigError(f"unknown entry {sorted(file)[0]!r} in the TOML file: it has model, engine, api and server")
    return ServeSettings(model, **given)


def _read_file(path: str) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


async def _serve(settings: ServeSettings) -> int:
    engine = AsyncEngine(settings.model, config=settings.engine)
    app = api.create_aiohttp_app(engine, settings=settings.api)
    from aiohttp import web  # noqa: PLC0415  # of the extra `api`; without it, create_aiohttp_app has said so

    signals = _Signals()
    with _listener(settings.server) as listener, signals:
        _say(f"loading {settings.model}")
        start = asyncio.ensure_future(engine.start())
        stop = asyncio.ensure_future(signals.first.wait())
        try:
            await asyncio.wait((start, stop), return_when=asyncio.FIRST_COMPLETED)
            if signals.first.is_set():
                return OK
            await start
            gc.collect()
            gc.freeze()  # what is loaded stays: no collection beside streams looks through it, for up to 0.1 s
            runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
            await runner.setup()
            try:
                await web.SockSite(runner, listener).start()
                _greet(engine, listener)
                return await _until_the_end(engine, app, signals)
            finally:
                await runner.cleanup()
        finally:
            stop.cancel()
            start.cancel()
            await engine.aclose()
            gc.unfreeze()  # extension modules print what the interpreter's last collection has left


async def _until_the_end(engine: AsyncEngine, app: web.Application, signals: _Signals) -> int:
    from asyncllm.api.aiohttp_app import SERVICE  # noqa: PLC0415  # brings aiohttp

    while not signals.first.is_set():
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_EVERY):
                await signals.first.wait()
        if engine.state is EngineState.DEAD:
            _say("the engine has died; its log has the reason")
            return FAILED
    if not await _drain(app[SERVICE], signals):
        await engine.aclose()  # first, so that streams end with an error that says so
    return OK


async def _drain(service: Service, signals: _Signals) -> bool:
    """Let those that run finish; False where a second signal came first, or the time was up."""
    in_work = service.serving.admission.choices
    if in_work:
        seconds = service.serving.settings.drain_timeout
        _say(f"shutting down: {in_work} answers may go on for {seconds:g} s; a second signal ends them")
    drain: asyncio.Future[bool] = asyncio.ensure_future(service.drain())
    again = asyncio.ensure_future(signals.second.wait())
    await asyncio.wait((drain, again), return_when=asyncio.FIRST_COMPLETED)
    again.cancel()
    if not drain.done():
        drain.cancel()
        return False
    return await drain


class _Signals:
    """SIGTERM and Ctrl-C as events, while the block lasts."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def __enter__(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._arrive)

    def __exit__(self, *error: object) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.remove_signal_handler(number)

    def _arrive(self) -> None:
        (self.second if self.first.is_set() else self.first).set()


def _listener(server: ServerSettings) -> socket.socket:
    """Bound before the model is loaded, so that a port that is taken is told at once."""
    try:
        family = socket.AF_INET6 if ":" in server.host else socket.AF_INET
        return socket.create_server((server.host, server.port), family=family, backlog=1024)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"cannot listen on {server.host}:{server.port}: {error}") from error


def _greet(engine: AsyncEngine, listener: socket.socket) -> None:
    host, port = listener.getsockname()[:2]
    model = engine.describe()
    shown = f"[{host}]" if ":" in host else host
    requests = min(model.max_num_seqs, max(model.cache_tokens // model.max_model_len, 1))
    _say(f"serving {model.name} ({model.dtype}, {model.device}) on http://{shown}:{port}")
    _say(
        f"the cache holds {model.cache_tokens:,} tokens; at most {model.max_num_seqs:,} requests run at once, "
        f"{requests:,} of them at the full {model.max_model_len:,} tokens"
    )


def _say(text: str) -> None:
    print(f"asyncllm: {text}", file=sys.stderr, flush=True)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's, where it is installed: it writes to sockets for about two thirds of the processor time."""
    try:
        import uvloop  # noqa: PLC0415  # optional
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def _set_up_logging(server: ServerSettings) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(_JsonLines() if server.log_format == "json" else _TextLines())
    logger = logging.getLogger("asyncllm")
    logger.handlers = [handler]
    logger.propagate = False
    logger.setLevel(server.log_level.upper())


class _TextLines(logging.Formatter):
    """For people."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """With the request's id behind."""
        given: Mapping[str, Any] = getattr(record, "fields", {})
        text = super().formatMessage(record)
        return f"{text} [{given['request_id']}]" if "request_id" in given else text


class _JsonLines(logging.Formatter):
    """For machines: one object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """As logging has it."""
        line = {
            "time": record.created,
            "level": record.levelname.lower(),
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)
