"""A Hugging Face config as a typed `ModelConfig`. Whatever we would run wrongly is refused here, by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

from asyncllm.errors import CheckpointError, UnsupportedModelError
from asyncllm.layers.activation import ACTIVATIONS
from asyncllm.layers.rope import DefaultRope, DynamicRope, LinearRope, Llama3Rope, LongRope, YarnRope

ROPES: dict[str, type[DefaultRope]] = {
    "default": DefaultRope,
    "linear": LinearRope,
    "dynamic": DynamicRope,
    "llama3": Llama3Rope,
    "yarn": YarnRope,
    "longrope": LongRope,
}
_NEUTRAL_ROPE_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"}
_LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True, slots=True)
class Family:
    """Where model types that share an architecture differ. Defaults are those of transformers' config classes."""

    qkv_bias: bool | None  # None: as the config's attention_bias says
    output_bias: bool | None
    mlp_bias: bool | None  # None: as the config's mlp_bias says
    qk_norm: bool
    every_window: bool  # sliding_window holds for all layers
    typed_windows: bool  # sliding_window holds for the layers that layer_types or max_window_layers name
    default_window: int | None
    default_kv_heads: int | None  # None: one per query head
    default_head_dim: int | None = None  # None: hidden_size / num_attention_heads


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only model of the Llama shape."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    activation: str
    max_position_embeddings: int
    context_limit: int  # the longest context that the rope makes sense for
    rope: DefaultRope
    windows: tuple[int | None, ...]  # per layer: how many last positions it attends to, None for all
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied_head: bool
    checkpoint_dtype: str | None  # what the config says the weights are stored as


