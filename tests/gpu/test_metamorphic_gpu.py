"""The metamorphic table through the GPU runner, and its baseline against the CPU runner's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncllm import AsyncEngine
from tests.engine.execution.short_prefixes import share_short_prefixes
from tests.test_metamorphic import (
    BASE,
    baseline,
    model,
    one_by_one,
    requests,
    test_requests_of_the_table_exercise_what_they_claim,
    test_variant_equals_baseline,
)

__all__ = [
    "baseline",
    "model",
    "test_requests_of_the_table_exercise_what_they_claim",
    "test_variant_equals_baseline",
]


@pytest.fixture(scope="module", autouse=True)
def _short_prefixes_are_shared() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        share_short_prefixes(patch)
        yield


@pytest.fixture(scope="module")
def device() -> str:
    return "cuda"


async def test_cpu_equals_baseline(model: Path, baseline: list[Any]) -> None:
    async with AsyncEngine(str(model), **BASE, device="cpu") as engine:
        outcomes = await one_by_one(engine)
    for mine, theirs, request in zip(outcomes, baseline, requests(), strict=True):
        assert mine == theirs, request
