"""Engine events: snapshots of an engine as server-sent events, for people who watch it.

Nothing is computed for them while nobody watches.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator
from dataclasses import asdict, dataclass
from typing import Any

from asyncllm.api.service_metrics import RecentTimes, ServiceMetrics
from asyncllm.engine.async_engine import AsyncEngine
from asyncllm.errors import EngineError
from asyncllm.metrics import EngineStatistics, Inspection

clock = time.monotonic

INTERVAL = 0.5
"""Seconds between snapshots."""
MAX_CELLS = 4096
"""Of the block map: where there are more blocks, a cell stands for several, and shows the busiest of them."""
MAX_REQUESTS = 64


@dataclass(frozen=True, slots=True)
class _Mark:
    """What rates are counted from."""

    at: float
    generated: int
    computed: int


async def engine_events(
    engine: AsyncEngine, metrics: ServiceMetrics, interval: float = INTERVAL
) -> AsyncGenerator[bytes, None]:
    """A snapshot now and every `interval` seconds, each an event with JSON; ends when the engine does."""
    mark: _Mark | None = None
    try:
        while True:
            statistics, inspection = engine.statistics(), await engine.inspect(MAX_REQUESTS)
            now = _Mark(clock(), statistics.tokens_generated, statistics.tokens_computed)
            snapshot = engine_snapshot(statistics, inspection, metrics.recent()) | _rates(mark, now)
            mark = now
            yield b"data: " + json.dumps(snapshot, separators=(",", ":"), allow_nan=False).encode() + b"\n\n"
            await asyncio.sleep(interval)
    except EngineError:
        yield b"event: end\ndata: " + json.dumps(f"the engine is {engine.state}").encode() + b"\n\n"


def engine_snapshot(statistics: EngineStatistics, inspection: Inspection, recent: RecentTimes) -> dict[str, Any]:
    """What the page shows; times in seconds, and each cell of the map a digit, its `BlockState`."""
    s = statistics
    cells, each = block_cells(inspection.blocks, MAX_CELLS)
    return {
        "running": s.requests_running,
        "waiting": s.requests_waiting,
        "rows": s.rows_used,
        "finished": s.requests_finished,
        "aborted": s.requests_aborted,
        "preemptions": s.preemptions,
        "tokens_generated": s.tokens_generated,
        "prefix_hit_rate": s.prefix_hit_rate,
        "blocks": {
            "total": s.blocks_total,
            "used": s.blocks_used,
            "cached": s.blocks_cached,
            "free": s.blocks_free,
            "shared": inspection.blocks.count(3),
            "cells": cells,
            "per_cell": each,
        },
        "memory": dict(s.memory_bytes),
        "times": asdict(recent),
        "requests": [asdict(request) for request in inspection.requests],
    }


def block_cells(blocks: bytes, limit: int) -> tuple[str, int]:
    """The map as digits, and how many blocks one stands for."""
    each = -(-len(blocks) // limit) or 1
    if each > 1:
        blocks = bytes(max(blocks[at : at + each]) for at in range(0, len(blocks), each))
    return blocks.translate(_DIGITS).decode("ascii"), each


_DIGITS = bytes(ord("0") + min(state, 9) for state in range(256))


def _rates(mark: _Mark | None, now: _Mark) -> dict[str, float]:
    if mark is None or now.at <= mark.at:
        return {"tokens_per_second": 0.0, "positions_per_second": 0.0}
    seconds = now.at - mark.at
    return {
        "tokens_per_second": (now.generated - mark.generated) / seconds,
        "positions_per_second": (now.computed - mark.computed) / seconds,
    }
