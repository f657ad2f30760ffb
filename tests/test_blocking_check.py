"""The check of conftest.py catches what it is for."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).parent.parent

TESTS = """
    import time
    import pytest
    from asyncllm import LLM, SamplingParams
    from asyncllm.testing.shadow_engine import ShadowModel

    async def test_a_blocking_call_of_the_package():
        with LLM(ShadowModel(latency=0.02)) as llm:
            llm.generate([5], SamplingParams(max_tokens=60), progress=False)

    @pytest.mark.blocks_loop
    async def test_on_purpose():
        with LLM(ShadowModel(latency=0.02)) as llm:
            llm.generate([5], SamplingParams(max_tokens=60), progress=False)

    async def test_what_a_test_does_itself():
        time.sleep(1)
"""


def test_blocking_check(tmp_path: Path) -> None:
    (tmp_path / "test_sample.py").write_text(textwrap.dedent(TESTS))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "-c", "pyproject.toml", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert "the event loop was blocked" in done.stdout
    assert "offline.py" in done.stdout
    assert "test_sample.py::test_a_blocking_call_of_the_package" in done.stdout
    assert done.stdout.rstrip().splitlines()[-1].startswith("3 passed, 1 error")
