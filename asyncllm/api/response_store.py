"""Responses that a later request may go on from. In memory and bounded; an app may bring a store of its own."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from asyncllm.api.exchange import dump


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response, and the chat that led to it, the answer included."""

    response: Mapping[str, Any]
    messages: tuple[Mapping[str, Any], ...]
    input_items: tuple[Mapping[str, Any], ...] = ()


class ResponseStore(Protocol):
    """Keeps responses by (owner, id). An owner never sees another one's."""

    async def put(self, owner: str, response_id: str, stored: StoredResponse) -> None:
        """Keep it, as long as there is room."""
        ...

    async def get(self, owner: str, response_id: str) -> StoredResponse | None:
        """None where there is none, or none any more."""
        ...

    async def delete(self, owner: str, response_id: str) -> bool:
        """Whether there was one."""
        ...


class MemoryResponseStore:
    """The default store: the newest responses, up to a number and a size."""

    def __init__(self, max_responses: int, max_bytes: int) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._bytes = 0
        self._kept: OrderedDict[tuple[str, str], tuple[StoredResponse, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    async def put(self, owner: str, response_id: str, stored: StoredResponse) -> None:
        """The oldest ones make room."""
        size = len(dump([stored.response, stored.messages, stored.input_items]))
        await self.delete(owner, response_id)
        if size > self._max_bytes or not self._max_responses:
            return
        self._kept[owner, response_id] = (stored, size)
        self._bytes += size
        while len(self._kept) > self._max_responses or self._bytes > self._max_bytes:
            self._bytes -= self._kept.popitem(last=False)[1][1]

    async def get(self, owner: str, response_id: str) -> StoredResponse | None:
        """As `ResponseStore.get`."""
        kept = self._kept.get((owner, response_id))
        return None if kept is None else kept[0]

    async def delete(self, owner: str, response_id: str) -> bool:
        """As `ResponseStore.delete`."""
        kept = self._kept.pop((owner, response_id), None)
        if kept is not None:
            self._bytes -= kept[1]
        return kept is not None
