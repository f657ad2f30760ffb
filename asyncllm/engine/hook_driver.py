"""HookDriver: calls the host's own functions about one late request, one after another.

While one is at work (`hook_place` says where), its row waits, and no other. One that raises or takes too long ends its
request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from asyncllm.engine.hook_place import HookPlace
from asyncllm.engine.plan import Adjustment, Float32Array, RowLogits, RowSampling
from asyncllm.engine.row_logits import adjusted_logits
from asyncllm.errors import HookFailed, SamplingFailed, shown
from asyncllm.params import LogitsProcessor, OnToken

_LARGEST = np.finfo(np.float32).max


@dataclass(frozen=True, slots=True)
class Hooks:
    """The functions of one request."""

    processors: Sequence[LogitsProcessor]
    on_token: OnToken | None


@dataclass(frozen=True, slots=True)
class HookedRequest:
    """A choice of a request that has some."""

    hooks: Hooks
    sampling: RowSampling
    prompt_tokens: int
    seconds: float  # that each call may take


@dataclass(frozen=True, slots=True)
class HostLogits:
    """Logits that a step has kept for a row, those that follow its first `position` tokens."""

    position: int
    values: Float32Array  # [vocabulary]


@dataclass(frozen=True, slots=True)
class _Said:
    """The guide's word, about what follows these tokens."""

    token_ids: Sequence[int]
    adjustment: Adjustment


class HookDriver:
    """Lives on the engine's loop, in a task of its own, from the first token to the last."""

    def __init__(self, request: HookedRequest, place: HookPlace, bind: Callable[[Adjustment], object]) -> None:
        self._hooks = request.hooks
        self._sampling = request.sampling
        self._place = place
        self._seconds = request.seconds
        self._prompt_tokens = request.prompt_tokens
        self._bind = bind
        self._events: asyncio.Queue[int | _Said | HostLogits | None] = asyncio.Queue()
        self._said: _Said | None = None
        self._logits: HostLogits | None = None

    def take_tokens(self, token_ids: Sequence[int]) -> None:
        """These tokens have come."""
        for token_id in token_ids:
            self._events.put_nowait(token_id)

    def take_adjustment(self, token_ids: Sequence[int], adjustment: Adjustment) -> None:
        """What the guide says of the token that follows these, prompt and output."""
        self._events.put_nowait(_Said(token_ids, adjustment))

    def take_logits(self, logits: HostLogits) -> None:
        """A step has kept these; after a preemption it may be for the second time."""
        self._events.put_nowait(logits)

    def end(self) -> None:
        """No more will come; what has come is still told."""
        self._events.put_nowait(None)

    async def drive(self) -> None:
        """Until the end. Raises what a function raised, as `HookFailed`; and `SamplingFailed` where no token is left to
        begin with."""
        while (event := await self._events.get()) is not None:
            if isinstance(event, int):
                if self._hooks.on_token is not None:
                    await self._call("on_token", self._hooks.on_token, event)
            elif isinstance(event, _Said):
                self._said = event
            else:
                self._logits = event
            if self._said is not None:
                await self._settle(self._said)

    async def _settle(self, said: _Said) -> None:
        """Bind what was said, once what it takes is there."""
        if not self._hooks.processors:
            self._said = None
            self._bind(said.adjustment)
        elif self._logits is not None and self._logits.position == len(said.token_ids):
            self._said = None
            self._bind(await self._processed(said, self._logits.values))

    async def _processed(self, said: _Said, logits: Float32Array) -> Adjustment:
        values = adjusted_logits(logits, self._sampling, said.token_ids, self._prompt_tokens, said.adjustment)
        values[np.isnan(values)] = -np.inf  # as the sampler has it
        if not (values > -np.inf).any():
            raise SamplingFailed
        for processor in self._hooks.processors:
            returned = await self._call("logits_processors", processor, list(said.token_ids), values)
            if returned is not None or values.shape != logits.shape or values.dtype != logits.dtype:
                values = checked_logits(values if returned is None else returned, len(logits))
        if np.isnan(values).any() or not (values > -np.inf).any():
            raise HookFailed("logits_processors left no token: each logit is -inf, or one is not a number")
        # +inf means this token and no other; but less the largest logit, as the sampler has it, it is not a number
        return replace(said.adjustment, mask=None, bias=RowLogits(np.minimum(values, _LARGEST)))

    async def _call(self, name: str, function: Callable[..., Any], *args: Any) -> Any:
        try:
            async with asyncio.timeout(self._seconds) as limit:
                return await self._result(function, *args)
        except HookFailed:  # from where it was called: of what it has returned
            raise
        except Exception as error:
            if limit.expired():
                raise HookFailed(f"{name}: {shown(function)[:80]} took more than {self._seconds:g} seconds") from error
            raise HookFailed.caused(f"{name}: {shown(function)[:80]} failed", error) from error

    async def _result(self, function: Callable[..., Any], *args: Any) -> Any:
        call = self._place.begin(function, *args)
        try:
            return await asyncio.wrap_future(call.result)
        except asyncio.CancelledError:
            call.cancel()
            raise


def checked_logits(returned: Any, vocab_size: int) -> Float32Array:
    """What a processor has returned, as logits. Raises `HookFailed`."""
    try:
        values: Float32Array = np.array(returned, dtype=np.float32)
    except (TypeError, ValueError, OverflowError) as error:
        raise HookFailed.caused("logits_processors must return logits", error) from error
    if values.shape != (vocab_size,):
        raise HookFailed(f"logits_processors must return logits of shape ({vocab_size},), got {values.shape}")
    return values
