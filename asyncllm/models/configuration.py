"""A Hugging Face config as a typed `ModelConfig`. Whatever we would run wrongly is refused here, by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, NoReturn

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
_MOST = 2**31 - 1  # of a whole number: a dimension, a length, a count of tokens
_MOST_LAYERS = 10_000
_SMALLEST, _LARGEST = 1e-30, 1e30  # of other numbers: float32 holds them, and their products with a length


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
    if quantization := raw.get("quantization_config"):
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, Mapping) else quantization
        raise UnsupportedModelError(f"quantised checkpoints are not supported yet (quant_method {method!r})")
    activation = raw.get("hidden_act", "silu")
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise UnsupportedModelError(f"hidden_act {activation!r} is not supported; known are {', '.join(ACTIVATIONS)}")
    hidden_size, num_heads = _count(raw, "hidden_size"), _count(raw, "num_attention_heads")
    head_dim = _optional_count(raw, "head_dim") or family.default_head_dim or hidden_size // num_heads
    num_kv_heads = _optional_count(raw, "num_key_value_heads", family.default_kv_heads) or num_heads
    if num_heads % num_kv_heads or head_dim % 2 or head_dim < 1:
        raise UnsupportedModelError(
            f"{num_heads} heads over {num_kv_heads} KV heads of {head_dim} dimensions: heads must be a multiple of KV "
            "heads (num_key_value_heads), and dimensions (head_dim) even"
        )
    num_layers = _whole_number("num_hidden_layers", _required(raw, "num_hidden_layers"), most=_MOST_LAYERS)
    max_positions = _count(raw, "max_position_embeddings")
    rope = _read_rope(raw, head_dim, max_positions)
    attention_bias, mlp_bias = _flag(raw, "attention_bias"), _flag(raw, "mlp_bias")
    return ModelConfig(
        vocab_size=_count(raw, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_count(raw, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        norm_eps=_positive("rms_norm_eps", _required(raw, "rms_norm_eps")),
        activation=activation,
        max_position_embeddings=max_positions,
        context_limit=_context_limit(rope, max_positions),
        rope=rope,
        windows=_read_windows(raw, family, num_layers),
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        output_bias=attention_bias if family.output_bias is None else family.output_bias,
        mlp_bias=mlp_bias if family.mlp_bias is None else family.mlp_bias,
        qk_norm=family.qk_norm,
        tied_head=_flag(raw, "tie_word_embeddings"),
        checkpoint_dtype=_optional_text(raw, "dtype") or _optional_text(raw, "torch_dtype"),
    )


def _odd(name: str, wanted: str, value: Any) -> NoReturn:
    raise CheckpointError(f"{name!r} of the model's config must be {wanted}, got {value!r}")


def _required(raw: Mapping[str, Any], name: str) -> Any:
    if raw.get(name) is None:
        raise CheckpointError(f"the model's config lacks {name!r}")
    return raw[name]


def _count(raw: Mapping[str, Any], name: str) -> int:
    return _whole_number(name, _required(raw, name))


def _optional_count(raw: Mapping[str, Any], name: str, default: int | None = None) -> int | None:
    """None for null; the default where the field is absent."""
    value = raw.get(name, default)
    return None if value is None else _whole_number(name, value)


def _flag(raw: Mapping[str, Any], name: str) -> bool:
    return raw.get(name) is not None and _boolean(name, raw[name])


def _optional_text(raw: Mapping[str, Any], name: str) -> str | None:
    value = raw.get(name)
    if value is not None and not isinstance(value, str):
        _odd(name, "text", value)
    return value


def _whole_number(name: str, value: Any, least: int = 1, most: int = _MOST) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        _odd(name, f"a whole number from {least} to {most}", value)
    return value


def _positive(name: str, value: Any) -> float:
    number = not isinstance(value, bool) and isinstance(value, int | float)
    if not number or not _SMALLEST <= value <= _LARGEST:  # NaN fails too
        _odd(name, "a finite number above 0", value)
    return float(value)


def _zero_or_positive(name: str, value: Any) -> float:
    return 0.0 if value == 0 and not isinstance(value, bool) else _positive(name, value)


def _boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        _odd(name, "true or false", value)
    return value


def _positive_numbers(name: str, value: Any) -> tuple[float, ...]:
    if not isinstance(value, list | tuple):
        _odd(name, "a list of numbers", value)
    return tuple(_positive(name, each) for each in value)


def _read_windows(raw: Mapping[str, Any], family: Family, num_layers: int) -> tuple[int | None, ...]:
    types = raw.get("layer_types")
    if types is not None and (
        not isinstance(types, list | tuple)
        or len(types) != num_layers
        or any(each not in _LAYER_TYPES for each in types)
    ):
        raise UnsupportedModelError(
            f"layer_types must name {' or '.join(_LAYER_TYPES)} for each of {num_layers} layers, got {types!r}"
        )
    if family.typed_windows and not _flag(raw, "use_sliding_window"):
        window = None  # whatever sliding_window says
    else:
        window = _optional_count(raw, "sliding_window", family.default_window)
    if family.typed_windows:
        if types is None:
            first = _whole_number("max_window_layers", raw.get("max_window_layers", 28), least=0)
            types = [_LAYER_TYPES[window is not None and layer >= first] for layer in range(num_layers)]
        if window is None and "sliding_attention" in types:
            raise UnsupportedModelError("layer_types has sliding_attention, but the config sets no sliding_window")
    else:
        # transformers ignores layer_types here; a mixed model would be run wrongly
        expected = _LAYER_TYPES[family.every_window and window is not None]
        if types is not None and any(each != expected for each in types):
            raise UnsupportedModelError(f"layer_types other than {expected} are not supported for this model_type")
        types = [expected] * num_layers
    return tuple(window if each == "sliding_attention" else None for each in types)


_ROPE_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "rope_theta": _positive,
    "factor": _positive,
    "low_freq_factor": _positive,
    "high_freq_factor": _positive,
    "original_max_position_embeddings": _whole_number,
    "attention_factor": _positive,
    "mscale": _zero_or_positive,  # 0 as good as absent
    "mscale_all_dim": _zero_or_positive,
    "beta_fast": _positive,
    "beta_slow": _positive,
    "truncate": _boolean,
    "short_factor": _positive_numbers,
    "long_factor": _positive_numbers,
}


def _read_rope(raw: Mapping[str, Any], head_dim: int, max_positions: int) -> DefaultRope:
    """From `rope_parameters` (transformers 5) or `rope_scaling` and `rope_theta` (before)."""
    given: dict[str, Any] = _rope_parameters(raw, "rope_scaling") or _rope_parameters(raw, "rope_parameters")
    if any(isinstance(value, Mapping) for value in given.values()):
        raise UnsupportedModelError("rope_parameters that differ by layer type are not supported")
    rope_type = given.get("rope_type", given.get("type", "default"))
    if not isinstance(rope_type, str) or rope_type not in ROPES:
        raise UnsupportedModelError(f"rope type {rope_type!r} is not supported; known are {', '.join(ROPES)}")
    partial = given.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise UnsupportedModelError(f"partial_rotary_factor {partial!r} is not supported")
    variant = ROPES[rope_type]
    wanted = {each.name: each for each in fields(variant)}
    if unknown := sorted(given.keys() - wanted.keys() - _NEUTRAL_ROPE_KEYS):
        raise UnsupportedModelError(f"rope type {rope_type!r} has no parameter {', '.join(unknown)}")
    values = {name: value for name, value in given.items() if name in wanted and value is not None}
    outside = raw.get("rope_theta")
    values.setdefault("rope_theta", 10000.0 if outside is None else outside)
    if variant is DynamicRope:  # transformers takes the model's own length here, whatever the parameters say
        values["original_max_position_embeddings"] = max_positions
    elif "original_max_position_embeddings" in wanted:
        # beside the parameters, as Phi-3 has it, it wins
        outside = raw.get("original_max_position_embeddings")
        inside = values.get("original_max_position_embeddings", max_positions)
        values["original_max_position_embeddings"] = inside if outside is None else outside
    values = {name: _ROPE_CHECKS[name](name, value) for name, value in values.items()}
    if variant in (YarnRope, LongRope):
        values.setdefault("factor", max_positions / values["original_max_position_embeddings"])
    lacking = [name for name, each in wanted.items() if each.default is MISSING and name not in values]
    if lacking:
        raise CheckpointError(f"rope type {rope_type!r} lacks {', '.join(lacking)}")
    rope = variant(**values)
    _check_formula(rope, head_dim)
    return rope


def _rope_parameters(raw: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = raw.get(name)
    if value is not None and not isinstance(value, Mapping):
        _odd(name, "an object", value)
    return dict(value or {})


def _check_formula(rope: DefaultRope, head_dim: int) -> None:
    """Refuses values that are fine each, but divide by zero, or turn the scaling around, in the rope's formula."""
    if isinstance(rope, Llama3Rope) and rope.low_freq_factor >= rope.high_freq_factor:
        _odd("low_freq_factor", f"less than high_freq_factor ({rope.high_freq_factor})", rope.low_freq_factor)
    if isinstance(rope, YarnRope) and math.log(rope.rope_theta) == 0:
        _odd("rope_theta", "other than 1 for a yarn rope", rope.rope_theta)
    if isinstance(rope, DynamicRope) and head_dim == 2:
        raise UnsupportedModelError(f"head_dim {head_dim} is not supported with a dynamic rope, which needs 4 or more")
    if isinstance(rope, LongRope):
        if rope.original_max_position_embeddings == 1:
            _odd("original_max_position_embeddings", "at least 2 for a longrope", 1)
        for name, factors in (("short_factor", rope.short_factor), ("long_factor", rope.long_factor)):
            if len(factors) != head_dim // 2:
                raise CheckpointError(f"{name} of the rope needs {head_dim // 2} numbers, got {len(factors)}")


def _context_limit(rope: DefaultRope, max_positions: int) -> int:
    """Linear, dynamic and YaRN scaling stretch a context; some configs state it stretched already, some do not."""
    if isinstance(rope, LinearRope | DynamicRope):
        limit = int(max_positions * rope.factor)
    elif isinstance(rope, YarnRope):
        limit = max(max_positions, int(rope.original_max_position_embeddings * rope.factor))
    else:
        return max_positions
    if not 1 <= limit <= _MOST:
        _odd("factor", f"such that the context has from 1 to {_MOST} tokens", rope.factor)
    return limit
