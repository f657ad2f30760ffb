"""A model without its weights: config.json and the tokenizer of a GGUF file, as a folder that is small to carry.

    python -m benchmarks.skeleton FOLDER [MODEL.gguf]

Without a file, SmolLM2 of the installed package. Serve it with `load_format="dummy"` on a machine that has neither a
network nor the file.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from asyncllm import EngineConfig
from asyncllm.cli import find_smollm2
from asyncllm.inputs.tokenizer_gguf import read_tokenizer_gguf
from asyncllm.weights.source import resolve_source


def write_skeleton(folder: Path, model: str) -> None:
    """The folder, of the GGUF file `model`."""
    source = resolve_source(model, EngineConfig())
    if source.tokenizer.gguf_fields is None:
        raise SystemExit(f"{model} is no GGUF file: copy its JSON files")
    parts = read_tokenizer_gguf(source.tokenizer.gguf_fields)
    folder.mkdir(parents=True, exist_ok=True)
    parts.backend.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **parts.special_tokens,
        "chat_template": parts.chat_templates["default"],
    }
    for name, content in (
        ("config.json", source.config),
        ("generation_config.json", source.generation_config),
        ("tokenizer_config.json", settings),
    ):
        (folder / name).write_text(json.dumps(dict(content), indent=1), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("model", nargs="?", default=find_smollm2())
    chosen = parser.parse_args()
    write_skeleton(chosen.folder, chosen.model)


if __name__ == "__main__":
    main()
