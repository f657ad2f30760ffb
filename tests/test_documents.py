"""What the README says is so: its commands, its code, its settings and its figures."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from asyncllm import EngineConfig, SamplingParams, cli, errors
from asyncllm.api.routes import ROUTES
from asyncllm.api.settings import ApiSettings
from asyncllm.flags import field_docstrings
from asyncllm.testing.tiny_models import CHAT_TEMPLATE, write_tiny_model
from asyncllm.workloads import PROFILES
from benchmarks.report import comparison_from_json, readme_section
from benchmarks.structured_report import structured_table

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
SERVE = README.split("## Serve\n", 1)[1].split("\n## ", 1)[0]
PYTHON_BLOCKS = re.findall(r"```python\n(.*?)```", README.replace(SERVE, ""), re.DOTALL)


def marked(name: str) -> str:
    """The part of the README between two comments that name it."""
    return README.split(f"<!-- {name}: begin -->\n", 1)[1].split(f"<!-- {name}: end -->", 1)[0].strip()


def test_two_commands_come_first() -> None:
    (block, *_) = re.findall(r"```\n(.*?)```", README, re.DOTALL)
    assert block.split("\n") == ["make demo", "make test", ""]


def test_ci_runs_the_test_command() -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert script.rstrip().splitlines()[-1] == "exec make test"


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = set(re.findall(r"\bmake ([a-z][a-z-]+)", README)) - {"and", "sure"}
    assert named == {"demo", "test", "test-full", "bench"}
    for target in named:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)


def test_commands_exist() -> None:
    for command in re.findall(r"^asyncllm ([a-z]+) MODEL", README, re.MULTILINE):
        with pytest.raises(SystemExit) as exit:
            cli.main([command, "--help"])
        assert exit.value.code == 0


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random model in place of the one that the README downloads."""
    folder = tmp_path_factory.mktemp("tiny")
    return str(write_tiny_model(folder, chat_template=CHAT_TEMPLATE, config={"max_position_embeddings": 4096}))


def test_python_blocks_run(tiny: str, tmp_path: Path) -> None:
    assert len(PYTHON_BLOCKS) == 6
    script = "\n".join(PYTHON_BLOCKS).replace("HuggingFaceTB/SmolLM2-135M-Instruct", tiny)
    (tmp_path / "readme.py").write_text(script, encoding="utf-8")
    subprocess.run([sys.executable, str(tmp_path / "readme.py")], cwd=ROOT, check=True, timeout=120)


@pytest.mark.parametrize(("table", "settings"), [("settings", EngineConfig), ("api", ApiSettings)])
def test_settings_tables_have_every_field_and_its_default(table: str, settings: type[Any]) -> None:
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in marked(table).splitlines()[2:]]
    docstrings = field_docstrings(settings)
    assert rows == [[f"`{f.name}`", f"`{f.default!r}`", docstrings[f.name]] for f in fields(settings)]


def test_endpoints_are_all_named() -> None:
    named = set(re.findall(r"`(/[\w/.]*)`", SERVE.split("Endpoints:", 1)[1].split("Requests may", 1)[0]))
    shown = {route.path for route in ROUTES if "{" not in route.path}
    assert named <= shown | {"/openapi.json"}
    assert shown - named == {"/health", "/engine/events", "/v1/messages/count_tokens"}


