from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncllm.config import EngineConfig
from asyncllm.errors import AsyncLLMError, CheckpointError, ConfigError, ModelNotFoundError
from asyncllm.testing.tiny_models import tiny_config, tiny_weights, write_tiny_model
from asyncllm.weights.source import ModelSource, resolve_source
from asyncllm.weights.tensors import iterate_tensors
from tests.weights.gguf_files import write_gguf


def resolve(model: Path | str, load_format: str = "auto") -> ModelSource:
    return resolve_source(str(model), EngineConfig().override(load_format=load_format))


def tiny_gguf(path: Path, split_max_tensors: int = 0) -> Path:
    return write_gguf(path, tiny_config(), tiny_weights(tiny_config()), split_max_tensors=split_max_tensors)


def weights_alone(folder: Path) -> None:
    write_tiny_model(folder)
    (folder / "config.json").unlink()


def test_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_tiny_model(tmp_path / "model", config={"eos_token_id": [0, 2]})
    source = resolve(folder)
    assert (source.name, source.folder, source.gguf) == (str(folder), folder, None)
    assert source.config == json.loads((folder / "config.json").read_text())
    assert source.generation_config["eos_token_id"] == [0, 2]
    assert source.tokenizer.folder == folder
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for model in ("model", "~/model", "./model/"):
        assert resolve(model).config == source.config


def test_folder_without_generation_config_or_tokenizer(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).unlink()
    source = resolve(tmp_path)
    assert source.generation_config == {}
    assert not source.tokenizer.present  # loading it raises TokenizerError


def test_dummy_needs_a_config_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config()))
    source = resolve(tmp_path, "dummy")
    assert source.load_format == "dummy"
    assert not source.tokenizer.present
    with pytest.raises(ValueError, match="has no tensors"):
        iterate_tensors(source)


def test_gguf_file_and_folder(tmp_path: Path) -> None:
    file = tiny_gguf(tmp_path / "tiny.gguf")
    for model, load_format in ((file, "auto"), (file, "gguf"), (tmp_path, "auto"), (tmp_path, "gguf")):
        source = resolve(model, load_format)
        assert (source.folder, source.gguf, source.load_format) == (None, file, "gguf")
    assert resolve(file, "dummy").load_format == resolve(tmp_path, "dummy").load_format == "dummy"
    assert resolve(file, "dummy").config == source.config


def test_split_gguf_in_a_folder(tmp_path: Path) -> None:
    tiny_gguf(tmp_path / "tiny.gguf", split_max_tensors=10)
    source = resolve(tmp_path)
    assert source.gguf == tmp_path / "tiny-00001-of-00003.gguf"
    assert len(list(iterate_tensors(source))) == len(tiny_weights(tiny_config()))


def test_safetensors_come_before_a_gguf_of_the_same_folder(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    file = tiny_gguf(tmp_path / "tiny.gguf")
    assert resolve(tmp_path).load_format == "safetensors"
    assert resolve(tmp_path, "gguf").gguf == file
    (tmp_path / "model.safetensors").unlink()
    assert resolve(tmp_path).gguf == file


def two_ggufs(folder: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        tiny_gguf(folder / name)


def lone_config(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "config.json").write_text(text)


FAULTS: dict[str, tuple[Callable[[Path], object], str, str, type[AsyncLLMError], str]] = {
    "nothing": (lambda folder: None, ".", "auto", CheckpointError, "no config.json and no GGUF file"),
    "weights alone": (
        weights_alone,
        ".",
        "auto",
        CheckpointError,
        "no config.json",
    ),
    "config alone": (lone_config("{}"), ".", "auto", CheckpointError, "no weights"),
    "config of noise": (
        lone_config('{"a":'),
        ".",
        "dummy",
        CheckpointError,
        "config.json cannot be read: Expecting value",
    ),
    "config of another kind": (lone_config("[]"), ".", "dummy", CheckpointError, "must hold a JSON object, not list"),
    "config too deep": (lone_config("[" * 100_000), ".", "dummy", CheckpointError, "config.json cannot be read"),
    "config not UTF-8": (
        lambda folder: (folder / "config.json").write_bytes(b"\xff{}"),
        ".",
        "dummy",
        CheckpointError,
        "config.json cannot be read",
    ),
    "two GGUFs": (two_ggufs, ".", "auto", ModelNotFoundError, "one GGUF file, not a.gguf, b.gguf; give the path"),
    "no GGUF": (write_tiny_model, ".", "gguf", ModelNotFoundError, "one GGUF file, not none"),
    "GGUF as safetensors": (
        lambda folder: tiny_gguf(folder / "a.gguf"),
        "a.gguf",
        "safetensors",
        ConfigError,
        "does not go with a GGUF file",
    ),
    "another file": (lone_config("{}"), "config.json", "auto", ModelNotFoundError, "give the model's folder"),
    "absent folder": (lambda folder: None, "absent/model", "auto", ModelNotFoundError, "no folder or file"),
    "absent GGUF": (lambda folder: None, "absent.gguf", "auto", ModelNotFoundError, "no folder or file"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_cannot_be_a_model_is_a_named_error(tmp_path: Path, fault: str) -> None:
    prepare, model, load_format, error, message = FAULTS[fault]
    prepare(tmp_path)
    with pytest.raises(error) as caught:
        resolve(tmp_path / model, load_format)
    assert message in str(caught.value)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    "model", ["", "  ", "\0", "a" * 5000, "~nobody-of-that-name/x", "a b", "a/b/c", "x.gguf", "a:b"]
)
def test_what_is_no_name_is_a_named_error(model: str) -> None:
    with pytest.raises(ModelNotFoundError):
        resolve(model)


def test_without_the_gguf_package(tmp_path: Path) -> None:
    file = tiny_gguf(tmp_path / "tiny.gguf")
    script = (
        "import sys; sys.modules['gguf'] = None\n"
        "from asyncllm.config import EngineConfig\n"
        "from asyncllm.errors import DependencyError\n"
        "from asyncllm.weights.source import resolve_source\n"
        "try: resolve_source(sys.argv[1], EngineConfig())\n"
        "except DependencyError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, file], capture_output=True, text=True, timeout=60, check=True)
    assert "pip install 'asyncllm[gguf]'" in done.stdout
