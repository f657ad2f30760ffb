from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import time
import tomllib
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from asyncllm.kernels.cpu import build
from asyncllm.kernels.cpu.build import SOURCE, BuildError, BuildInterrupted, Library, load_library

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


def counted(quick: str, folder: Path, seconds: float = 0.3) -> tuple[str, Path]:
    """A compiler that takes some time, and a file with a line for each that has begun."""
    begun = folder / "begun"
    return write_compiler(folder / "slow", f"echo x >> '{begun}'; sleep {seconds}; exec {quick} \"$@\""), begun


LOAD = (
    "import sys; from pathlib import Path; import torch; from asyncllm.kernels.cpu.build import load_library\n"
    "load_library(Path(sys.argv[1]), sys.argv[2])"
)


def process_that_loads(folder: Path, compiler: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen([sys.executable, "-c", LOAD, str(folder), compiler], env=environment)


def wait_for(reached: Callable[[], bool]) -> None:
    for _ in range(1500):
        if reached():
            return
        time.sleep(0.02)
    raise AssertionError("it never came about")


def test_one_compiles_and_others_wait(quick: str, tmp_path: Path) -> None:
    slow, begun = counted(quick, tmp_path)
    folder = tmp_path / "kernels"
    folder.mkdir()
    process = process_that_loads(folder, slow)
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda _: load_library(folder, slow), range(3)))
    assert process.wait(60) == 0
    assert begun.read_text().split() == ["x"]
    assert [path.suffix for path in folder.iterdir()] == [".so"]


def test_one_that_is_killed_keeps_nobody_waiting(quick: str, tmp_path: Path) -> None:
    folder, hangs = tmp_path / "kernels", tmp_path / "hangs"
    hangs.touch()
    waits = f"if [ -e '{hangs}' ]; then echo $$ > '{tmp_path}/compiler.new'; mv '{tmp_path}/compiler.new' '{hangs}.id';"
    compiler = write_compiler(tmp_path / "waits", f'{waits} exec sleep 1000; fi; exec {quick} "$@"')
    process = process_that_loads(folder, compiler)
    try:
        wait_for(Path(f"{hangs}.id").exists)
        hangs.unlink()
        process.kill()
        process.wait()
        load_library(folder, compiler)  # though the compiler lives on, and the lock's file lies there
    finally:
        os.kill(int(Path(f"{hangs}.id").read_text()), signal.SIGKILL)
    assert len([path for path in folder.iterdir() if path.suffix == ".so"]) == 1
    assert not [path for path in folder.iterdir() if path.suffix == ".lock"]


def test_what_holds_a_compilers_pipe_keeps_nobody_waiting(quick: str, tmp_path: Path) -> None:
    """A fork of this program holds it too, where it is made in the moment in which a compiler begins."""
    left = tmp_path / "left"
    compiler = write_compiler(tmp_path / "leaves", f'sleep 100 & echo $! > "{left}"; exec {quick} "$@"')
    start = time.monotonic()
    try:
        load_library(tmp_path / "kernels", compiler)
        assert time.monotonic() - start < 50
    finally:
        os.kill(int(left.read_text()), signal.SIGKILL)


def test_a_fork_of_one_keeps_nobody_waiting(quick: str, tmp_path: Path) -> None:
    folder, forked = tmp_path / "kernels", tmp_path / "forked"
    compiler, begun = counted(quick, tmp_path, seconds=0.5)
    code = f"""
import os, sys, threading, time
from pathlib import Path
from asyncllm.kernels.cpu.build import load_library
compiling = threading.Thread(target=load_library, args=(Path(sys.argv[1]), sys.argv[2]))
compiling.start()
while not os.path.exists({str(begun)!r}):
    time.sleep(0.01)
if os.fork() == 0:
    Path({str(forked)!r}).write_text(str(os.getpid()))
    time.sleep(60)
    os._exit(0)
compiling.join()
"""
    process = subprocess.Popen([sys.executable, "-c", code, str(folder), compiler], cwd=ROOT)
    try:
        wait_for(forked.exists)
        start = time.monotonic()
        load_library(folder, compiler)
        assert time.monotonic() - start < 20
        assert begun.read_text(encoding="utf-8").count("x") == 1
        assert process.wait(20) == 0
    finally:
        wait_for(lambda: forked.exists() and forked.read_text(encoding="utf-8") != "")
        os.kill(int(forked.read_text(encoding="utf-8")), signal.SIGKILL)