def test_served_as_the_readme_says(tiny: str, tmp_path: Path) -> None:
    """curl and the openai client against `asyncllm serve`, and FastAPI's example under uvicorn."""
    curl, (client, fastapi) = re.search(r"^curl .*$", SERVE, re.MULTILINE), re.findall(
        r"```python\n(.*?)```", SERVE, re.DOTALL
    )  # fmt: skip
    assert curl is not None
    (tmp_path / "service.py").write_text(fastapi.replace("HuggingFaceTB/SmolLM2-135M-Instruct", tiny), encoding="utf-8")
    with socket.create_server(("127.0.0.1", 0)) as free, socket.create_server(("127.0.0.1", 0)) as another:
        ports = [free.getsockname()[1], another.getsockname()[1]]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)]), "OMP_NUM_THREADS": "1"}
    python = [sys.executable, "-m"]
    commands = [
        [*python, "asyncllm", "serve", tiny, "--device", "cpu", "--port", str(ports[0])],
        [*python, "uvicorn", "service:app", "--log-level", "warning", "--port", str(ports[1])],
    ]
    with ExitStack() as stack:
        for command in commands:
            server = stack.enter_context(subprocess.Popen(command, cwd=ROOT, env=environment))
            stack.callback(server.terminate)
        for port, path in zip(ports, ("/health", "/llm/health"), strict=True):
            wait_for(f"http://127.0.0.1:{port}{path}")
        (tmp_path / "client.py").write_text(client.replace("8000", str(ports[0])), encoding="utf-8")
        said = subprocess.run([sys.executable, tmp_path / "client.py"], check=True, capture_output=True, timeout=60)
        assert said.stdout
        if shutil.which("curl"):
            line = curl[0].replace("8000", str(ports[0]))
            answer = subprocess.run(shlex.split(line), check=True, capture_output=True, timeout=60)
            assert json.loads(answer.stdout)["choices"][0]["message"]["role"] == "assistant"
        with urllib.request.urlopen(f"http://127.0.0.1:{ports[1]}/river", timeout=60) as river:
            assert isinstance(json.load(river), str)


def wait_for(url: str) -> None:
    deadline = time.monotonic() + 90
    while True:
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except OSError:
            assert time.monotonic() < deadline, f"{url} does not answer"
            time.sleep(0.1)


def test_structured_output_table_is_that_of_its_results() -> None:
    found = json.loads((ROOT / "benchmarks" / "results" / "structured.json").read_text(encoding="utf-8"))
    assert marked("structured") == structured_table(found)


def test_sampling_parameters_are_all_named() -> None:
    sentence = README.split("`SamplingParams` has ", 1)[1].split(".", 1)[0]
    assert re.findall(r"`(\w+)`", sentence) == [f.name for f in fields(SamplingParams)]


def test_errors_that_are_named_exist() -> None:
    section = README.split("## Errors", 1)[1].split("\n## ", 1)[0]
    named = set(re.findall(r"`([A-Z]\w+?)s?`", section))
    assert len(named) > 5
    assert all(hasattr(errors, name) for name in named)


def test_figures_are_those_of_the_stored_run() -> None:
    comparison = comparison_from_json((ROOT / "benchmarks" / "results" / "cpu.json").read_text(encoding="utf-8"))
    assert marked("measured") == readme_section(comparison, "benchmarks/results/cpu").strip()
    assert all(check.passed for check in comparison.checks)


def test_stored_results_are_complete() -> None:
    folder = ROOT / "benchmarks" / "results"
    assert (folder / "cpu.md").exists()
    assert (folder / "cpu.png").exists()


def test_gpu_figures_are_those_of_the_stored_runs() -> None:
    table = README.split("On one NVIDIA H200", 1)[1].split("`python -m", 1)[0]
    rows = {cells[1].strip(" `"): cells for line in table.splitlines() if len(cells := line.split("|")) > 5}
    for column, model in ((2, "llama-3.1-8b"), (4, "qwen3-0.6b")):
        stored = json.loads((ROOT / "benchmarks" / "results" / f"gpu-{model}.json").read_text(encoding="utf-8"))
        assert stored["check"]["worst"] <= stored["check"]["bound"]
        printed = (ROOT / "benchmarks" / "results" / f"gpu-{model}.txt").read_text(encoding="utf-8")
        lines = [line.split(" | ") for line in printed.splitlines() if line.count(" | ") >= 11]
        passes = {cells[0]: cells for cells in lines if cells[0] in PROFILES["gpu"]}  # the last of each
        assert len(passes) == 6
        for workload, cells in passes.items():
            rate = float(cells[2 if workload == "prefill64" else 1].replace(",", ""))
            assert rows[workload][column].strip() == f"{rate:,.0f}"
