"""EngineProcess: an engine in a process of its own, and in another one when that dies."""

from __future__ import annotations

import logging
import os
import sys
import time
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

from asyncllm.config import EngineConfig
from asyncllm.engine.home_thread import HomeThread
from asyncllm.engine.hook_place import HookCall
from asyncllm.engine.isolation.channel import Receiver
from asyncllm.engine.isolation.child_process import ChildProcess
from asyncllm.engine.isolation.messages import (
    Answer,
    Begin,
    CallHook,
    CancelHook,
    Closed,
    Died,
    HookReturned,
    LoadFailed,
    Logged,
    News,
    Refused,
    Started,
)
from asyncllm.engine.isolation.remote_core import RemoteCore
from asyncllm.engine.isolation.travel import ErrorReport, pack, pack_plain, unpack
from asyncllm.engine.model import ModelLoader
from asyncllm.errors import AsyncLLMError, ConfigError, EngineClosed, EngineCrashed, EngineDead

PAUSES = (0.0, 1.0, 5.0)
"""Seconds before another child is started. One that dies before it has served anybody brings the next one, and after
the last the engine is dead."""

logger = logging.getLogger("asyncllm")


@dataclass(slots=True)
class _Life:
    """What is known of one child's life."""

    started: bool = False
    served: bool = False  # it was asked for something
    in_order: bool = False  # it was closed
    reason: BaseException | None = None  # that it has named for its end


class EngineProcess(HomeThread):
    """As `EngineHome`. Lives on a thread, which starts a child, reads what it says, and sees to its end."""

    def __init__(self, name: str, load: ModelLoader, config: EngineConfig) -> None:
        """Raises `ConfigError` where the loader cannot cross."""
        super().__init__()
        plain = unpack(pack_plain(config))  # a text in it may be of a type that only the host has
        self._begin = Begin(str.__str__(name), _packed(load), plain, logger.getEffectiveLevel())
        self._folder, self._path = _working_folder(), [entry or os.curdir for entry in sys.path]
        self._core = RemoteCore()
        self._calls: dict[int, HookCall] = {}  # of the host's functions, by the child's number
        self._stopping = False
        self._woken: SimpleQueue[None] = SimpleQueue()  # by `stop`

    def stop(self, drain: float = 0.0) -> None:
        """As `EngineHome.stop`."""
        self._stopping = True
        dispatcher = self._core.dispatcher
        dispatcher.drain_until = time.monotonic() + drain
        dispatcher.post(dispatcher.stop, drain)
        self._woken.put(None)

    def _run(self) -> None:
        failure: BaseException = EngineClosed("the engine was closed while it started")
        try:
            self._core.dispatcher.start()
            self._keep_alive()
        except BaseException as error:
            failure = error
            if self.started.done():
                logger.exception("the engine's thread failed")
        finally:
            self._core.dispatcher.finish()
            self._end(failure)

    def _keep_alive(self) -> None:
        """Start a child, and another one whenever it dies. Raises why the first one cannot start."""
        failures = 0
        while not self._stopping:
            life = self._live_once()
            if life.in_order or self._stopping:
                return
            if not self.started.done():
                assert life.reason is not None
                raise life.reason
            failures = 0 if life.started and life.served else failures + 1
            if failures > len(PAUSES):
                return self._give_up(life.reason)
            self._wait(PAUSES[max(failures - 1, 0)])

    def _live_once(self) -> _Life:
        """A child, from its start to its end, and what follows from that."""
        life = _Life()
        try:
            child = ChildProcess.start(self._folder, self._path)
        except OSError as error:
            life.reason = _caused(EngineCrashed(f"the engine's process cannot be started: {error}"), error)
            return life
        ended = self._attend(child, life)
        if life.in_order or self._stopping:
            return life
        if life.started or life.reason is None:
            text = f"the engine's process has died: {ended if life.reason is None else life.reason}"
            life.reason = _caused(EngineCrashed(text), life.reason)
        if self.started.done():
            reason = life.reason
            logger.error("%s; another one takes its place", reason)
            self._core.lose(lambda: _caused(EngineCrashed(str(reason)), reason.__cause__))
        return life

    def _attend(self, child: ChildProcess, life: _Life) -> str:
        """From its first message to its end: says how it came."""
        dispatcher = self._core.dispatcher
        dispatcher.post(dispatcher.begin, (child, self._begin))
        receiver = Receiver(child.connection)
        try:
            while (message := receiver.receive()) is not None:
                self._take(child, life, message)
                if not receiver.more:  # of a host that lagged behind, several messages wake it once
                    self._core.wake()
        except Exception as error:  # it says what nobody understands
            logger.exception("the engine's process cannot be understood")
            life.reason = error
            child.kill()
        self._core.hang_up(child)
        ended = child.wait()
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.cancel()
        life.served = child.served
        return ended

    def _take(self, child: ChildProcess, life: _Life, message: Any) -> None:
        core = self._core
        match message:
            case News():
                core.take(message)
            case CallHook():
                self._call_hook(child, message)
            case CancelHook(number):
                if (call := self._calls.pop(number, None)) is not None:
                    call.cancel()
            case Answer():
                core.dispatcher.answer(message)
            case Refused():
                core.refuse(message)
            case Logged(name, level, text):
                host = logging.getLogger(name)
                if host.isEnabledFor(level):
                    host.handle(host.makeRecord(name, level, "", 0, text, (), None))
            case Started():
                life.started = True
                core.begin(message)
                core.dispatcher.post(core.dispatcher.came_up, child)
                if not self.started.done():
                    self.started.set_result(core)
            case LoadFailed(error):
                life.reason = error.restore()
                child.hang_up()
            case Died(error):
                life.reason = error.restore()
                child.kill()
            case Closed():
                life.in_order = self._stopping
                child.hang_up()

    def _call_hook(self, child: ChildProcess, call: CallHook) -> None:
        dispatcher, hooks = self._core.dispatcher, self._core.streams.hooks(call.number)
        calls = self._calls  # this child's: the next one counts anew

        def answer(returned: HookReturned) -> None:
            calls.pop(returned.call, None)
            dispatcher.post(dispatcher.return_hook, (child, returned))

        if hooks is None:
            return answer(HookReturned(call.call, error=ErrorReport.of(RuntimeError("the request is over"))))
        begun = hooks.begin(call, answer)
        if begun is not None:
            calls[call.call] = begun
            if begun.result.done():  # maybe before it stood there
                calls.pop(call.call, None)

    def _give_up(self, reason: BaseException | None) -> None:
        """There is no use in another child: everybody is told, until the engine is closed."""
        text = f"the engine's process died {len(PAUSES) + 1} times before it could serve anybody; at last: {reason}"
        logger.error("%s", text)
        self._core.give_up(lambda: _caused(EngineDead(text), reason))
        while not self._stopping:
            self._woken.get()

    def _wait(self, seconds: float) -> None:
        try:
            if seconds and not self._stopping:
                self._woken.get(timeout=seconds)
        except Empty:
            pass


def _working_folder() -> str | None:
    """For every child, wherever the host goes; None where it is gone."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None


def _caused(error: AsyncLLMError, cause: BaseException | None) -> AsyncLLMError:
    error.__cause__ = cause
    return error


def _packed(load: ModelLoader) -> bytes:
    try:
        return pack(load)
    except Exception as error:
        raise ConfigError(
            f'isolation="process" sends the model loader to another process by pickle, and {load!r:.80} cannot go '
            f"there: {error}"
        ) from error