def read_config(raw: Mapping[str, Any], family: Family) -> ModelConfig:
    """Raises `UnsupportedModelError` for a feature we do not run and `CheckpointError` for a missing or odd value."""
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unknown")
        raise UnsupportedModelError(f"quantised checkpoints are not supported yet (quant_method {method!r})")
    activation = raw.get("hidden_act", "silu")
    if activation not in ACTIVATIONS:
        raise UnsupportedModelError(f"hidden_act {activation!r} is not supported; known are {', '.join(ACTIVATIONS)}")
    hidden_size, num_heads = _count(raw, "hidden_size"), _count(raw, "num_attention_heads")
    head_dim = raw.get("head_dim") or family.default_head_dim or hidden_size // num_heads
    num_kv_heads = raw.get("num_key_value_heads", family.default_kv_heads) or num_heads
    if num_heads % num_kv_heads or head_dim % 2:
        raise UnsupportedModelError(
            f"{num_heads} heads over {num_kv_heads} KV heads of {head_dim} dimensions: heads must be a multiple of KV "
            "heads, and dimensions even"
        )
    num_layers = _count(raw, "num_hidden_layers")
    max_positions = _count(raw, "max_position_embeddings")
    rope = _read_rope(raw, head_dim, max_positions)
    attention_bias = bool(raw.get("attention_bias", False))
    return ModelConfig(
        vocab_size=_count(raw, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_count(raw, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        norm_eps=float(_required(raw, "rms_norm_eps")),
        activation=activation,
        max_position_embeddings=max_positions,
        context_limit=_context_limit(rope, max_positions),
        rope=rope,
        windows=_read_windows(raw, family, num_layers),
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        output_bias=attention_bias if family.output_bias is None else family.output_bias,
        mlp_bias=bool(raw.get("mlp_bias", False)) if family.mlp_bias is None else family.mlp_bias,
        qk_norm=family.qk_norm,
        tied_head=bool(raw.get("tie_word_embeddings", False)),
        checkpoint_dtype=raw.get("dtype") or raw.get("torch_dtype"),
    )


def _required(raw: Mapping[str, Any], name: str) -> Any:
    if raw.get(name) is None:
        raise CheckpointError(f"the model's config lacks {name!r}")
    return raw[name]


def _count(raw: Mapping[str, Any], name: str) -> int:
    value = _required(raw, name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CheckpointError(f"{name!r} of the model's config must be a whole number of at least 1, got {value!r}")
    return value


def _read_windows(raw: Mapping[str, Any], family: Family, num_layers: int) -> tuple[int | None, ...]:
    types = raw.get("layer_types")
    if types is not None and (len(types) != num_layers or any(each not in _LAYER_TYPES for each in types)):
        raise UnsupportedModelError(
            f"layer_types must name {' or '.join(_LAYER_TYPES)} for each of {num_layers} layers, got {types!r}"
        )
    window = raw.get("sliding_window", family.default_window)
    if family.typed_windows:
        if not raw.get("use_sliding_window", False):
            window = None
        if types is None:
            first = raw.get("max_window_layers", 28)
            types = [_LAYER_TYPES[window is not None and layer >= first] for layer in range(num_layers)]
        if window is None and "sliding_attention" in types:
            raise UnsupportedModelError("layer_types has sliding_attention, but the config sets no sliding_window")
    else:
        # transformers ignores layer_types here; a mixed model would be run wrongly
        expected = _LAYER_TYPES[family.every_window and window is not None]
        if types is not None and any(each != expected for each in types):
            raise UnsupportedModelError(f"layer_types other than {expected} are not supported for this model_type")
        types = [expected] * num_layers
    if window is not None and (not isinstance(window, int) or window < 1):
        raise CheckpointError(f"sliding_window must be a whole number of at least 1, got {window!r}")
    return tuple(window if each == "sliding_attention" else None for each in types)


def _read_rope(raw: Mapping[str, Any], head_dim: int, max_positions: int) -> DefaultRope:
    """From `rope_parameters` (transformers 5) or `rope_scaling` and `rope_theta` (before)."""
    given: dict[str, Any] = dict(raw.get("rope_scaling") or raw.get("rope_parameters") or {})
    if any(isinstance(value, Mapping) for value in given.values()):
        raise UnsupportedModelError("rope_parameters that differ by layer type are not supported")
    rope_type = given.get("rope_type", given.get("type", "default"))
    if rope_type not in ROPES:
        raise UnsupportedModelError(f"rope type {rope_type!r} is not supported; known are {', '.join(ROPES)}")
    partial = given.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise UnsupportedModelError(f"partial_rotary_factor {partial!r} is not supported")
    variant = ROPES[rope_type]
    wanted = {each.name: each for each in fields(variant)}
    if unknown := sorted(given.keys() - wanted.keys() - _NEUTRAL_ROPE_KEYS):
        raise UnsupportedModelError(f"rope type {rope_type!r} has no parameter {', '.join(unknown)}")
    values = {name: value for name, value in given.items() if name in wanted and value is not None}
    values.setdefault("rope_theta", float(raw.get("rope_theta") or 10000.0))
    if variant is DynamicRope:  # transformers takes the model's own length here, whatever the parameters say
        values["original_max_position_embeddings"] = max_positions
    elif "original_max_position_embeddings" in wanted:
        # beside the parameters, as Phi-3 has it, it wins
        outside = raw.get("original_max_position_embeddings")
        inside = values.get("original_max_position_embeddings", max_positions)
        values["original_max_position_embeddings"] = inside if outside is None else outside
        if variant in (YarnRope, LongRope):
            values.setdefault("factor", max_positions / values["original_max_position_embeddings"])
    for name in ("short_factor", "long_factor"):
        if name in values:
            values[name] = tuple(map(float, values[name]))
            if len(values[name]) != head_dim // 2:
                raise CheckpointError(f"{name} of the rope needs {head_dim // 2} numbers, got {len(values[name])}")
    lacking = [name for name, each in wanted.items() if each.default is MISSING and name not in values]
    if lacking:
        raise CheckpointError(f"rope type {rope_type!r} lacks {', '.join(lacking)}")
    return variant(**values)


def _context_limit(rope: DefaultRope, max_positions: int) -> int:
    """Linear, dynamic and YaRN scaling stretch a context; some configs state it stretched already, some do not."""
    if isinstance(rope, LinearRope | DynamicRope):
        return int(max_positions * rope.factor)
    if isinstance(rope, YarnRope):
        return max(max_positions, int(rope.original_max_position_embeddings * rope.factor))
    return max_positions
