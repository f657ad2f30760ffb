"""A model without its weights: config.json and a tokenizer, as a folder that is small to carry.

    python -m benchmarks.skeleton FOLDER [MODEL] [--config qwen3-0.6b]

MODEL, a GGUF file or a folder, has the tokenizer; without one, SmolLM2 of the installed package. Serve the folder with
`load_format="dummy"` on a machine that has neither a network nor the file. `--config` takes the configuration of
another model, a folder of `benchmarks/models` by name or any other: the vocabulary is widened to its size by tokens
that are two others in a row, so that each id which random weights may sample has a text. Prompts are encoded without
them.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncllm import EngineConfig
from asyncllm.cli import find_smollm2
from asyncllm.inputs.tokenizer_folder import read_tokenizer_folder
from asyncllm.inputs.tokenizer_gguf import read_tokenizer_gguf
from asyncllm.weights.source import resolve_source
from benchmarks.model_folders import model_folder


def write_skeleton(folder: Path, model: str, config: str | None = None) -> None:
    """The folder, with the tokenizer of `model`, and with its configuration or that of the model `config`."""
    settings = EngineConfig(load_format="dummy")
    source = resolve_source(model, settings)
    if source.tokenizer.gguf_fields is not None:
        parts = read_tokenizer_gguf(source.tokenizer.gguf_fields)
    else:
        assert source.tokenizer.folder is not None
        parts = read_tokenizer_folder(source.tokenizer.folder)
    tokenizer = json.loads(parts.backend.to_str())
    if config is not None:
        source = resolve_source(str(model_folder(config)), settings)
        widen(tokenizer["model"]["vocab"], source.config["vocab_size"])
    content: Mapping[str, Mapping[str, Any]] = {
        "tokenizer.json": tokenizer,
        "config.json": source.config,
        "generation_config.json": source.generation_config,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **parts.special_tokens,
            "chat_template": parts.chat_templates["default"],
        },
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in content.items():
        (folder / name).write_text(json.dumps(dict(value), indent=1), encoding="utf-8")


def widen(vocabulary: dict[str, int], size: int) -> None:
    """Fill a vocabulary, token to id, up to `size` ids with pairs of its longer tokens."""
    words = [token for token in vocabulary if token.isascii() and token.isalpha() and len(token) > 2]
    free = iter(sorted(set(range(size)).difference(vocabulary.values())))
    for first, second in itertools.product(words, repeat=2):
        if first + second not in vocabulary:
            token_id = next(free, None)
            if token_id is None:
                return
            vocabulary[first + second] = token_id
    raise SystemExit(f"there are too few tokens to make {size:,} of")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("model", nargs="?", default=find_smollm2())
    parser.add_argument("--config", metavar="MODEL")
    chosen = parser.parse_args()
    write_skeleton(chosen.folder, chosen.model, chosen.config)


if __name__ == "__main__":
    main()
