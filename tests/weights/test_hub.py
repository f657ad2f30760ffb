"""Models from the Hub, against a local server. In a subprocess: huggingface_hub reads HF_ENDPOINT when imported."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from asyncllm.testing.tiny_models import tiny_config, tiny_weights, write_tiny_model
from tests.weights.gguf_files import write_gguf
from tests.weights.hub_server import COMMIT, Hub

SCRIPT = """
import json, sys
from asyncllm.config import EngineConfig
from asyncllm.errors import AsyncLLMError
from asyncllm.weights.source import resolve_source

for model, overrides in json.loads(sys.argv[1]):
    try:
        source = resolve_source(model, EngineConfig(**overrides))
    except AsyncLLMError as error:
        answer = {"error": type(error).__name__, "message": str(error)}
    else:
        answer = {"name": source.name, "place": str(source.folder or source.gguf), "format": source.load_format,
                  "hidden": source.config["hidden_size"], "eos": source.generation_config.get("eos_token_id")}
    print(json.dumps(answer))
assert "torch" not in sys.modules
"""


@dataclass
class Client:
    """Resolves models in a process of its own, over one cache."""

    url: str
    cache: Path
    offline: bool = False  # by huggingface_hub's own setting
    stderr: str = ""

    def resolve(self, *models: str | tuple[str, dict[str, Any]]) -> list[dict[str, Any]]:
        calls = [(model, {}) if isinstance(model, str) else model for model in models]
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("HF_")},
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(self.cache),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_OFFLINE": str(int(self.offline)),
            "NO_PROXY": "127.0.0.1",
        }
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, json.dumps(calls)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        self.stderr = done.stderr
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    root = tmp_path_factory.mktemp("hub")
    sharded = write_tiny_model(root / "sharded", shards=3)
    (sharded / "README.md").write_text("not needed")
    (sharded / "pytorch_model.bin").write_bytes(b"not needed")
    shutil.copy(next(sharded.glob("model-00001*")), sharded / "model-old.safetensors")
    pickled = write_tiny_model(root / "pickled")
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    breaking = write_tiny_model(root / "breaking", shards=2)
    config = tiny_config()
    ggufs = root / "ggufs"
    (ggufs / "parts").mkdir(parents=True)
    write_gguf(ggufs / "tiny.gguf", config, tiny_weights(config))
    write_gguf(ggufs / "parts" / "tiny.gguf", config, tiny_weights(config), split_max_tensors=8)
    with Hub(
        {
            "tiny/sharded": sharded,
            "tiny/pickled": pickled,
            "tiny/breaking": breaking,
            "tiny/ggufs": ggufs,
            "tiny/gated": sharded,
        },
        gated=frozenset({"tiny/gated"}),
    ).serve() as hub:
        yield hub


def test_downloads_what_is_needed_and_serves_it_offline(hub: Hub, tmp_path: Path) -> None:
    client = Client(hub.url, tmp_path)
    online = client.resolve(
        ("tiny/sharded", {"load_format": "dummy"}),
        "tiny/sharded",
        "tiny/ggufs:tiny.gguf",
        "tiny/ggufs:parts/tiny-00001-of-00003.gguf",
    )
    sharded, split = online[1], online[3]
    assert {answer.get("format") for answer in online} == {"dummy", "safetensors", "gguf"}, online
    assert "Fetching" in client.stderr  # the progress bars
    folder = Path(sharded["place"])
    assert folder.name == COMMIT
    assert {file.name for file in folder.iterdir()} == {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "model.safetensors.index.json",
        *(f"model-0000{shard}-of-00003.safetensors" for shard in (1, 2, 3)),
    }
    assert len(list(Path(split["place"]).parent.iterdir())) == 3

    nowhere = Client("http://127.0.0.1:9", tmp_path)
    assert nowhere.resolve(
        "tiny/sharded",
        ("tiny/sharded", {"revision": COMMIT}),
        "tiny/ggufs:tiny.gguf",
        "tiny/ggufs:parts/tiny-00001-of-00003.gguf",
    ) == [sharded, sharded, *online[2:]]
    (absent,) = nowhere.resolve("tiny/breaking")
    assert absent["error"] == "ModelNotFoundError"
    assert "check the network" in absent["message"]
    next(folder.glob("model-00002*")).unlink()
    (lacking,) = Client(hub.url, tmp_path, offline=True).resolve("tiny/sharded")
    assert lacking["error"] == "ModelNotFoundError", lacking
    assert "not wholly" in lacking["message"]
    assert client.resolve("tiny/sharded") == [sharded]


def test_what_is_not_there_is_a_named_error(hub: Hub, tmp_path: Path) -> None:
    expected = {
        "tiny/absent": ("ModelNotFoundError", "no repository tiny/absent on the Hub"),
        "tiny/gated": ("ModelNotFoundError", "licence"),
        "tiny/pickled": ("CheckpointError", "no weights"),
        "tiny/ggufs": ("ModelNotFoundError", "tiny/ggufs:FILE"),
        "tiny/ggufs:absent.gguf": ("ModelNotFoundError", "it has parts/tiny-00001-of-00003.gguf"),
        "tiny/sharded:absent.gguf": ("ModelNotFoundError", "no GGUF at all"),
        "tiny/ggufs:parts/tiny-00002-of-00003.gguf": ("ModelNotFoundError", "tiny-00001-of-00003.gguf"),
        "tiny--bad/..name": ("ModelNotFoundError", "no name of the Hub"),
    }
    answers = Client(hub.url, tmp_path).resolve(*expected, ("tiny/sharded", {"revision": "absent"}))
    for answer, (error, text) in zip(answers, [*expected.values(), ("ModelNotFoundError", "'absent'")], strict=True):
        assert answer.get("error") == error, answer
        assert text in answer["message"]


def test_an_interrupted_download_is_told_and_resumed(hub: Hub, tmp_path: Path) -> None:
    client = Client(hub.url, tmp_path)
    shard = "model-00002-of-00002.safetensors"
    hub.broken.add(shard)
    (failed,) = client.resolve("tiny/breaking")
    assert failed["error"] == "ModelLoadError", failed
    assert "try again" in failed["message"]
    hub.broken.remove(shard)
    before = hub.downloads.copy()
    (done,) = client.resolve("tiny/breaking")
    assert done["format"] == "safetensors", done
    assert set(hub.downloads - before) == {f"tiny/breaking/{shard}"}
