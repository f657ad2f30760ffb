from __future__ import annotations

import sys
import time

import pytest

from asyncllm.engine.execution.runner import StepTicket
from asyncllm.engine.plan import StepPlan
from benchmarks.idle_model import IdleRunner
from benchmarks.lock_releases import PARTS, measure
from benchmarks.profile_report import lock_part

pytestmark = pytest.mark.alone


async def test_a_steady_step_only_waits() -> None:
    before = sys.getswitchinterval()
    found = await measure(16)
    assert set(found) == set(PARTS)
    assert 0.5 < found["wait"] < 2.5
    assert all(found[part] < 0.3 for part in PARTS if part != "wait")
    assert sys.getswitchinterval() == before


async def test_a_part_that_gives_the_lock_up_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = IdleRunner.launch

    def careless(runner: IdleRunner, plan: StepPlan) -> StepTicket:
        time.sleep(0)
        time.sleep(0)
        return launch(runner, plan)

    monkeypatch.setattr(IdleRunner, "launch", careless)
    found = await measure(16)
    assert found["launch"] > 1.2
    assert found["apply"] < 0.3


def test_report() -> None:
    lines = lock_part({"schedule": 0.0, "launch": 1.0, "wait": 0.96, "apply": 0.04, "deliver": 0.0})
    assert "| measured beside a spinning thread | 0.0 | 1.0 | 1.0 | 0.0 | 0.0 | 2.0 |" in lines
    assert lock_part({}) == []
