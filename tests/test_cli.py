"""The command: its flags, its output, its exit codes, and Ctrl-C."""

from __future__ import annotations

import argparse
import asyncio
import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import pytest

from asyncllm import AsyncEngine, EngineConfig, SamplingParams, cli
from asyncllm.flags import field_docstrings
from asyncllm.testing.tiny_models import (
    CHAT_TEMPLATE,
    write_piece_tokenizer,
    write_script_model,
    write_tiny_model,
)
from asyncllm.workloads import COLUMNS

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random model that knows chats."""
    return str(write_tiny_model(tmp_path_factory.mktemp("tiny"), chat_template=CHAT_TEMPLATE))


def greedy(model: str, prompt: str, max_tokens: int) -> str:
    async def run() -> str:
        async with AsyncEngine(model) as engine:
            return (await engine.generate(prompt, SamplingParams(temperature=0, max_tokens=max_tokens))).text

    return asyncio.run(run())


WITHOUT_EXTRAS = """
import sys
extras = ("aiohttp", "llguidance", "prometheus_client", "pydantic", "pydantic_core", "uvicorn")
sys.modules.update(dict.fromkeys(extras))
from asyncllm.cli import main
sys.exit(main(sys.argv[1:]))
"""


def test_commands_need_no_extra_but_their_own(tiny: str) -> None:
    """`make demo` installs none."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", WITHOUT_EXTRAS, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)

    generated = run("generate", tiny, "Once", "--max-tokens", "2")
    assert (generated.returncode, generated.stderr) == (0, "")
    served = run("serve", tiny)
    assert served.returncode == 1
    assert served.stderr == "asyncllm: error: the API needs aiohttp: pip install 'asyncllm[api]'\n"


# --- flags ---


def parse(*arguments: str) -> argparse.Namespace:
    return cli._parser().parse_args(arguments)


NO_TEXT = {"repetition_detection", "structured_output", "logits_processors", "on_token"}
"""Settings that are objects or functions."""


def test_every_setting_is_a_flag_with_its_docstring() -> None:
    actions = {
        option: action
        for name, parser in _subparsers().items()
        if name != "serve"  # which has the API's settings beside
        for action in parser._actions
        for option in action.option_strings
    }
    for settings in (EngineConfig, SamplingParams):
        docstrings = field_docstrings(settings)
        for field in fields(settings):
            if field.name in NO_TEXT:
                continue
            action = actions["--" + field.name.replace("_", "-")]
            assert docstrings[field.name].replace("%", "%%") in str(action.help)


def _subparsers() -> dict[str, argparse.ArgumentParser]:
    (action,) = (a for a in cli._parser()._actions if isinstance(a, argparse._SubParsersAction))
    assert set(action.choices) == {"demo", "chat", "generate", "bench", "serve"}
    return dict(action.choices)


def test_flags_become_settings() -> None:
    chosen = parse(
        *("generate", "model", "prompt", "--max-num-seqs", "4", "--no-prefix-caching", "--dtype", "float32"),
        *("--temperature", "0.5", "--stop", "a", "--stop", "b", "--stop-token-ids", "7", "--ignore-eos"),
    )
    assert cli._settings(EngineConfig, chosen) == EngineConfig(max_num_seqs=4, prefix_caching=False, dtype="float32")
    assert cli._settings(SamplingParams, chosen) == SamplingParams(
        temperature=0.5, stop=("a", "b"), stop_token_ids=(7,), ignore_eos=True
    )
    chosen = parse(
        *("generate", "model", "prompt", "--logit-bias", "3=-1.5", "--logit-bias", "1=2", "--logprobs", "all"),
        *("--prompt-logprobs", "4", "--allowed-token-ids", "1", "--allowed-token-ids", "3", "--no-detokenize"),
    )
    assert cli._settings(SamplingParams, chosen) == SamplingParams(
        logit_bias={1: 2.0, 3: -1.5}, logprobs="all", prompt_logprobs=4, allowed_token_ids=[1, 3], detokenize=False
    )


@pytest.mark.parametrize("flag", [("--logprobs", "some"), ("--logit-bias", "3"), ("--logit-bias", "a=1")])
def test_a_misspelt_value_is_refused(flag: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("generate", "model", "prompt", *flag)
    assert f"argument {flag[0]}: invalid" in capsys.readouterr().err


def test_absent_flags_leave_the_defaults() -> None:
    chosen = parse("chat", "model")
    assert cli._settings(EngineConfig, chosen) == EngineConfig()
    assert cli._settings(SamplingParams, chosen) == SamplingParams()
    assert cli._settings(SamplingParams, parse("demo")) == SamplingParams(max_tokens=200, temperature=0.0)
    chosen = parse("demo", "--max-tokens", "5", "--temperature", "1")
    assert cli._settings(SamplingParams, chosen) == SamplingParams(max_tokens=5, temperature=1.0)


def test_help_shows_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        cli.main(["generate", "--help"])
    assert exit.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "--max-num-seqs N Requests that run at once: rows of a step. (default: 256)" in shown
    assert "--dtype {auto,float32,bfloat16,float16}" in shown


# --- refusals ---


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["generate", "m", "p", "--temperature", "-1"], 2, "temperature must be in [0, 3.4e+38], got -1.0"),
        (["generate", "m", "p", "--block-size", "5"], 2, "block_size must be a power of two from 8 to 256, got 5"),
        (["generate", "no/such/folder/at-all", "p"], 1, "no/such/folder/at-all"),
        (["chat", "/no/such.gguf"], 1, "/no/such.gguf"),
        (["bench", "/no/such/folder"], 1, "/no/such/folder"),
    ],
)
def test_refusal_is_one_line_on_stderr(
    arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == code
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = (line for line in err.splitlines() if "error" in line)
    assert line.startswith("asyncllm: error: ")
    assert message in line


def test_empty_prompt_is_a_usage_error(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", tiny, ""]) == 2
    assert "asyncllm: error: " in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["unknown"], ["generate", "m"], ["generate", "m", "p", "--top-k", "x"]])
