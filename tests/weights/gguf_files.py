"""Small GGUF files, written with the `gguf` package from Hugging Face weights, as llama.cpp's converter does."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float32]

_ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """`model.layers.0.self_attn.q_proj.weight` -> `blk.0.attn_q.weight`."""
    stem, _, kind = name.rpartition(".")
    if stem.startswith("model.layers."):
        layer, _, stem = stem.removeprefix("model.layers.").partition(".")
        return f"blk.{layer}.{_NAMES[stem]}.{kind}"
    return f"{_NAMES[stem]}.{kind}"


def permute(weight: NDArray[Any], heads: int) -> NDArray[Any]:
    """`LlamaModel.permute` of llama.cpp's convert_hf_to_gguf.py."""
    shape = weight.shape
    return weight.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


def write_gguf(
    path: Path,
    config: Mapping[str, Any],
    weights: Mapping[str, FloatArray],
    *,
    matrix_type: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    extra: Mapping[str, tuple[Any, gguf.GGUFValueType]] | None = None,
    extra_tensors: Mapping[str, FloatArray] | None = None,
    drop: str | None = None,
    split_max_tensors: int = 0,
) -> Path:
    """Writes the model; `extra` are more settings, by their full key; `drop` is one to leave out.

    A split file's parts get `-00001-of-0000N` into their names.
    """
    architecture = _ARCHITECTURES.get(config["model_type"], config["model_type"])
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=split_max_tensors)
    heads = config["num_attention_heads"]
    uint, real = gguf.GGUFValueType.UINT32, gguf.GGUFValueType.FLOAT32
    values: dict[str, tuple[Any, gguf.GGUFValueType]] = {
        "vocab_size": (config["vocab_size"], uint),
        "block_count": (config["num_hidden_layers"], uint),
        "context_length": (config["max_position_embeddings"], uint),
        "embedding_length": (config["hidden_size"], uint),
        "feed_forward_length": (config["intermediate_size"], uint),
        "attention.head_count": (heads, uint),
        "attention.head_count_kv": (config["num_key_value_heads"], uint),
        "attention.layer_norm_rms_epsilon": (config["rms_norm_eps"], real),
        "rope.freq_base": (config["rope_theta"], real),
    }
    if "head_dim" in config:
        values["attention.key_length"] = values["attention.value_length"] = (config["head_dim"], uint)
    settings = {f"{architecture}.{name}": value for name, value in values.items()} | dict(extra or {})
    for name, (value, kind) in settings.items():
        if name != drop:
            sub_type = None
            if isinstance(value, list):
                kind, sub_type = gguf.GGUFValueType.ARRAY, kind  # noqa: PLW2901
            writer.add_key_value(name, value, kind, sub_type)
    for name, weight in weights.items():
        stored = weight
        if architecture == "llama" and "q_proj" in name:
            stored = permute(weight, heads)
        elif architecture == "llama" and "k_proj" in name:
            stored = permute(weight, config["num_key_value_heads"])
        if weight.ndim > 1 and matrix_type != gguf.GGMLQuantizationType.F32:
            stored = gguf.quants.quantize(stored, matrix_type)
            writer.add_tensor(gguf_name(name), stored, raw_dtype=matrix_type)
        else:
            writer.add_tensor(gguf_name(name), stored)
    for name, tensor in (extra_tensors or {}).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
