"""The GPU's benchmarks on a tiny model and the CPU: what they write, and when."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest

from asyncllm import AsyncEngine, EngineConfig
from asyncllm.testing.tiny_models import write_tiny_model
from asyncllm.workloads import Workload
from benchmarks import gpu, host, limits
from benchmarks.gpu_power import Power, PowerLog

LOADS = [
    Workload(name=name, requests=3, concurrency=2, prompt_tokens=(8, 8), output_tokens=(4, 4))
    for name in ("shared64", "single")
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


async def test_the_report_is_written_after_each_workload(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "SETTINGS", EngineConfig(device="cpu", load_format="dummy", num_blocks=100))
    written: list[int] = []
    write = gpu.Report.write

    def note(report: gpu.Report, path: Path) -> None:
        write(report, path)
        written.append(len(json.loads(path.read_text(encoding="utf-8"))["passes"]))

    monkeypatch.setattr(gpu.Report, "write", note)
    report = gpu.Report(command="", device="", versions={}, model="llama-3.1-8b")
    samples = await gpu.measure_model(folder, gpu.Order(LOADS, 2, ()), report, tmp_path / "report.json")
    assert written == [1, 2, 3, 4]
    assert len(samples) == 4
    assert [found.later_first_token is None for found in report.passes] == [False, False] * 2
    assert report.memory_bytes["weights"] > 0
    printed = capsys.readouterr().out
    assert printed.count("of 6,900 tok/s; TTFT p99") == printed.count("of 256 tok/s") == 2


def test_goals_are_compared_with_what_was_found() -> None:
    figures = gpu.Figures(
        workload="prefill64",
        seconds=2.0,
        prompt_tokens=41_000,
        cached_tokens=0,
        output_tokens=9,
        first_token=[0.0] * 9 + [0.7, 0.8],
        gap=[0.0] * 9 + [0.012, 0.02],
    )
    found = gpu.Pass(figures=figures, later_first_token=0.05, steps=1, thread={}, graphs_captured=0, kernels_compiled=0)
    goal = gpu.Goal(41_000, first_token=0.65, later_first_token=0.1, gap=0.015)
    assert goal.compared(found) == (
        "50% of 41,000 tok/s; TTFT p99 700.0 of 650 ms; later TTFT p99 50.0 of 100 ms; ITL p99 12.0 of 15 ms"
    )


def test_power_is_the_mean_of_what_was_read_meanwhile() -> None:
    log = PowerLog()
    for now, line in (
        (1.0, "1980, 100.5"),
        (2.0, "1500, 690.0"),
        (2.5, "[N/A], 3"),
        (3.0, "1600, 700.0"),
        (4.0, "9, 9"),
    ):
        log.add(now, line)
    assert log.mean(1.5, 3.5) == Power(clock=1550.0, watts=695.0)
    assert log.mean(5.0, 6.0) is None


def test_power_is_read_from_the_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nwhile true; do echo '1410, 650.25'; sleep 0.01; done\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    start = time.perf_counter()
    with PowerLog() as log:
        while log.mean(start, time.perf_counter()) is None:
            time.sleep(0.01)
    assert log.mean(start, time.perf_counter()) == Power(1410.0, 650.25)
    monkeypatch.setenv("PATH", "")
    with PowerLog() as nothing:
        assert nothing.mean(start, time.perf_counter()) is None


def test_limits_of_a_tiny_model(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "limits.json"
    arguments = [str(folder), "--device", "cpu", "--length", "1500", "--requests", "40", "--output", str(output)]
    assert limits.main(arguments) == 0
    found = json.loads(output.read_text(encoding="utf-8"))
    assert found["most_rows"] == 40
    assert [figures["workload"] for figures in found["figures"]] == ["40 at once", "1 × 1,500", "1 × 1,500"]
    assert found["figures"][2]["cached_tokens"] > 1400
    assert "equal tokens from the cache: 32 of 32" in capsys.readouterr().out


def test_hosts_beside_a_tiny_model(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "host.json"
    arguments = [str(folder), "--device", "cpu", "--rows", "3", "--tokens", "20", "--output", str(output)]
    assert host.main([*arguments, "--isolation", "thread"]) == 0
    found = json.loads(output.read_text(encoding="utf-8"))
    assert list(found["cases"]) == ["thread, calm", "thread, spinning", "thread, sleeping"]
    assert [[each["output_tokens"] for each in case["figures"]] for case in found["cases"].values()] == [[60]] * 3
    assert "thread, calm: 100% | decode3 | " in capsys.readouterr().out
    assert "spinning host" not in {thread.name for thread in threading.enumerate()}


async def test_no_step_is_waited_for_that_never_comes(folder: Path) -> None:
    async with AsyncEngine(folder, device="cpu", load_format="dummy", num_blocks=100) as engine:
        with pytest.raises(RuntimeError, match="no request runs"):
            await gpu.next_step(engine)
