from __future__ import annotations

import json
from typing import Any

import pytest

from asyncllm import AsyncEngine, SamplingParams
from asyncllm.api import engine_events as module
from asyncllm.api.engine_events import block_cells, engine_events
from asyncllm.api.service_metrics import ServiceMetrics
from asyncllm.testing.shadow_engine import ShadowModel


def read(event: bytes) -> dict[str, Any]:
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    found = json.loads(event[6:])
    assert isinstance(found, dict)
    return found


async def test_snapshots_of_a_busy_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_REQUESTS", 2)
    async with AsyncEngine(ShadowModel(latency=0.002), num_blocks=64, block_size=8, max_num_seqs=2) as engine:
        events = engine_events(engine, ServiceMetrics("m"), interval=0.05)
        idle = read(await anext(events))
        assert (idle["running"], idle["waiting"], idle["requests"], idle["tokens_per_second"]) == (0, 0, [], 0)
        assert idle["blocks"] == {
            "total": 64, "used": 0, "cached": 0, "free": 64, "shared": 0, "cells": "0" * 64, "per_cell": 1,
        }  # fmt: skip
        prompt = list(range(3, 36))
        await engine.generate(prompt, SamplingParams(max_tokens=1))  # so that the prefix is there
        streams = [engine.stream([*prompt, 40 + i], SamplingParams(max_tokens=150, ignore_eos=True)) for i in range(3)]
        try:
            for stream in streams:
                await stream.start()
            await anext(streams[1])
            busy = read(await anext(events))
            assert (busy["running"], busy["waiting"]) == (2, 1)
            assert busy["blocks"]["shared"] == 4
            assert busy["blocks"]["cells"].count("3") == 4
            counts = [busy["blocks"]["cells"].count(digit) for digit in "01"]
            assert counts == [busy["blocks"]["free"], busy["blocks"]["cached"]]
            assert [request["stage"] for request in busy["requests"]] == ["running", "running"]
            assert busy["requests"][0]["prompt_tokens"] == 34
            assert busy["requests"][0]["generated_tokens"] >= 0
            assert busy["tokens_per_second"] > 0
        finally:
            for stream in streams:
                await stream.aclose()
        assert read(await anext(events))["blocks"]["used"] == 0
        await engine.aclose()
        assert (await anext(events)).startswith(b"event: end\n")
        with pytest.raises(StopAsyncIteration):
            await anext(events)


def test_many_blocks_share_a_cell() -> None:
    assert block_cells(bytes([0, 1, 2, 3]), 4) == ("0123", 1)
    assert block_cells(bytes([0, 1, 2, 3, 0]), 4) == ("130", 2)
    assert block_cells(b"", 4) == ("", 1)
    cells, each = block_cells(bytes(100_000), 4096)
    assert len(cells) * each >= 100_000
    assert len(cells) <= 4096
