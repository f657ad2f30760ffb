"""Which class runs which Hugging Face architecture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from asyncllm.errors import CheckpointError, UnsupportedModelError
from asyncllm.models.configuration import Family, ModelConfig, read_config
from asyncllm.models.llama import LLAMA, MISTRAL, QWEN2, QWEN3, Llama


@dataclass(frozen=True, slots=True)
class Architecture:
    """An entry of the registry."""

    name: str  # as `architectures` of a config has it
    model_type: str
    family: Family
    model: type[Llama]


ARCHITECTURES = (
    Architecture("LlamaForCausalLM", "llama", LLAMA, Llama),
    Architecture("MistralForCausalLM", "mistral", MISTRAL, Llama),
    Architecture("Qwen2ForCausalLM", "qwen2", QWEN2, Llama),
    Architecture("Qwen3ForCausalLM", "qwen3", QWEN3, Llama),
)


def find_architecture(raw: Mapping[str, Any]) -> Architecture:
    """By the config's `architectures`, or by `model_type` where it names none."""
    named = raw.get("architectures") or []
    if not isinstance(named, list | tuple) or not all(isinstance(name, str) for name in named):
        raise CheckpointError(f"the config's architectures must be a list of names, got {named!r:.80}")
    for entry in ARCHITECTURES:
        if entry.name in named or (not named and entry.model_type == raw.get("model_type")):
            return entry
    what = f"architecture {', '.join(named)}" if named else f"model_type {raw.get('model_type')!r}"
    raise UnsupportedModelError(
        f"{what} is not supported; asyncllm runs {', '.join(entry.name for entry in ARCHITECTURES)}"
    )


def read_model_config(raw: Mapping[str, Any]) -> ModelConfig:
    """The typed config of a model; raises as `find_architecture` and `read_config` do."""
    return read_config(raw, find_architecture(raw).family)