def test_bad_command_line_exits_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        cli.main(arguments)
    assert exit.value.code == 2
    assert "error: " in capsys.readouterr().err


# --- commands ---


@pytest.mark.parametrize("flags", [[], ["--stream"]])
def test_generate_prints_the_completion(tiny: str, flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    expected = greedy(tiny, "The capital", 12)
    assert cli.main(["generate", tiny, "The capital", "--temperature", "0", "--max-tokens", "12", *flags]) == 0
    assert capsys.readouterr().out == expected + "\n"


def test_generate_prints_every_choice(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--max-tokens", "6", "--temperature", "0", "--n", "3"]
    assert cli.main(["generate", tiny, "hello", *flags]) == 0
    assert capsys.readouterr().out == f"{greedy(tiny, 'hello', 6)}\n" * 3
    assert cli.main(["generate", tiny, "hello", "--stream", *flags]) == 2
    assert "n: " in capsys.readouterr().err


def test_generate_reads_standard_input(
    tiny: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = greedy(tiny, "from a pipe\n", 5)
    monkeypatch.setattr(sys, "stdin", io.StringIO("from a pipe\n"))
    assert cli.main(["generate", tiny, "-", "--temperature", "0", "--max-tokens", "5"]) == 0
    assert capsys.readouterr().out == expected + "\n"


def test_generate_refuses_input_that_is_no_text(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe\xff"), encoding="utf-8"))
    assert cli.main(["generate", "m", "-"]) == 2
    assert "standard input is not text" in capsys.readouterr().err


def test_demo_streams_an_answer_and_its_speed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", "What is two plus two?", "--max-tokens", "12"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("> What is two plus two?\n\n")
    assert re.search(r"\n\d+ tokens, [\d.]+ tokens/s, first token after [\d.]+ s\n$", out)
    assert "loading SmolLM2-135M-Instruct" in err


def test_demo_model_is_the_installed_file_else_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cli.find_smollm2().endswith(".gguf")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert cli.find_smollm2() == "HuggingFaceTB/SmolLM2-135M-Instruct"


def test_bench_prints_a_table(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", tiny, "--workload", "batch16", "--max-model-len", "512"]) == 0
    header, row = capsys.readouterr().out.splitlines()
    assert header.split() == " ".join(COLUMNS).split()
    cells = row.split()
    assert cells[0] == "batch16"
    assert cells[-1] == "0.0%"
    assert float(cells[1].replace(",", "")) > 0


# --- in a process of its own ---


def run(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "asyncllm", *arguments]


def test_reader_that_leaves_early_is_no_traceback(tiny: str) -> None:
    command = run("generate", tiny, "x", "--stream", "--ignore-eos", "--max-tokens", "200")
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=60) == cli.PIPE_CLOSED


class Terminal:
    """A command under a terminal of its own, where Ctrl-C is a key."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self.seen = ""
        self.pid, self._descriptor = pty.fork()
        if self.pid == 0:
            os.chdir(ROOT)
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell that put the tests behind has it ignored
            os.execv(sys.executable, run(*arguments))

    def press(self, keys: str) -> None:
        os.write(self._descriptor, keys.encode())

    def read_until(self, expected: str, seconds: float = 60.0) -> str:
        """What was shown since the last call, up to and with `expected`."""
        deadline = time.monotonic() + seconds
        while expected not in self.seen:
            ready, _, _ = select.select([self._descriptor], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError(f"no {expected!r} in {self.seen!r}")
            try:
                self.seen += os.read(self._descriptor, 65536).decode(errors="replace")
            except OSError:  # the other end has closed
                raise EOFError(f"no {expected!r} in {self.seen!r}") from None
        end = self.seen.index(expected) + len(expected)
        shown, self.seen = self.seen[:end], self.seen[end:]
        return shown

    def close(self) -> int:
        """The exit code; ends the process if it has not left by itself."""
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                os.close(self._descriptor)
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.05)
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        raise TimeoutError("the command did not leave")


@pytest.fixture
def endless(tmp_path: Path) -> str:
    """A model that answers anything with "la la la …"."""
    write_piece_tokenizer(tmp_path, ["?", " la"], chat_template="{{ messages[-1]['content'] }}")
    write_script_model(tmp_path, [[3, 4, 4]], tokenizer=tmp_path, config={"max_position_embeddings": 50_000})
    return str(tmp_path)


def test_ctrl_c_stops_the_answer_and_then_leaves(endless: str) -> None:
    terminal = Terminal(["chat", endless, "--temperature", "0"])
    terminal.read_until("> ")
    terminal.press("?\n")
    terminal.read_until(" la la la")
    terminal.press("\x03")
    terminal.read_until("[stopped]")
    terminal.read_until("> ")
    terminal.press("?\n")  # the engine goes on serving
    terminal.read_until(" la la la")
    terminal.press("\x03")
    terminal.read_until("> ")
    time.sleep(0.5)  # readline shows the prompt a moment before it listens; a key in between is lost to any program
    terminal.press("\x03")
    assert terminal.close() == 0
    assert "Traceback" not in terminal.seen
