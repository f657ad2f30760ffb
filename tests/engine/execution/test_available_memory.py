from __future__ import annotations

from pathlib import Path

import pytest

from asyncllm.engine.execution import available_memory as module
from asyncllm.engine.execution.available_memory import available_memory


def test_a_plausible_amount() -> None:
    assert 2**26 < available_memory() < 2**50


def test_a_control_group_with_less_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit, used, meminfo = tmp_path / "max", tmp_path / "current", tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9 kB\nMemAvailable:    5000 kB\n")
    monkeypatch.setattr(module, "_MEMINFO", meminfo)
    monkeypatch.setattr(module, "_CGROUP_LIMITS", ((limit, used),))
    assert available_memory() == 5000 * 1024
    limit.write_text("max\n")
    used.write_text("1000\n")
    assert available_memory() == 5000 * 1024
    limit.write_text("3000\n")
    assert available_memory() == 2000
    used.write_text("4000\n")
    assert available_memory() == 0


def test_a_system_that_does_not_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MEMINFO", tmp_path / "missing")
    assert 2**26 < available_memory() < 2**50
