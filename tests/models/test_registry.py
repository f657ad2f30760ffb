from __future__ import annotations

import pytest

from asyncllm.errors import CheckpointError, UnsupportedModelError
from asyncllm.models.registry import ARCHITECTURES, find_architecture


def test_by_architecture_or_else_by_model_type() -> None:
    for entry in ARCHITECTURES:
        assert find_architecture({"architectures": [entry.name]}) is entry
        assert find_architecture({"model_type": entry.model_type}) is entry
    named = find_architecture({"architectures": ["Qwen2ForCausalLM"], "model_type": "llama"})
    assert named.model_type == "qwen2"


def test_an_unknown_one_is_refused_with_what_there_is() -> None:
    with pytest.raises(UnsupportedModelError, match=r"GPT2LMHeadModel.*LlamaForCausalLM"):
        find_architecture({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"})
    with pytest.raises(UnsupportedModelError, match="model_type None"):
        find_architecture({})


@pytest.mark.parametrize("junk", [3, "LlamaForCausalLM", ["x", 3], {"a": 1}])
def test_junk_in_architectures_is_refused(junk: object) -> None:
    with pytest.raises(CheckpointError, match="architectures"):
        find_architecture({"architectures": junk})
