"""What every generating endpoint does with a stream of the engine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence

from asyncllm.api.errors import INTERNAL, ApiError, api_error
from asyncllm.engine.async_engine import TokenStream
from asyncllm.results import FinishReason, TokenDelta

logger = logging.getLogger("asyncllm.api")


def check_time(reason: FinishReason, *, server_limits: bool) -> None:
    """Raises 504 where the server's own limit ended a request."""
    if reason is FinishReason.DEADLINE and server_limits:
        raise ApiError(504, "The request took longer than this server allows.", code="timeout")


def failure(error: Exception) -> ApiError:
    """What a client is told when a stream fails; the log gets what it is not told."""
    told = api_error(error)
    if told is None:
        logger.error("a stream failed", exc_info=error)
    return told or INTERNAL


Arrived = list[tuple[int, TokenDelta]]
"""Deltas, each with its stream's position."""


async def merged(streams: Sequence[TokenStream]) -> AsyncGenerator[Arrived, None]:
    """Deltas of several streams, those together that came together. One that fails ends all."""
    if len(streams) == 1:
        async for delta in streams[0]:
            yield [(0, delta)]
        return
    # Bounded: what a slow reader leaves unread merges in the streams.
    arrived: asyncio.Queue[tuple[int, TokenDelta] | Exception | None] = asyncio.Queue(2 * len(streams))

    async def pump(position: int, stream: TokenStream) -> None:
        try:
            async for delta in stream:
                await arrived.put((position, delta))
            await arrived.put(None)
        except Exception as error:
            await arrived.put(error)

    pumps = [asyncio.create_task(pump(position, stream)) for position, stream in enumerate(streams)]
    try:
        ended = 0
        while ended < len(streams):
            items = [await arrived.get()]
            while not arrived.empty():
                items.append(arrived.get_nowait())
            batch: Arrived = []
            for item in items:
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    ended += 1
                else:
                    batch.append(item)
            if batch:
                yield batch
    finally:
        for each in pumps:
            each.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
