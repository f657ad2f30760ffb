"""What a GGUF file says, in Hugging Face's terms: config, generation config, tensor names and row order."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from asyncllm.errors import CheckpointError, UnsupportedModelError
from asyncllm.weights.gguf import GGUFFile, GGUFTensor, dequantize

IndexArray = NDArray[np.intp]

# GGUF architecture: Hugging Face model_type and class. Mistral's files say "llama".
_ARCHITECTURES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
}
_INTERLEAVED_ROPE = frozenset({"llama"})  # their q and k rows are stored in another order than Hugging Face's

_ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_TENSOR = re.compile(r"(\w+)\.(weight|bias)")

# Settings under "<architecture>." that the translation reads, and those that change nothing in what is computed. Any
# other one is refused, since it may.
_READ = frozenset(
    [
        "context_length",
        "embedding_length",
        "block_count",
        "feed_forward_length",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "attention.layer_norm_rms_epsilon",
        "attention.sliding_window",
        "rope.dimension_count",
        "rope.freq_base",
        "rope.scaling.type",
        "rope.scaling.factor",
        "rope.scaling.original_context_length",
        "rope.scaling.attn_factor",
        "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow",
        "expert_count",
    ]
)
_INERT = frozenset(["vocab_size", "tensor_data_layout", "rope.scaling.finetuned", "expert_used_count", "pooling_type"])

_SAMPLING = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}


def huggingface_name(tensor: GGUFTensor) -> str | None:
    """The Hugging Face name of a tensor; None for one that is part of the config. Raises `UnsupportedModelError`."""
    if tensor.name in _ROPE_TENSORS:
        return None
    if match := _LAYER_TENSOR.fullmatch(tensor.name):
        layer, noun, kind = match.groups()
        if noun in _LAYER_NAMES:
            return f"model.layers.{layer}.{_LAYER_NAMES[noun]}.{kind}"
    elif (match := _TENSOR.fullmatch(tensor.name)) and match[1] in _NAMES:
        return f"{_NAMES[match[1]]}.{match[2]}"
    raise UnsupportedModelError(f"{tensor.path} holds the tensor {tensor.name}, for which asyncllm has no use")


def row_order(tensor: GGUFTensor, file: GGUFFile, config: Mapping[str, Any]) -> IndexArray | None:
    """Where each of Hugging Face's rows lies among the file's; None where the order is the same.

    llama.cpp rotates neighbours, Hugging Face the two halves of a head, so rows of q and k, biases included, are stored
    as (head, i, half) and not as (head, half, i): `LlamaModel.permute` of llama.cpp's convert_hf_to_gguf.py.
    """
    match = _LAYER_TENSOR.fullmatch(tensor.name)
    if match is None or match[2] not in ("attn_q", "attn_k"):
        return None
    if file.metadata["general.architecture"] not in _INTERLEAVED_ROPE:
        return None
    heads = config["num_attention_heads" if match[2] == "attn_q" else "num_key_value_heads"]
    if tensor.shape[0] != heads * config["head_dim"]:
        raise CheckpointError(
            f"{tensor.path}: {tensor.name} has {tensor.shape[0]} rows, not {heads} heads of {config['head_dim']}"
        )
    return np.arange(tensor.shape[0]).reshape(heads, -1, 2).swapaxes(1, 2).ravel()


def translate_config(file: GGUFFile) -> dict[str, Any]:
    """The `config.json` of the model. Raises `UnsupportedModelError` for what it could not say, `CheckpointError`."""
    return _Translation(file).config()


def translate_generation_config(file: GGUFFile) -> dict[str, Any]:
    """The `generation_config.json`: end, begin and padding ids, and sampling defaults where the file names some."""
    ends = {_token_id(file, name) for name in ("eos", "eot", "eom")}
    config: dict[str, Any] = {"eos_token_id": sorted(token for token in ends if token is not None)}
    config |= {"bos_token_id": _token_id(file, "bos"), "pad_token_id": _token_id(file, "padding")}
    for key, name in _SAMPLING.items():
        if (value := file.metadata.get(f"general.sampling.{key}")) is not None:
            config[name] = _shortest(value) if isinstance(value, float) else value
    return config


class _Translation:
    """One file's metadata on the way to a config."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.architecture = self._architecture()

    def config(self) -> dict[str, Any]:
        self._refuse_unknown()
        model_type, class_name = _ARCHITECTURES[self.architecture]
        hidden, heads = self.integer("embedding_length"), self.integer("attention.head_count")
        context = self.integer("context_length")
        head_dim = self.integer("attention.key_length", hidden // heads)
        for name in ("attention.value_length", "rope.dimension_count"):
            if self.integer(name, head_dim) != head_dim:
                self._refuse(f"{name} is {self.integer(name)} where a head has {head_dim} dimensions")
        embedding = self.tensor("token_embd.weight")
        tensors = self.file.tensors
        config: dict[str, Any] = {
            "architectures": [class_name],
            "model_type": model_type,
            "vocab_size": embedding.shape[0],
            "hidden_size": hidden,
            "intermediate_size": self.integer("feed_forward_length"),
            "num_hidden_layers": self.integer("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self.integer("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": context,
            "rms_norm_eps": self.number("attention.layer_norm_rms_epsilon"),
            "rope_theta": self.number("rope.freq_base", 10000.0),
            "rope_scaling": self._rope_scaling(context, head_dim),
            "tie_word_embeddings": "output.weight" not in tensors,
            # "auto" has a type to go by: quantised weights are no more exact than bfloat16
            "dtype": {"F32": "float32", "F16": "float16"}.get(self.tensor("blk.0.attn_q.weight").type_name, "bfloat16"),
        }
        if model_type != "qwen2":  # which always has biases on q, k and v, and there alone
            config["attention_bias"] = "blk.0.attn_q.bias" in tensors
        if model_type == "llama":
            config["mlp_bias"] = "blk.0.ffn_gate.bias" in tensors
        window = self.integer("attention.sliding_window", 0)
        if 0 < window < context:
            if model_type != "llama":
                self._refuse("it does not say in which layers the sliding window holds")
            config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}
        for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
            config[f"{name}_token_id"] = _token_id(self.file, key)
        return config

    def integer(self, name: str, default: int | None = None) -> int:
        """A whole number; one stated layer by layer must be the same in all."""
        value = self._value(name, default)
        if isinstance(value, list) and value:
            if len(set(value)) > 1:
                self._refuse(f"{name} differs from layer to layer")
            value = value[0]
        if not isinstance(value, int) or isinstance(value, bool) or value < 0 or (value == 0 and default != 0):
            raise CheckpointError(f"{self.file.path} is damaged: {self.architecture}.{name} is {value!r}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A float."""
        value = self._value(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise CheckpointError(f"{self.file.path} is damaged: {self.architecture}.{name} is {value!r}")
        return _shortest(value)

    def tensor(self, name: str) -> GGUFTensor:
        """A tensor that must be there."""
        if name not in self.file.tensors:
            raise CheckpointError(f"{self.file.path} holds no tensor {name}")
        return self.file.tensors[name]

    def _value(self, name: str, default: float | None) -> Any:
        value = self.file.metadata.get(f"{self.architecture}.{name}", default)
        if value is None:
            raise CheckpointError(f"{self.file.path} does not state {self.architecture}.{name}")
        return value

    def _refuse(self, why: str) -> NoReturn:
        raise UnsupportedModelError(f"{self.file.path} cannot be run: {why}")

    def _architecture(self) -> str:
        architecture = self.file.metadata.get("general.architecture")
        if architecture is None and "split.count" in self.file.metadata:
            raise CheckpointError(f"{self.file.path} is not the first part of a split GGUF")
        if architecture not in _ARCHITECTURES:
            supported = ", ".join(sorted(_ARCHITECTURES))
            raise UnsupportedModelError(
                f"{self.file.path} has the architecture {architecture!r}; of GGUF files, asyncllm runs {supported}"
            )
        return str(architecture)

    def _refuse_unknown(self) -> None:
        prefix = f"{self.architecture}."
        if self.integer("expert_count", 0):
            self._refuse("mixtures of experts are not supported from GGUF files")
        known = _READ | _INERT
        for key in self.file.metadata:
            if key.startswith(prefix) and key.removeprefix(prefix) not in known:
                self._refuse(f"asyncllm does not know its setting {key}")
        for tensor in self.file.tensors.values():
            huggingface_name(tensor)

    def _rope_scaling(self, context: int, head_dim: int) -> dict[str, Any] | None:
        kind = self.file.metadata.get(f"{self.architecture}.rope.scaling.type", "none")
        original = self.integer("rope.scaling.original_context_length", context)
        if self._states("rope.scaling.attn_factor") and kind != "longrope":
            self._refuse(f"rope.scaling.attn_factor with rope scaling {kind!r}")
        if kind != "longrope" and any(name in self.file.tensors for name in _ROPE_TENSORS[1:]):
            self._refuse(f"long and short rope factors with rope scaling {kind!r}")
        if "rope_freqs.weight" in self.file.tensors:
            # How llama.cpp stores Llama 3's scaling: a divisor for each frequency, computed when the file was made.
            # Longrope says just that, whatever rule the divisors came from.
            if kind != "none":
                self._refuse(f"rope_freqs.weight with rope scaling {kind!r}")
            factors = self._rope_factors("rope_freqs.weight", head_dim)
            return _longrope(factors, factors, attention_factor=1.0, original=context)
        if kind == "none":
            return None
        if kind == "linear":
            return {"rope_type": "linear", "factor": self.number("rope.scaling.factor")}
        if kind == "yarn":
            scaling: dict[str, Any] = {
                "rope_type": "yarn",
                "factor": self.number("rope.scaling.factor"),
                "original_max_position_embeddings": original,
            }
            for name in ("beta_fast", "beta_slow"):
                if self._states(f"rope.scaling.yarn_{name}"):
                    scaling[name] = self.number(f"rope.scaling.yarn_{name}")
            return scaling
        if kind == "longrope":
            long = self._rope_factors("rope_factors_long.weight", head_dim)
            short = self._rope_factors("rope_factors_short.weight", head_dim)
            attention_factor = self.number("rope.scaling.attn_factor", 1.0)
            return _longrope(long, short, attention_factor=attention_factor, original=original)
        self._refuse(f"its rope scaling, {kind!r}, is not supported")

    def _states(self, name: str) -> bool:
        return f"{self.architecture}.{name}" in self.file.metadata

    def _rope_factors(self, name: str, head_dim: int) -> list[float]:
        tensor = self.tensor(name)
        if prod(tensor.shape) != head_dim // 2:
            raise CheckpointError(f"{tensor.path}: {name} has {prod(tensor.shape)} factors, not {head_dim // 2}")
        factors: list[float] = dequantize(tensor.read(), tensor.type_name).ravel().tolist()
        return factors


def _longrope(long: list[float], short: list[float], *, attention_factor: float, original: int) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "long_factor": long,
        "short_factor": short,
        "attention_factor": attention_factor,
        "original_max_position_embeddings": original,
    }


def _token_id(file: GGUFFile, name: str) -> int | None:
    value = file.metadata.get(f"tokenizer.ggml.{name}_token_id")
    if value is not None and not isinstance(value, int):
        raise CheckpointError(f"{file.path} is damaged: tokenizer.ggml.{name}_token_id is {value!r}")
    return value


def _shortest(value: float) -> float:
    """The shortest decimal of a float32: 1e-05, and not 9.999999747378752e-06."""
    return float(str(np.float32(value)))
