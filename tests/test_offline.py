from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import pytest
from nbclient import NotebookClient

from asyncllm import LLM, EngineConfig, SamplingParams
from asyncllm.errors import (
    ConfigError,
    EngineClosed,
    InsufficientMemoryError,
    InvalidParamsError,
    InvalidPromptError,
)
from asyncllm.testing.shadow_engine import ShadowModel

GREEDY = SamplingParams(temperature=0, max_tokens=10)
ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def _no_thread_left() -> Any:
    before = set(threading.enumerate())
    yield
    end = time.monotonic() + 5
    while left := [t.name for t in threading.enumerate() if t not in before and t.name != "asyncllm-exit"]:
        assert time.monotonic() < end, left
        time.sleep(0.01)


def test_completions_come_in_order() -> None:
    model = ShadowModel()
    with LLM(model, max_num_seqs=4) as llm:
        lengths = [30, 1, 12, 5, 0, 20]
        params = [SamplingParams(temperature=0, max_tokens=n) for n in lengths]
        completions = llm.generate([[5, n] for n in range(6)], params, progress=False)
        assert [list(c.token_ids) for c in completions] == [model.expected([5, n], lengths[n]) for n in range(6)]
        again = llm.generate([[9]], GREEDY, progress=False)  # the model stays
        assert list(again[0].token_ids) == model.expected([9], 10)


@pytest.mark.parametrize("prompt", [[5, 6], np.array([5, 6]), [np.int64(5), np.int64(6)], [[5, 6]], [np.array([5, 6])]])
def test_one_prompt_or_a_list(prompt: Any) -> None:
    with LLM(ShadowModel()) as llm:
        (completion,) = llm.generate(prompt, GREEDY, progress=False)
        assert completion.prompt_token_ids == (5, 6)


def test_no_prompts() -> None:
    with LLM(ShadowModel()) as llm:
        assert llm.generate([], GREEDY, progress=False) == []
        assert llm.generate([]) == []


def test_bad_calls() -> None:
    with pytest.raises(ConfigError):
        LLM(ShadowModel(), run_ahed=1)
    with LLM(ShadowModel(), config=EngineConfig(num_blocks=8)) as llm:
        with pytest.raises(InvalidParamsError, match="2 prompts and 1 params"):
            llm.generate([[5], [6]], [GREEDY])
        prompts: Any = 5
        with pytest.raises(InvalidPromptError):
            llm.generate(prompts)
        with pytest.raises(InvalidPromptError):
            llm.generate([[5], [-1], [6]], GREEDY, progress=False)
        assert len(llm.generate([[5]], GREEDY, progress=False)) == 1
    with pytest.raises(EngineClosed):
        llm.generate([[5]], GREEDY, progress=False)
    llm.close()


def test_a_failed_load_is_raised() -> None:
    async def load(*args: object) -> Any:
        raise InsufficientMemoryError("too large")

    with pytest.raises(InsufficientMemoryError):
        LLM(load).generate([[5]])


def test_the_progress_bar(capfd: pytest.CaptureFixture[str]) -> None:
    with LLM(ShadowModel(latency=0.02)) as llm:
        llm.generate([[5, n] for n in range(4)], GREEDY)
        shown = capfd.readouterr()
        assert shown.out == ""
        assert re.search(r"\[#{30}\] 4/4  [\d,]+ tokens/s \n$", shown.err)
        llm.generate([[5]], GREEDY, progress=False)
        assert capfd.readouterr().err == ""


def test_a_dropped_llm_gives_its_model_back() -> None:
    model = ShadowModel()
    llm = LLM(model)
    llm.generate([[5]], GREEDY, progress=False)
    assert model.runner is not None
    del llm
    end = time.monotonic() + 5
    while not model.runner.closed:
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.blocks_loop
async def test_inside_a_running_loop() -> None:
    model = ShadowModel()
    for _ in range(2):
        with LLM(model) as llm:
            assert list(llm.generate([5], GREEDY, progress=False)[0].token_ids) == model.expected([5], 10)
    await asyncio.sleep(0)


