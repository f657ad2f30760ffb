"""`asyncllm serve`: where its settings come from, what it prints, and how it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from asyncllm import cli
from asyncllm.api.settings import ApiSettings
from asyncllm.config import EngineConfig
from asyncllm.errors import ConfigError
from asyncllm.serve import ServerSettings, ServeSettings, read_settings
from asyncllm.testing.tiny_models import CHAT_TEMPLATE, write_tiny_model

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("tiny"), chat_template=CHAT_TEMPLATE))


def settings(*arguments: str) -> ServeSettings:
    return read_settings(cli._parser().parse_args(["serve", *arguments]))


def test_flags_before_environment_before_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "server.toml"
    file.write_text(
        'model = "from-file"\n[engine]\nmax_num_seqs = 3\nnum_blocks = 30\n'
        '[api]\napi_keys = ["a", "b"]\nmax_queue = 5\n[server]\nport = 1111\n'
    )
    monkeypatch.setenv("ASYNCLLM_MAX_QUEUE", "6")
    monkeypatch.setenv("ASYNCLLM_NUM_BLOCKS", "60")
    monkeypatch.setenv("ASYNCLLM_PAGE", "false")
    monkeypatch.setenv("ASYNCLLM_CORS_ORIGINS", "https://a.example, https://b.example")
    read = settings("--config", str(file), "--num-blocks", "90", "--model-names", "one", "--model-names", "two")
    assert read.model == "from-file"
    assert read.engine == EngineConfig(max_num_seqs=3, num_blocks=90, isolation="process")
    assert read.api == ApiSettings(
        api_keys=["a", "b"], max_queue=6, page=False, cors_origins=["https://a.example", "https://b.example"],
        model_names=["one", "two"],
    )  # fmt: skip
    assert read.server == ServerSettings(port=1111)
    assert settings("from-flag", "--config", str(file)).model == "from-flag"
    assert settings("m", "--isolation", "thread").engine.isolation == "thread"
    monkeypatch.setenv("ASYNCLLM_ISOLATION", "thread")
    assert settings("m").engine.isolation == "thread"
    monkeypatch.setenv("ASYNCLLM_MODEL", "from-environment")
    assert settings("--config", str(file)).model == "from-environment"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = ", "cannot be read"),
        ("[engine]\nnum_block = 1", "num_block"),
        ("[other]\nx = 1", "other"),
        ("engine = 1", "must be a table"),
        ("[server]\nport = 70000", "port"),
        ('[api]\napi_keys = "secret"', "api_keys must be a list"),
    ],
)
def test_wrong_files(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "x.toml").write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        settings("model", "--config", str(tmp_path / "x.toml"))
    assert "secret" not in str(caught.value)


def test_wrong_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCLLM_PORT", "many")
    with pytest.raises(ConfigError, match="port"):
        settings("model")
    with pytest.raises(ConfigError, match="which model"):
        settings()


def test_every_setting_has_one_meaning() -> None:
    names = [field.name for kind in (EngineConfig, ApiSettings, ServerSettings) for field in fields(kind)]
    assert len(names) == len(set(names))


@contextmanager
def serving(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str, list[str]]]:
    """The command in a process of its own, its address, and what it said before it served."""
    command = [sys.executable, "-m", "asyncllm", "serve", *arguments, "--port", "0", "--device", "cpu"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        said = []
        try:
            for line in process.stderr:
                said.append(line)
                if "the cache holds" in line:
                    break
            found = re.search(r"http://\S+", "".join(said))
            assert found, said
            yield process, found[0], said
        finally:
            process.kill()


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=20) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


def test_serves_drains_and_ends(tiny: str) -> None:
    flags = ("--log-format", "json", "--max-model-len", "2000", "--num-blocks", "256")
    with serving(tiny, *flags) as (process, url, said):
        assert "serving" in "".join(said)
        assert "the cache holds" in said[-1]
        body = {"prompt": "a secret", "max_tokens": 2}
        assert post(f"{url}/v1/completions", body)["usage"]["completion_tokens"] == 2
        long = {"prompt": "a secret", "max_tokens": 1500, "ignore_eos": True, "stream": True}
        request = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(long).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            answer.readline()
            process.send_signal(signal.SIGTERM)
            time.sleep(0.2)
            with pytest.raises(urllib.error.HTTPError, match="503"):
                post(f"{url}/v1/completions", body)
            rest = answer.read()
        assert rest.endswith(b"data: [DONE]\n\n")
        assert process.wait(20) == 0
        assert process.stderr is not None
        log = process.stderr.read()
    lines = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    assert [line["status"] for line in lines] == [200, 503, 200]
    assert all(line["request_id"] for line in lines)
    assert "secret" not in log


def test_a_second_signal_ends_it_at_once(tiny: str) -> None:
    with serving(tiny, "--max-model-len", "2000", "--num-blocks", "256") as (process, url, _):
        body = {"prompt": "a", "max_tokens": 1990, "ignore_eos": True, "stream": True}
        request = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            answer.readline()
            process.send_signal(signal.SIGINT)
            time.sleep(0.1)
            process.send_signal(signal.SIGINT)
            rest = answer.read()
            assert b"[DONE]" not in rest
            assert b"engine_closed" in rest
            assert process.wait(20) == 0


def test_exit_codes(tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve"]) == cli.USAGE
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert cli.main(["serve", tiny, "--port", str(taken.getsockname()[1])]) == cli.USAGE
    assert "cannot listen" in capsys.readouterr().err
    assert cli.main(["serve", str(tmp_path / "nothing"), "--port", "0"]) == cli.FAILED
