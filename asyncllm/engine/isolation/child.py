"""The child: an engine's thread as in any program, whose callers are in another process.

It lives no longer than the process that started it, whatever becomes of that one, and leaves signals that a terminal or
a supervisor sends to both of them to it: it is ended by its host, in order.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import logging
import os
import select
import signal
import socket
import threading
import time
import weakref
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from asyncllm.engine.core import Core
from asyncllm.engine.core_access import CoreAccess
from asyncllm.engine.engine_thread import EngineThread
from asyncllm.engine.isolation.channel import Receiver, Sender
from asyncllm.engine.isolation.child_process import HOST_SIGNALS
from asyncllm.engine.isolation.messages import (
    Abandon,
    Abort,
    Answer,
    Ask,
    Begin,
    Close,
    Closed,
    HookReturned,
    LoadFailed,
    Logged,
    Open,
    Refused,
    Started,
)
from asyncllm.engine.isolation.outlet import ChildMailbox, Outlet
from asyncllm.engine.isolation.remote_hooks import HookDesk, RemotePlace
from asyncllm.engine.isolation.travel import ErrorReport, unpack
from asyncllm.errors import ConfigError, EngineClosed, InvalidPromptError, shown

_ORPHANED = 1
"""The exit status of a child without a host."""

MOST_UNSENT = 1000
"""Messages that a host which does not read may leave behind before its log is no longer written."""

LOOK_EVERY = 1.0
"""Seconds between looks at who the parent is, where the system tells nobody of its end."""


def main(descriptor: int, host: int) -> None:
    """Serve the process `host` over this socket, until it says so or is gone."""
    ignored = [getattr(signal, name) for name in HOST_SIGNALS]
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ignored)  # whoever started it had them blocked until it is so far
    faulthandler.enable()
    with suppress(OSError):
        os.dup2(2, 1)  # what a library prints is not the program's output
    os.set_inheritable(descriptor, False)
    threading.Thread(target=_watch, args=(host,), name="asyncllm-host", daemon=True).start()
    with socket.socket(fileno=descriptor) as connection:
        if not Child(connection).serve():
            os._exit(_ORPHANED)
    gc.unfreeze()  # extension modules print what the interpreter's last collection has left


def _watch(host: int) -> None:
    """End at once when the host is gone, though a copy of its end of the socket may live on in a fork of it."""
    try:
        descriptor = os.pidfd_open(host)
    except (AttributeError, OSError):  # not on Linux, or an old one
        while os.getppid() == host:
            time.sleep(LOOK_EVERY)
    else:
        if os.getppid() == host:  # else it was gone, and another process may have its number
            select.select([descriptor], [], [])
    os._exit(_ORPHANED)


class Child:
    """Answers the host's messages."""

    def __init__(self, connection: socket.socket) -> None:
        self._receiver = Receiver(connection)
        self._sender = Sender(connection, self._wake)
        self._outlet = Outlet(self._sender, self._released)
        self._hooks = HookDesk(self._sender.send)
        self._requests: dict[int, int] = {}  # the host's numbers to the core's
        self._home: EngineThread | None = None
        self._core: Core | None = None
        self._name = ""
        self._closing = False

    def serve(self) -> bool:
        """Until the host has hung up. False where it did so without having closed the engine."""
        while (message := self._receiver.receive()) is not None:
            self._take(message)
        if self._home is None or not self._closing:
            return False
        self._home.join()
        return True

    def _take(self, message: Any) -> None:
        match message:
            case Open():
                self._open(message)
            case Abandon(number):
                if (request := self._requests.get(number)) is not None:
                    self._serving().abandon(request)
            case Abort(request_id):
                self._serving().abort(request_id)
            case HookReturned():
                self._hooks.take(message)
            case Ask():
                self._answer(message)
            case Begin():
                self._begin(message)
            case Close(drain):
                self._closing = True
                assert self._home is not None
                self._home.stop(drain)

    def _begin(self, begin: Begin) -> None:
        _forward_logs(self._sender, begin.log_level)
        self._name = begin.name
        try:
            load = unpack(begin.load)
        except Exception as error:
            failure = ConfigError(
                f'isolation="process": {begin.name} cannot be found in the engine\'s process: {error}'
            )
            return self._sender.send(LoadFailed(ErrorReport.of(failure)))
        self._home = EngineThread(load, begin.config, self._outlet)
        self._home.started.add_done_callback(self._started)
        self._home.stopped.add_done_callback(self._stopped)
        self._home.start()

    def _started(self, started: Future[CoreAccess]) -> None:
        error = started.exception()
        if error is not None:
            return self._sender.send(LoadFailed(ErrorReport.of(error)))
        core = started.result()
        assert isinstance(core, Core)
        self._core = core
        self._outlet.attach(core)
        gc.collect()
        gc.freeze()  # torch and the model stay: no collection between two steps need look through them
        self._sender.send(Started(core.describe(self._name), core.statistics()))

    def _stopped(self, stopped: Future[None]) -> None:
        """On the engine's thread, which has nothing left to do."""
        if self._core is not None:
            self._outlet.flush()
            self._sender.send(Closed())

    def _serving(self) -> Core:
        assert self._core is not None, "the host sends requests only once it was told that the engine has started"
        return self._core

    def _open(self, message: Open) -> None:
        mailbox = ChildMailbox(message.number, message.request_id, message.choices)
        mailbox.aborted = message.aborted
        try:
            submission = unpack(message.submission)
        except Exception as error:
            failure = InvalidPromptError(f"this request cannot be read in the engine's process: {shown(error, str)}")
            return self._sender.send(Refused(message.number, ErrorReport.of(failure)))
        core = self._serving()
        place = None
        if submission.params.has_hooks:
            place = RemotePlace(self._hooks, message.number)
            weakref.finalize(place, self._outlet.end_hooks, message.number).atexit = False
        try:
            self._requests[message.number] = core.open(mailbox, submission, _NO_LOOP, place)
        except EngineClosed as error:
            return self._sender.send(Refused(message.number, ErrorReport.of(error)))
        if mailbox.released:  # so soon that `_released` may have come first
            self._released(message.number)

    def _wake(self) -> None:
        self._outlet.wake()

    def _released(self, number: int) -> None:
        self._requests.pop(number, None)

    def _answer(self, ask: Ask) -> None:
        core = self._serving()
        try:
            future: Future[Any] = getattr(core, ask.method)(unpack(ask.argument))
        except Exception as error:
            return self._sender.send(Answer(ask.number, error=ErrorReport.of(error)))

        def done(future: Future[Any]) -> None:
            if future.cancelled():
                failure: BaseException | None = EngineClosed("the engine was closed")
            else:
                failure = future.exception()
            if failure is not None:
                self._sender.send(Answer(ask.number, error=ErrorReport.of(failure)))
            else:
                self._sender.send(Answer(ask.number, future.result()))

        future.add_done_callback(done)


_NO_LOOP = asyncio.BaseEventLoop()
"""In place of a stream's: never run."""
_NO_LOOP.close()


def _forward_logs(sender: Sender, level: int) -> None:
    logger = logging.getLogger("asyncllm")
    logger.handlers = [_HostHandler(sender)]
    logger.propagate = False
    logger.setLevel(level)


class _HostHandler(logging.Handler):
    """The host has the handlers."""

    def __init__(self, sender: Sender) -> None:
        super().__init__()
        self._sender = sender

    def emit(self, record: logging.LogRecord) -> None:
        """As logging has it; lost where the host has not read so many messages that it never may."""
        if self._sender.unsent < MOST_UNSENT:
            self._sender.send(Logged(record.name, record.levelno, self.format(record)))
