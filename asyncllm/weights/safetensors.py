"""The safetensors files of a folder: which there must be, and which tensors are read from each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from asyncllm.errors import CheckpointError, UnsupportedModelError
from asyncllm.weights.json_file import read_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class Shard:
    """One safetensors file and the tensors to take from it, in the order of the file."""

    path: Path
    names: tuple[str, ...]


def find_shards(folder: Path) -> tuple[Shard, ...]:
    """The shards of a folder, each one's size checked against its header, and all against the index; reads no tensor.

    As in transformers, `model.safetensors` comes before an index; without either, the folder may hold one file of
    another name. Files that the index does not name are ignored. Raises `CheckpointError`, `UnsupportedModelError`.
    """
    if not (folder / SINGLE).is_file() and (folder / INDEX).is_file():
        return _indexed(folder, shard_index(folder))
    single = folder / SINGLE
    if not single.is_file():
        files = sorted(folder.glob("*.safetensors"))
        if len(files) > 1:
            raise CheckpointError(
                f"{folder} holds {len(files)} safetensors files and no {INDEX}, which says how they belong together; "
                "copy or download it as well"
            )
        if not files:
            raise _no_weights(folder)
        (single,) = files
    return (Shard(single, _tensor_names(single)),)


def shard_index(folder: Path) -> Mapping[str, str]:
    """Tensor name to file name, as the folder's index has it. Raises `CheckpointError`."""
    path = folder / INDEX
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path} has no weight_map")
    for file in weight_map.values():
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointError(f"{path} names {file!r}, which is no file of its folder")
    return weight_map


@contextmanager
def open_shard(path: Path, framework: str) -> Iterator[Any]:
    """`safetensors.safe_open`, memory-mapped, with its errors as `CheckpointError`s that name the file."""
    try:
        with safe_open(path, framework=framework) as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is cut short or damaged ({error}); copy or download it again") from error


def _indexed(folder: Path, index: Mapping[str, str]) -> tuple[Shard, ...]:
    shards: list[Shard] = []
    homes: dict[str, str] = {}
    for file in sorted(set(index.values())):
        path = folder / file
        if not path.is_file():
            raise CheckpointError(f"{path} is missing: {INDEX} names it; copy or download it as well")
        # A tensor that the index leaves out is read too: the model has a place for it, or says that it has none.
        names = tuple(name for name in _tensor_names(path) if index.get(name, file) == file)
        for name in names:
            if homes.setdefault(name, file) != file:
                raise CheckpointError(f"{path} holds {name}, which {homes[name]} holds as well")
        shards.append(Shard(path, names))
    for name, file in index.items():
        if name not in homes:
            raise CheckpointError(f"{folder / file} does not hold {name}, which {INDEX} says it does")
    return tuple(shards)


def _tensor_names(path: Path) -> tuple[str, ...]:
    with open_shard(path, "numpy") as file:
        return tuple(file.offset_keys())


def _no_weights(folder: Path) -> Exception:
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt*")):
        return UnsupportedModelError(
            f"{folder} holds weights as pickles, which can run code when read; save the model as safetensors"
        )
    return CheckpointError(f"{folder} holds no weights: there is no {SINGLE} and no {INDEX}")