def test_several_threads() -> None:
    model = ShadowModel()
    results: dict[int, list[int]] = {}
    with LLM(model) as llm:

        def call(n: int) -> None:
            results[n] = list(llm.generate([5, n], GREEDY, progress=False)[0].token_ids)

        threads = [threading.Thread(target=call, args=(n,)) for n in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert results == {n: model.expected([5, n], 10) for n in range(5)}


def test_ctrl_c_aborts_the_requests() -> None:
    """In this process: the main thread is where pytest runs, and Python's own SIGINT handler is in place."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        model = ShadowModel(latency=0.01)
        with LLM(model) as llm:
            for _ in range(2):
                timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
                timer.start()
                with pytest.raises(KeyboardInterrupt):
                    llm.generate([[5, n] for n in range(5)], SamplingParams(max_tokens=400), progress=False)
                timer.join()
                statistics = llm._engine.statistics()
                assert (statistics.blocks_used, statistics.requests_running) == (0, 0)
            assert list(llm.generate([5], GREEDY, progress=False)[0].token_ids) == model.expected([5], 10)
            assert llm._engine.statistics().requests_aborted == 10
    finally:
        signal.signal(signal.SIGINT, previous)


def test_ctrl_c_while_it_loads() -> None:
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    shadow, attempts = ShadowModel(), []

    async def load(config: EngineConfig, workers: Any) -> Any:
        attempts.append(1)
        if len(attempts) == 1:
            await asyncio.sleep(1.0)
        return await shadow(config, workers)

    try:
        llm = LLM(load)
        timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            llm.generate([5], GREEDY)
        timer.join()
        assert list(llm.generate([5], GREEDY, progress=False)[0].token_ids) == shadow.expected([5], 10)
        llm.close()
    finally:
        signal.signal(signal.SIGINT, previous)


SCRIPT = """
    from asyncllm import LLM, SamplingParams
    import signal
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that put the tests behind has it ignored
    from asyncllm.testing.shadow_engine import ShadowModel
    llm = LLM(ShadowModel(latency={latency}))
    {use}
"""


def start_script(use: str, latency: float = 0.0) -> subprocess.Popen[str]:
    source = textwrap.dedent(SCRIPT).format(use=use, latency=latency)
    return subprocess.Popen(
        [sys.executable, "-c", source], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )


def test_a_script_that_never_closes_ends() -> None:
    """No `if __name__` guard, nothing closed."""
    process = start_script("print(len(llm.generate([[5], [6]], SamplingParams(max_tokens=7))[1].token_ids))")
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "7\n")
    assert "2/2" in err
    assert "Traceback" not in err


def test_ctrl_c_ends_a_script() -> None:
    process = start_script("print(1, flush=True); llm.generate([5], SamplingParams(max_tokens=400))", latency=0.05)
    assert process.stdout is not None
    assert process.stdout.readline() == "1\n"
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    start = time.monotonic()
    _, err = process.communicate(timeout=60)
    assert time.monotonic() - start < 10
    assert process.returncode == -signal.SIGINT
    assert err.rstrip().endswith("KeyboardInterrupt")


def test_a_notebook(tmp_path: Path) -> None:
    """A real kernel, whose event loop runs already: the blocking API and the async one, each cell twice."""
    cells = [
        """
        from asyncllm import LLM, AsyncEngine, SamplingParams
        from asyncllm.testing.shadow_engine import ShadowModel
        model, params = ShadowModel(), SamplingParams(temperature=0, max_tokens=10)
        """,
        *[
            """
            llm = LLM(model)
            assert list(llm.generate([5], params)[0].token_ids) == model.expected([5], 10)
            """
        ]
        * 2,
        *[
            """
            async with AsyncEngine(model) as engine:
                ids = [i async for delta in engine.stream([5], params) for i in delta.token_ids]
            assert ids == model.expected([5], 10)
            """
        ]
        * 2,
        "engine = AsyncEngine(model); await engine.start()",
        "assert len((await engine.generate([5], params)).token_ids) == 10",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(textwrap.dedent(cell)) for cell in cells])
    client = NotebookClient(notebook, timeout=60, kernel_name="python3", resources={"metadata": {"path": str(ROOT)}})
    client.execute()
    bars = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", []))
    assert bars.count("1/1") == 2
