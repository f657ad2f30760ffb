from __future__ import annotations

from pathlib import Path

import pytest

from asyncllm.engine.execution import available_memory as module
from asyncllm.engine.execution.available_memory import ControlGroup, available_memory


def test_a_plausible_amount() -> None:
    assert 2**26 < available_memory() < 2**50


def test_a_control_group_with_less_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit, used, stat, meminfo = (tmp_path / name for name in ("max", "current", "stat", "meminfo"))
    meminfo.write_text("MemTotal: 9 kB\nMemAvailable:    5000 kB\n")
    monkeypatch.setattr(module, "_MEMINFO", meminfo)
    monkeypatch.setattr(module, "_CONTROL_GROUPS", (ControlGroup(limit, used, stat, "inactive_file"),))
    assert available_memory() == 5000 * 1024
    limit.write_text("max\n")
    used.write_text("1000\n")
    assert available_memory() == 5000 * 1024
    limit.write_text("3000\n")
    assert available_memory() == 2000
    used.write_text("4000\n")
    assert available_memory() == 0


@pytest.mark.parametrize("name", ["inactive_file", "total_inactive_file"])
def test_the_page_cache_of_a_control_group_counts_as_free(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a checkpoint is read, most of what a group uses is its pages, which the kernel gives back."""
    limit, used, stat = (tmp_path / name for name in ("max", "current", "stat"))
    monkeypatch.setattr(module, "_CONTROL_GROUPS", (ControlGroup(limit, used, stat, name),))
    limit.write_text("5000\n")
    used.write_text("4990\n")
    assert available_memory() == 10
    stat.write_text(f"anon 900\nother_{name} 1\n{name} 4000\nactive_file 90\n")
    assert available_memory() == 4010
    stat.write_text(f"{name} unreadable\n")
    assert available_memory() == 10


def test_where_control_groups_tell() -> None:
    """Version 1 counts the groups below in the totals only; version 2 everywhere."""
    v2, v1 = module._CONTROL_GROUPS
    assert (v2.statistics, v2.reclaimable) == (Path("/sys/fs/cgroup/memory.stat"), "inactive_file")
    assert (v1.statistics, v1.reclaimable) == (Path("/sys/fs/cgroup/memory/memory.stat"), "total_inactive_file")


def test_a_system_that_does_not_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MEMINFO", tmp_path / "missing")
    assert 2**26 < available_memory() < 2**50