def test_a_lock_that_cannot_be_taken_away_does_no_harm(
    quick: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Path, missing_ok: bool = False) -> None:
        raise PermissionError(errno.EPERM, "not permitted")

    monkeypatch.setattr(Path, "unlink", fail)
    load_library(tmp_path / "kernels", quick)
    load_library(tmp_path / "kernels", quick)


def test_one_that_takes_too_long_is_waited_for_no_longer(
    quick: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "kernels"
    folder.mkdir()
    lock = folder / f"kernels-{build._key(build._words(quick))}.so.lock"
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(BuildInterrupted):
            load_library(folder, quick, lambda: False)
        monkeypatch.setattr(build, "_SECONDS", 0.3)
        load_library(folder, quick)
        assert lock.exists()  # it is the other's


def test_where_files_cannot_be_locked(quick: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", fail)
    load_library(tmp_path / "kernels", quick)
    assert len(list((tmp_path / "kernels").iterdir())) == 1


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


def write_compiler(path: Path, script: str) -> str:
    path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    path.chmod(0o755)
    return f"'{path}'"


@pytest.fixture(scope="module")
def quick(compiled: Library, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A compiler that has done its work already."""
    folder = tmp_path_factory.mktemp("quick")
    load_library(folder)
    (binary,) = folder.iterdir()
    return write_compiler(folder / "compiler", f"for out; do :; done\ncp '{binary}' \"$out\"")


def test_a_compiler_that_hangs_ends_with_what_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_SECONDS", 0.5)
    hangs = write_compiler(tmp_path / "it hangs", f"sleep 1000 & echo $! > '{tmp_path}/child'\nwait")
    with pytest.raises(BuildError, match=r"it hangs: .*timed out after 0\.5 seconds"):
        load_library(tmp_path / "kernels", hangs)
    status = Path(f"/proc/{(tmp_path / 'child').read_text().strip()}/stat")
    for _ in range(100):  # whoever takes orphans in may be slow to
        if not status.exists() or status.read_text().rsplit(")")[1].split()[0] == "Z":
            return
        time.sleep(0.02)
    raise AssertionError("its child goes on")


def test_a_compiler_ends_once_nobody_wants_what_it_makes(tmp_path: Path) -> None:
    hangs = write_compiler(tmp_path / "hangs", f"touch '{tmp_path}/begun'; exec sleep 1000")
    with pytest.raises(BuildInterrupted):
        load_library(tmp_path / "kernels", hangs, lambda: not (tmp_path / "begun").exists())
    assert list((tmp_path / "kernels").iterdir()) == []


def test_what_a_killed_process_has_left_is_cleared_away(quick: str, tmp_path: Path) -> None:
    """But not what may still be written to, nor what is not ours."""
    for name in ("compiling-old", "compiling-new", "mine"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "part.so").write_bytes(b"half")
    long_ago = time.time() - 4000
    for name in ("compiling-old", "mine"):
        os.utime(tmp_path / name, (long_ago, long_ago))
    load_library(tmp_path, quick)
    names = {path.name for path in tmp_path.iterdir() if path.suffix != ".so"}
    assert names == {"compiling-new", "mine"}


def test_a_program_that_ends_waits_for_no_compiler(tmp_path: Path) -> None:
    hangs = write_compiler(tmp_path / "hangs", f"touch '{tmp_path}/begun'; exec sleep 1000")
    code = (
        "import sys, threading, time; from pathlib import Path; from asyncllm.kernels.cpu.build import load_library\n"
        "folder = Path(sys.argv[1])\n"
        "threading.Thread(target=load_library, args=(folder / 'kernels', sys.argv[2])).start()\n"
        "while not (folder / 'begun').exists(): time.sleep(0.01)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, str(tmp_path), hangs]
    run = subprocess.run(command, check=True, env=environment, timeout=60, capture_output=True, text=True)
    assert "timed out" in run.stderr  # the thread's own end
    assert list((tmp_path / "kernels").iterdir()) == []


def test_a_compiler_that_talks_for_ever_takes_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_SECONDS", 0.5)
    talks = write_compiler(tmp_path / "talks", "yes error: $(head -c 9999 /dev/zero | tr '\\0' x) >&2")
    tracemalloc.start()
    try:
        with pytest.raises(BuildError, match="timed out"):
            load_library(tmp_path / "kernels", talks)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    talks = write_compiler(tmp_path / "ends", "echo error: $(head -c 9999 /dev/zero | tr '\\0' x) >&2; exit 1")
    with pytest.raises(BuildError) as raised:
        load_library(tmp_path / "kernels", talks)
    assert len(str(raised.value)) < 600


def test_a_compiler_gets_no_input(quick: str, tmp_path: Path) -> None:
    asks = write_compiler(tmp_path / "asks", f'read line && exit 3; exec {quick} "$@"')
    code = "import sys; from pathlib import Path; import torch; from asyncllm.kernels.cpu.build import load_library\n"
    command = [sys.executable, "-c", f"{code}load_library(Path(sys.argv[1]), sys.argv[2])", str(tmp_path / "k"), asks]
    subprocess.run(command, check=True, input=b"a line\n", env={**os.environ, "PYTHONPATH": str(ROOT)})


@pytest.mark.parametrize("name", [" ", "g++ 'a"])
def test_a_name_that_is_no_command(name: str, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="is no command"):
        load_library(tmp_path, name)


@pytest.mark.parametrize("made", ["echo nonsense", "true", "echo 'int x;' | c++ -x c++ -shared - -o /dev/stdout"])
def test_a_compiler_that_makes_something_else(compiled: Library, made: str, tmp_path: Path) -> None:
    wrong = write_compiler(tmp_path / "wrong", f'for out; do :; done\n{made} > "$out"')
    with pytest.raises(BuildError, match="wrong: "):
        load_library(tmp_path / "kernels", wrong)
    assert list((tmp_path / "kernels").iterdir()) == []


@pytest.mark.parametrize("kept", [b"", b"nonsense"])
def test_what_was_kept_and_cannot_be_loaded_is_compiled_anew(kept: bytes, quick: str, tmp_path: Path) -> None:
    load_library(tmp_path, quick)
    (binary,) = tmp_path.iterdir()
    whole = binary.read_bytes()
    binary.unlink()
    binary.write_bytes(kept)
    load_library(tmp_path, quick)
    assert binary.read_bytes() == whole


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o1777])
def test_nothing_is_loaded_that_others_may_have_planted(
    mode: int, quick: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    load_library(tmp_path, quick)
    tmp_path.chmod(mode)
    loaded: list[Path] = []
    load = build._load

    def noted(binary: Path) -> Library:
        loaded.append(binary)
        return load(binary)

    monkeypatch.setattr(build, "_load", noted)
    load_library(tmp_path, quick)
    (one,) = loaded
    assert not one.is_relative_to(tmp_path)
    assert "others can do so" in caplog.text


def test_nothing_is_loaded_from_the_folder_of_another_user(
    compiled: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = tmp_path.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    assert build._is_ours(tmp_path) == (owner == 0)
    if owner == 0:
        os.chown(tmp_path, 12345, -1)
        assert not build._is_ours(tmp_path)


def test_without_a_place_to_keep_them(compiled: Library, quick: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (None, tmp_path / "file" / "folder", Path("/proc/kernels")):
        assert load_library(folder, quick).tiles == compiled.tiles


def test_a_folder_named_from_where_the_program_is(quick: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    load_library(Path("."), quick)
    monkeypatch.setattr(build, "_compile", None)
    load_library(Path("."), quick)


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
