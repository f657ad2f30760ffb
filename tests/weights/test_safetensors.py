from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from asyncllm.config import EngineConfig
from asyncllm.errors import CheckpointError, ModelLoadError, UnsupportedModelError
from asyncllm.testing.tiny_models import tiny_config, tiny_weights, write_tiny_model
from asyncllm.weights.source import ModelSource, resolve_source
from asyncllm.weights.tensors import iterate_tensors


def resolve(folder: Path, load_format: str = "auto") -> ModelSource:
    return resolve_source(str(folder), EngineConfig().override(load_format=load_format))


def assert_holds_tiny_weights(source: ModelSource) -> None:
    found = {name: tensor.numpy().copy() for name, tensor in iterate_tensors(source)}
    expected = tiny_weights(tiny_config())
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        np.testing.assert_array_equal(found[name], weight)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "model", shards=3)


@pytest.mark.parametrize("shards", [1, 3])
def test_every_tensor_comes_once_and_whole(tmp_path: Path, shards: int) -> None:
    source = resolve(write_tiny_model(tmp_path, shards=shards))
    assert source.load_format == "safetensors"
    assert len(list(iterate_tensors(source))) == len(tiny_weights(tiny_config()))
    assert_holds_tiny_weights(source)


def test_a_single_file_may_have_any_name(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "weights.safetensors")
    assert_holds_tiny_weights(resolve(tmp_path))


def shard(folder: Path, number: int) -> Path:
    return folder / f"model-0000{number}-of-00003.safetensors"


def test_stray_files_are_ignored(sharded: Path) -> None:
    """G38: other weights under the same names lie beside the shards; a shard holds a tensor that is another's."""
    other = tiny_weights(tiny_config(), seed=1)
    save_file(other, sharded / "model-old.safetensors")
    name = next(iter(load_file(shard(sharded, 1))))
    save_file({**load_file(shard(sharded, 2)), name: other[name]}, shard(sharded, 2))
    assert_holds_tiny_weights(resolve(sharded))


def test_a_tensor_that_the_index_leaves_out_is_read(sharded: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"].pop("model.norm.weight")
    index.write_text(json.dumps(content))
    assert_holds_tiny_weights(resolve(sharded))


def truncate(path: Path, count: int) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) - count])


def edit_index(folder: Path, change: Callable[[dict[str, str]], object]) -> None:
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    change(content["weight_map"])
    index.write_text(json.dumps(content))


def unlisted_twin(folder: Path) -> None:
    for number in (1, 3):
        save_file({**load_file(shard(folder, number)), "twin": np.zeros(3, np.float32)}, shard(folder, number))


def folder_for_a_shard(folder: Path) -> None:
    shard(folder, 2).unlink()
    shard(folder, 2).mkdir()


def no_weights(folder: Path) -> None:
    for file in folder.glob("*.safetensors*"):
        file.unlink()


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing shard": (lambda folder: shard(folder, 2).unlink(), "model-00002-of-00003.safetensors is missing"),
    "shard cut by 100 bytes": (
        lambda folder: truncate(shard(folder, 3), 100),
        "model-00003-of-00003.safetensors is cut",
    ),
    "empty shard": (lambda folder: shard(folder, 2).write_bytes(b""), "model-00002-of-00003.safetensors is cut"),
    "shard of noise": (
        lambda folder: shard(folder, 2).write_bytes(b"\x7f" * 999),
        "model-00002-of-00003.safetensors is",
    ),
    "shard that is a folder": (
        folder_for_a_shard,
        "model-00002-of-00003.safetensors is missing",
    ),
    "absent file in the index": (
        lambda folder: edit_index(folder, lambda index: index.update({"x.weight": "model-4.safetensors"})),
        "model-4.safetensors is missing",
    ),
    "absent tensor in the index": (
        lambda folder: edit_index(folder, lambda index: index.update({"x.weight": shard(folder, 1).name})),
        "model-00001-of-00003.safetensors does not hold x.weight",
    ),
    "index that leaves the folder": (
        lambda folder: edit_index(folder, lambda index: index.update({"x.weight": "../x.safetensors"})),
        "names '../x.safetensors', which is no file of its folder",
    ),
    "a tensor in two shards": (unlisted_twin, "holds twin, which model-00001-of-00003.safetensors holds as well"),
    "no index": (lambda folder: (folder / "model.safetensors.index.json").unlink(), "3 safetensors files and no model"),
    "index of noise": (
        lambda folder: (folder / "model.safetensors.index.json").write_text("{"),
        "index.json cannot be read",
    ),
    "index without a map": (
        lambda folder: (folder / "model.safetensors.index.json").write_text('{"weight_map": []}'),
        "index.json has no weight_map",
    ),
    "no weights": (
        no_weights,
        "holds no weights: there is no model.safetensors",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_incomplete_checkpoint_is_refused_before_it_loads(sharded: Path, fault: str) -> None:
    """G38, and what else can be wrong with an index and its shards."""
    break_it, message = FAULTS[fault]
    break_it(sharded)
    with pytest.raises(CheckpointError) as caught:
        resolve(sharded)
    assert message in str(caught.value)
    assert str(sharded) in str(caught.value)


def test_pickles_are_refused(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(UnsupportedModelError, match="save the model as safetensors"):
        resolve(tmp_path)


def test_a_shard_that_breaks_later_is_a_named_error(sharded: Path) -> None:
    source = resolve(sharded)
    truncate(shard(sharded, 2), 100)
    with pytest.raises(CheckpointError, match="model-00002-of-00003"):
        list(iterate_tensors(source))


def test_no_damage_gives_a_foreign_error(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    file = tmp_path / "model.safetensors"
    data = bytearray(file.read_bytes())
    rng = np.random.default_rng(0)
    for _ in range(200):
        damaged = bytearray(data)
        damaged[rng.integers(0, 1000)] = rng.integers(0, 256)
        file.write_bytes(damaged)
        try:
            for _, tensor in iterate_tensors(resolve(tmp_path)):
                tensor.sum()
        except ModelLoadError:
            pass
