"""Functions of the host's, as the child sees them; and in the host, the calls of them that the child has asked for."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import Future
from itertools import count
from typing import Any

from asyncllm.engine.hook_driver import checked_logits
from asyncllm.engine.hook_place import HookCall, HookPlace
from asyncllm.engine.isolation.messages import CallHook, CancelHook, HookReturned
from asyncllm.engine.isolation.travel import ErrorReport
from asyncllm.errors import RequestFailed, shown
from asyncllm.params import SamplingParams


class RemoteHook:
    """Stands for a function. Shows itself as that one did."""

    def __init__(self, place: int | None, shown: str) -> None:
        self.place = place  # see `CallHook`
        self._shown = shown

    def __call__(self) -> None:
        """It is not called here."""
        raise TypeError("this function is in another process")

    def __repr__(self) -> str:
        return self._shown


def without_functions(params: SamplingParams) -> SamplingParams:
    """The same with what cannot cross replaced: functions, and the type that an output is made into afterwards."""
    structured = params.structured_output
    if not params.has_hooks and (structured is None or structured.model is None):
        return params
    params = copy.copy(params)  # its checks are done, and take their time
    if structured is not None and structured.model is not None:
        structured = copy.copy(structured)
        object.__setattr__(structured, "model", None)
        object.__setattr__(params, "structured_output", structured)
    processors = tuple(RemoteHook(i, shown(hook)[:80]) for i, hook in enumerate(params.logits_processors))
    object.__setattr__(params, "logits_processors", processors)
    if params.on_token is not None:
        object.__setattr__(params, "on_token", RemoteHook(None, shown(params.on_token)[:80]))
    return params


class HookDesk:
    """In the child: the calls that the host has not answered."""

    def __init__(self, send: Callable[[object], None]) -> None:
        self._send = send
        self._numbers = count()
        self._calls: dict[int, Future[Any]] = {}

    def begin(self, request: int, hook: RemoteHook, arguments: tuple[Any, ...]) -> RemoteCall:
        """Have the host call it."""
        call = RemoteCall(self, next(self._numbers))
        self._calls[call.number] = call.result
        self._send(CallHook(call.number, request, hook.place, arguments))
        return call

    def take(self, returned: HookReturned) -> None:
        """The host has answered."""
        result = self._calls.pop(returned.call, None)
        if result is None:
            return
        if returned.error is None:
            result.set_result(returned.value)
        else:
            result.set_exception(returned.error.restore())

    def cancel(self, call: int) -> None:
        """Nobody waits for it any more."""
        if self._calls.pop(call, None) is not None:
            self._send(CancelHook(call))


class RemoteCall:
    """As `HookCall`."""

    def __init__(self, desk: HookDesk, number: int) -> None:
        self.number = number
        self.result = Future[Any]()
        self.result.set_running_or_notify_cancel()
        self._desk = desk

    def cancel(self) -> None:
        """As `HookCall.cancel`."""
        self._desk.cancel(self.number)


class RemotePlace:
    """As `HookPlace`, of one request."""

    def __init__(self, desk: HookDesk, request: int) -> None:
        self._desk = desk
        self._request = request

    def begin(self, function: Callable[..., Any], *args: Any) -> HookCall:
        """As `HookPlace.begin`."""
        assert isinstance(function, RemoteHook)
        return self._desk.begin(self._request, function, args)


class HookedStream:
    """In the host: the functions of one request, and where they run."""

    def __init__(self, params: SamplingParams, place: HookPlace) -> None:
        self._params = params
        self._place = place
        self._raised: BaseException | None = None

    def begin(self, call: CallHook, answer: Callable[[HookReturned], object]) -> HookCall | None:
        """Call a function. The answer comes from any thread; None where it has come."""
        is_processor = call.place is not None
        function = self._params.on_token if call.place is None else self._params.logits_processors[call.place]
        assert function is not None

        def done(result: Future[Any]) -> None:
            try:
                value = result.result()
                if is_processor:
                    logits = call.arguments[-1]  # changed in place, or not
                    value = logits if value is None else checked_logits(value, len(logits))
                else:
                    value = None
            except BaseException as error:
                self._raised = error
                answer(HookReturned(call.call, error=ErrorReport.of(error)))
            else:
                answer(HookReturned(call.call, value))

        try:
            begun = self._place.begin(function, *call.arguments)
        except RuntimeError as error:
            answer(HookReturned(call.call, error=ErrorReport.of(error)))
            return None
        begun.result.add_done_callback(done)
        return begun

    def explain(self, failure: BaseException) -> None:
        """Where a function has raised what this says, that is its cause, and not a copy of it."""
        if isinstance(failure, RequestFailed) and self._raised is not None:
            cause = failure.__cause__
            if cause is not None and shown(cause) == shown(self._raised):
                failure.__cause__ = self._raised
