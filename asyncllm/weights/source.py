"""Where a model comes from: a Hub id, a folder or a GGUF file becomes a `ModelSource`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncllm.config import EngineConfig
from asyncllm.errors import CheckpointError, ConfigError, ModelNotFoundError
from asyncllm.inputs.tokenizer import TokenizerData
from asyncllm.weights.gguf import GGUFFile, is_later_part, read_gguf
from asyncllm.weights.gguf_model import translate_config, translate_generation_config
from asyncllm.weights.json_file import read_json
from asyncllm.weights.safetensors import find_shards

_HUB_ID = re.compile(r"(?P<repository>[\w.-]+(/[\w.-]+)?)(:(?P<file>[^:]+\.gguf))?")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model whose files are on this machine and complete, as far as their headers tell."""

    name: str  # as the caller gave it
    folder: Path | None  # with config.json and safetensors; None for a GGUF file
    gguf: Path | None  # the first part, where it is split
    config: Mapping[str, Any]  # of the shape of config.json; a GGUF's metadata are translated to it
    generation_config: Mapping[str, Any]  # of the shape of generation_config.json; empty where there is none
    tokenizer: TokenizerData
    load_format: str  # "safetensors", "gguf" or "dummy"
    gguf_header: GGUFFile | None = None


def resolve_source(model: str, config: EngineConfig) -> ModelSource:
    """Finds a model, downloads what is missing and checks every header; blocking, reads no weights.

    `model` is a folder (safetensors, or exactly one GGUF), a .gguf file (of a split one the first part), a Hub id, or
    "organisation/repository:file.gguf". Raises `ModelNotFoundError`, `CheckpointError`, `UnsupportedModelError`,
    `DependencyError`, `ConfigError`, and `ModelLoadError` for a download that fails.
    """
    if not model:  # which would be the current folder
        raise ModelNotFoundError("the model's name is empty: give a folder, a .gguf file or a Hub id")
    try:
        path = Path(model).expanduser()
        is_folder, is_file = path.is_dir(), path.is_file()
    except (TypeError, ValueError, OSError, RuntimeError) as error:
        raise ModelNotFoundError(f"{model!r} is no name of a folder, a file or a Hub repository") from error
    if is_folder:
        return _from_folder(model, path, config.load_format)
    if is_file:
        if path.suffix != ".gguf":
            raise ModelNotFoundError(f"{path} is a file, and not a .gguf: give the model's folder")
        return _from_gguf(model, path, config.load_format)
    match = _HUB_ID.fullmatch(model)
    if match is None or match["repository"].endswith(".gguf"):
        raise ModelNotFoundError(f"there is no folder or file {model!r}")
    return _from_hub(model, match["repository"], match["file"], config)


def _from_hub(name: str, repository_name: str, file: str | None, config: EngineConfig) -> ModelSource:
    from asyncllm.weights.hub import HubRepository  # noqa: PLC0415  # brings huggingface_hub: 0.3 s that folders save

    repository, load_format = HubRepository(repository_name, config.revision), config.load_format
    if file is not None:
        return _from_gguf(name, repository.download_gguf(file), load_format)
    folder = repository.download_description()
    if load_format == "gguf" or not (folder / "config.json").is_file():
        if files := repository.gguf_files():
            raise ModelNotFoundError(
                f"say which GGUF file: {repository.name}:FILE, with FILE one of {', '.join(files)}"
            )
        raise ModelNotFoundError(f"{repository.name} on the Hub holds neither a config.json nor a GGUF file")
    if load_format != "dummy":
        repository.download_safetensors(folder)
    return _from_folder(name, folder, load_format)


def _from_folder(name: str, folder: Path, load_format: str) -> ModelSource:
    described = (folder / "config.json").is_file()
    ggufs = sorted(file for file in folder.glob("*.gguf") if not is_later_part(file.name))
    if load_format == "auto":
        safetensors = described and any(folder.glob("*.safetensors*"))
        load_format = "gguf" if ggufs and not safetensors else "safetensors"
    if load_format == "gguf" or (load_format == "dummy" and ggufs and not described):
        if len(ggufs) != 1:
            found = ", ".join(file.name for file in ggufs) or "none"
            raise ModelNotFoundError(f"{folder} must hold one GGUF file, not {found}; give the path of the file itself")
        return _from_gguf(name, ggufs[0], load_format)
    if not described:
        raise CheckpointError(f"{folder} is no model: it has no config.json and no GGUF file")
    config = read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    if load_format == "safetensors":
        find_shards(folder)
    return ModelSource(
        name=name,
        folder=folder,
        gguf=None,
        config=config,
        generation_config=read_json(generation) if generation.is_file() else {},
        tokenizer=TokenizerData(folder=folder),
        load_format=load_format,
    )


def _from_gguf(name: str, path: Path, load_format: str) -> ModelSource:
    if load_format == "safetensors":
        raise ConfigError(f'load_format="safetensors" does not go with a GGUF file, {path}; leave it at "auto"')
    file = read_gguf(path)
    return ModelSource(
        name=name,
        folder=None,
        gguf=path,
        config=translate_config(file),
        generation_config=translate_generation_config(file),
        tokenizer=TokenizerData(
            gguf_fields={key: value for key, value in file.metadata.items() if key.startswith("tokenizer.")}
        ),
        load_format="dummy" if load_format == "dummy" else "gguf",
        gguf_header=file,
    )
