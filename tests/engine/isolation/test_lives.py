"""The child's life is its host's: whatever becomes of the host, no child is left, and none is disturbed before."""

from __future__ import annotations

import os
import signal
import subprocess
import textwrap
import time
from pathlib import Path

import pytest

from asyncllm.testing.tiny_models import write_tiny_model
from tests.engine.programs import start_program

HEAD = """
    from tests.engine.isolation.models import SLOW, DangerousModel, child_of
    engine = AsyncEngine(DangerousModel(), isolation="process")
"""


def start(source: str) -> subprocess.Popen[str]:
    """A program with an engine that is not started yet."""
    return start_program(textwrap.dedent(HEAD) + textwrap.dedent(source))


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def wait_until_gone(pid: int, seconds: float = 3.0) -> None:
    end = time.monotonic() + seconds
    while is_running(pid):
        assert time.monotonic() < end, f"{pid} is still there"
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    """Not a zombie that the init of a container leaves behind."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize(
    "prompt",
    [pytest.param("[5]", id="between steps", marks=pytest.mark.full), pytest.param("[SLOW]", id="in mid-step")],
)
def test_a_host_that_is_killed_takes_the_child_along(prompt: str) -> None:
    process = start(f"""
        async def main():
            await engine.start()
            reading = asyncio.create_task(engine.generate({prompt}, LONG))
            await asyncio.sleep(0.3)
            say(child_of(engine))
            await reading
        asyncio.run(main())
    """)
    child = int(first_line(process))
    assert is_running(child)
    process.kill()
    process.communicate()
    wait_until_gone(child)


@pytest.mark.full
def test_a_fork_of_the_host_does_not_keep_the_child() -> None:
    process = start("""
        import warnings
        warnings.simplefilter("ignore", DeprecationWarning)  # of os.fork in a process with threads
        async def main():
            await engine.start()
            pid = child_of(engine)
            if os.fork() == 0:
                os.execvp("sleep", ["sleep", "30"])  # holds what the host held, but for what closes at exec
            if (fork := os.fork()) == 0:
                time.sleep(30)
                os._exit(0)
            say(pid, fork)
            await asyncio.sleep(30)
        asyncio.run(main())
    """)
    child, fork = map(int, first_line(process).split())
    process.kill()
    wait_until_gone(child)
    os.kill(fork, signal.SIGKILL)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def test_ctrl_c_in_a_terminal_is_the_hosts() -> None:
    process = start("""
        async def main():
            async with engine:
                say(child_of(engine))
                stream = engine.stream([5], LONG)
                try:
                    async for delta in stream:
                        pass
                except asyncio.CancelledError:
                    done = await engine.generate([6], SamplingParams(temperature=0, max_tokens=50))
                    say("served", len(done.token_ids))
                    raise
        try:
            asyncio.run(main())
        except KeyboardInterrupt:
            say("interrupted")
    """)
    child = int(first_line(process))
    time.sleep(0.2)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: all of them
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (0, "served 50\ninterrupted\n", "")
    wait_until_gone(child)


@pytest.mark.full
def test_ctrl_c_while_the_child_starts() -> None:
    process = start("""
        async def main():
            say("starting")
            async with engine:
                await asyncio.sleep(60)
        try:
            asyncio.run(main())
        except KeyboardInterrupt:
            say("interrupted")
    """)
    assert first_line(process) == "starting"
    time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (0, "interrupted\n", "")


@pytest.mark.full
def test_a_supervisor_that_ends_both_lets_the_host_end_first() -> None:
    process = start("""
        async def main():
            loop, stop = asyncio.get_running_loop(), asyncio.Event()
            loop.add_signal_handler(signal.SIGTERM, stop.set)
            async with engine:
                say(child_of(engine))
                reading = asyncio.create_task(engine.generate([5], SamplingParams(temperature=0, max_tokens=100)))
                await stop.wait()
                say("drained", len((await reading).token_ids))
        asyncio.run(main())
    """)
    child = int(first_line(process))
    time.sleep(0.1)
    os.killpg(process.pid, signal.SIGTERM)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (0, "drained 100\n", "")
    wait_until_gone(child)


LEAVE = {
    "everything is open": ("tasks.append(asyncio.create_task(streams[2].result())); await asyncio.sleep(0.1)", 0),
    "an exception": ("raise KeyError('of the application')", 1),
    "sys.exit": ("sys.exit(3)", 3),
    "while it loads": ("other = AsyncEngine(ShadowModel(), isolation='process'); tasks.append("
                       "asyncio.create_task(other.start())); await asyncio.sleep(0.01)", 0),
}  # fmt: skip


def test_leaving_without_closing() -> None:
    source = """
        streams = [engine.stream([n], LONG) for n in range(3)]
        tasks = []
        async def main():
            await engine.start()
            say(child_of(engine))
            await anext(streams[0])
            await streams[1].start()
            {leave}
        asyncio.run(main())
    """
    processes = {how: start(textwrap.dedent(source).format(leave=code)) for how, (code, _) in LEAVE.items()}
    for how, process in processes.items():
        child = int(first_line(process))
        _, err = process.communicate(timeout=60)
        assert process.returncode == LEAVE[how][1], (how, err)
        assert ("Traceback" in err) == (how == "an exception"), (how, err)
        wait_until_gone(child)


def test_use_after_fork() -> None:
    process = start("""
        warnings.simplefilter("ignore", DeprecationWarning)  # of os.fork in a process with threads

        async def in_fork():
            say("not refused", await uses_not_refused(engine, stream))
            other = AsyncEngine(ShadowModel(), isolation="process")  # and never closed
            await other.start()
            say("fork", len((await other.generate([5], SamplingParams(max_tokens=7))).token_ids))

        stream = asyncio.run(begin(engine.stream([5], LONG), engine))
        pid = os.fork()
        if pid == 0:
            asyncio.run(in_fork())
            del stream
            gc.collect()
            sys.exit(5)
        _, status = os.waitpid(pid, 0)
        say("status", os.waitstatus_to_exitcode(status))
        say("host", len(asyncio.run(engine.generate([6], SamplingParams(max_tokens=7))).token_ids))
    """)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "not refused []\nfork 7\nstatus 5\nhost 7\n"), err
    assert "Traceback" not in err, err
    assert "Warning" not in err, err


@pytest.mark.full
def test_a_loader_of_the_script_is_refused_by_name() -> None:
    process = start("""
        class Mine:
            async def __call__(self, config, workers): ...
        try:
            asyncio.run(AsyncEngine(Mine(), isolation="process").start())
        except ValueError as error:
            say(type(error).__name__, error)
    """)
    out, err = process.communicate(timeout=60)
    assert out.startswith('ConfigError isolation="process" sends the model loader'), err
    assert "Mine is defined in the script that was started (__main__)" in out


def test_what_the_child_prints_goes_to_standard_error() -> None:
    process = start("""
        from tests.engine.isolation.models import CountedModel, prints
        from pathlib import Path
        async def main():
            async with AsyncEngine(CountedModel(Path(os.devnull), prints), isolation="process"):
                say("up")
        asyncio.run(main())
    """)
    out, err = process.communicate(timeout=60)
    assert (out, err) == ("up\n", "printed by the model\n")


def test_a_model_of_ours_ends_without_a_word(tmp_path: Path) -> None:
    """An extension module prints what it thinks is leaked."""
    process = start_program(f"""
        import asyncio
        from asyncllm import AsyncEngine
        async def main():
            async with AsyncEngine({str(write_tiny_model(tmp_path))!r}, isolation="process"):
                pass
        asyncio.run(main())
    """)
    assert process.communicate(timeout=60) == ("", "")
    assert process.returncode == 0
