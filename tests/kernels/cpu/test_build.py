from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from asyncllm.kernels.cpu import build
from asyncllm.kernels.cpu.build import SOURCE, BuildError, Library, load_library

ROOT = Path(build.__file__).parents[3]


def test_compiled_once(compiled: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_library(tmp_path / "new" / "folder")
    (binary,) = (tmp_path / "new" / "folder").iterdir()

    def fail(*args: object) -> None:
        raise AssertionError("it is compiled already")

    monkeypatch.setattr(build, "_compile", fail)
    assert load_library(tmp_path / "new" / "folder").tiles == compiled.tiles
    monkeypatch.setattr(build, "_FLAGS", (*build._FLAGS, "-DANOTHER"))
    with pytest.raises(AssertionError, match="compiled already"):
        load_library(tmp_path / "new" / "folder")
    assert [binary] == list((tmp_path / "new" / "folder").iterdir())


def test_several_at_once(compiled: Library, tmp_path: Path) -> None:
    with ThreadPoolExecutor(3) as pool:
        assert [each.tiles for each in pool.map(load_library, [tmp_path] * 3)] == [compiled.tiles] * 3
    assert len(list(tmp_path.iterdir())) == 1


def test_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_compilers", lambda: iter(()))
    with pytest.raises(BuildError, match=r"no C\+\+ compiler: install g\+\+"):
        load_library(tmp_path)


def test_a_compiler_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "broken"
    script.write_text("#!/bin/sh\necho 'x.h: error: no such thing' >&2\nexit 3\n", encoding="utf-8")
    script.chmod(0o755)
    with pytest.raises(BuildError, match=r"broken: x\.h: error: no such thing"):
        load_library(tmp_path / "kernels", str(script))
    assert list((tmp_path / "kernels").iterdir()) == []
    with pytest.raises(BuildError, match="missing"):
        load_library(tmp_path / "kernels", str(tmp_path / "missing"))


def test_no_second_team_of_threads(compiled: Library, tmp_path: Path) -> None:
    """The binary names no OpenMP runtime: it uses the one that torch has loaded, in a new process too."""
    code = (
        "import sys; from pathlib import Path; import torch; from asyncllm.kernels.cpu.build import load_library\n"
        "load_library(Path(sys.argv[1]))\n"
        "maps = {line.split()[-1] for line in open('/proc/self/maps') if 'omp' in line.rsplit('/')[-1]}\n"
        "assert len([path for path in maps if 'gomp' in path or 'iomp' in path]) == 1, maps"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, env=environment)


def test_sources_are_in_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "kernels/cpu/source/*" in project["tool"]["setuptools"]["package-data"]["asyncllm"]
    assert {path.suffix for path in SOURCE.iterdir()} == {".cpp", ".h"}
