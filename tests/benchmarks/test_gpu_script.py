"""The stages of `scripts/gpu.sh`, with an interpreter that only says what it is to do."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = """#!/bin/sh
[ "$1" = - ] && { echo "a GPU"; exit 0; }
echo "python $*"
case "$*" in
*benchmarks.sampling*) sleep 60 & wait ;;
*benchmarks.limits*) exit 3 ;;
esac
"""


def gpu_script(folder: Path, *stages: str, **variables: str) -> subprocess.CompletedProcess[str]:
    python = folder / "python"
    python.write_text(PYTHON, encoding="ascii")
    python.chmod(0o755)
    command = ["sh", str(ROOT / "scripts" / "gpu.sh"), str(folder / "out"), *stages]
    environment = {**os.environ, "PYTHON": str(python), **variables}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_every_stage_of_the_usage_runs_what_exists(tmp_path: Path) -> None:
    ran = gpu_script(tmp_path, LIMIT="1", SMOLLM2="/a/folder")
    summary = (tmp_path / "out" / "summary.txt").read_text(encoding="utf-8").splitlines()
    usage = subprocess.run(["sh", ROOT / "scripts" / "gpu.sh"], capture_output=True, text=True, check=False).stderr
    assert all(line.split(":")[0] in usage for line in summary)
    assert len(summary) == 11
    said = (tmp_path / "out" / "goals-8b.txt").read_text(encoding="utf-8")
    assert said.startswith("python -m benchmarks.gpu llama-3.1-8b --passes 1 --check --profile --output ")
    assert "/a/folder" in (tmp_path / "out" / "http.txt").read_text(encoding="utf-8")
    for line in ran.stdout.splitlines():
        if line.startswith("python -m benchmarks."):
            module = line.split()[2].split(".")[1]
            assert (ROOT / "benchmarks" / f"{module}.py").is_file(), module
    assert ran.returncode == 1


def test_a_stage_that_fails_or_hangs_does_not_stop_the_next(tmp_path: Path) -> None:
    began = time.monotonic()
    ran = gpu_script(tmp_path, "limits", "sampling", "goals-qwen", LIMIT="2")
    assert time.monotonic() - began < 20
    words = [
        line.split(": ")[1].split(",")[0]
        for line in ran.stdout.splitlines()
        if line.startswith(("limits:", "sampling:", "goals-qwen:"))
    ]
    assert words == ["failed with 3", "cut short after 2 s", "passed"]
    assert ran.returncode == 1
    assert "python -m benchmarks.sampling" in (tmp_path / "out" / "sampling.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("stages", [[], ["tests"]])
def test_without_a_gpu_nothing_runs(tmp_path: Path, stages: list[str]) -> None:
    python = tmp_path / "no-gpu"
    python.write_text("#!/bin/sh\necho no GPU >&2; exit 1\n", encoding="ascii")
    python.chmod(0o755)
    ran = gpu_script(tmp_path, *stages, PYTHON=str(python))
    assert ran.returncode == 1
    assert not list((tmp_path / "out").iterdir())


def test_an_unknown_stage_is_named(tmp_path: Path) -> None:
    ran = gpu_script(tmp_path, "tests", "goals")
    assert ran.returncode == 2
    assert "no stage goals" in ran.stderr
