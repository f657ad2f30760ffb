from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from asyncllm.engine.execution import head_start
from asyncllm.engine.execution.compile_processes import CompileProcesses
from asyncllm.engine.execution.head_start import HeadStart


@dataclass
class Driver:
    """In place of the GPU's."""

    failure: Exception | None = None
    calls: list[tuple[str, int]] = field(default_factory=list)

    def make_context(self, device: int) -> None:
        if self.failure is not None:
            raise self.failure
        self.calls.append(("made", device))

    def release_context(self, device: int) -> None:
        self.calls.append(("released", device))


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Driver:
    found = Driver()
    monkeypatch.setattr(head_start, "DRIVERS", (str(tmp_path),))
    monkeypatch.setattr(head_start, "cuda_driver", lambda: found)
    monkeypatch.setattr(CompileProcesses, "start", lambda processes: found.calls.append(("processes", 0)))
    return found


def test_the_context_is_lent(driver: Driver) -> None:
    with HeadStart() as start:
        start.begin("cuda:1")
        start.wait()
        assert driver.calls == [("processes", 0), ("made", 1)]
    assert driver.calls[2:] == [("released", 1)]
    start.close()
    assert len(driver.calls) == 3


def test_what_fails_is_left_to_others(driver: Driver) -> None:
    driver.failure = OSError("no such driver")
    with HeadStart() as start:
        start.begin("auto")
    assert driver.calls == [("processes", 0)]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_without_a_gpu_there_is_none(
    device: str, driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device != "cpu":
        monkeypatch.setattr(head_start, "DRIVERS", (str(tmp_path / "nothing"),))
    with HeadStart() as start:
        start.begin(device)
        start.wait()
        assert start.processes.compile(b"") is None
    assert driver.calls == []


SCRIPT = """
import sys
from asyncllm.engine.execution import head_start
head_start.DRIVERS = ("/",)
with head_start.HeadStart() as start:
    start.begin("cuda")
    print("torch" in sys.modules, start.processes._process is None)
"""


def test_it_loads_no_torch() -> None:
    result = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["False", "False"]
