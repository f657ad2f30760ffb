"""Tiny models as folders on disk, for tests: a random one, and one that answers with a script.

Both write `config.json`, `generation_config.json`, `model.safetensors` (or shards and their index) and the tokenizer's
files. Same arguments, same bytes. They take some tens of milliseconds; keep a folder for a whole test session.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

FloatArray = NDArray[np.float32]

END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
"""Ids 0, 1 (beginning of sequence) and 2 (end of sequence, padding) of every tokenizer written here."""

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)
_TRAINING_TEXT = (
    "The quick brown fox jumps over the lazy dog. A small model learns to say that the capital of France is Paris, "
    "and that the answer to this question is in the book on the table. When the engine starts, it reads the weights, "
    "builds the cache, and waits for the first request; then it plans a step, runs the step, and gives every stream "
    "its next token. Nothing is lost when one stream ends early, because the blocks of that stream go back to the "
    "pool. Some people write programs in the morning, others in the evening. What would you like to know about them? "
    "One, two, three, four, five, six, seven, eight, nine, ten. There are many things that should not be said twice. "
)


def tiny_config(**overrides: Any) -> dict[str, Any]:
    """A Hugging Face config of a two-layer Llama (vocabulary 512, hidden 64, 4 heads over 2 KV heads, untied).

    Any field may be replaced, `model_type` (llama, mistral, qwen2, qwen3) included.
    """
    config: dict[str, Any] = {
        "model_type": "llama",
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "torch_dtype": "float32",
    }
    config.update(overrides)
    config.setdefault("architectures", [_ARCHITECTURES.get(config["model_type"], "UnknownForCausalLM")])
    return config


def tiny_weights(config: Mapping[str, Any], seed: int = 0) -> dict[str, FloatArray]:
    """Random float32 weights under Hugging Face names, scaled so that logits spread widely and depend on every one."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int, std: float, mean: float = 0.0) -> FloatArray:
        return (rng.standard_normal(shape, dtype=np.float32) * std + mean).astype(np.float32)

    family, hidden, inner = config["model_type"], config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    kv_size = (config.get("num_key_value_heads") or heads) * head_dim
    attention_bias = family in ("llama", "qwen3") and bool(config.get("attention_bias"))
    qkv_bias = attention_bias or family == "qwen2"
    mlp_bias = family == "llama" and bool(config.get("mlp_bias"))
    linears = {  # name: (out, in, has bias)
        "self_attn.q_proj": (heads * head_dim, hidden, qkv_bias),
        "self_attn.k_proj": (kv_size, hidden, qkv_bias),
        "self_attn.v_proj": (kv_size, hidden, qkv_bias),
        "self_attn.o_proj": (hidden, heads * head_dim, attention_bias),
        "mlp.gate_proj": (inner, hidden, mlp_bias),
        "mlp.up_proj": (inner, hidden, mlp_bias),
        "mlp.down_proj": (hidden, inner, mlp_bias),
    }
    tied = config["tie_word_embeddings"]
    # A tied table this small keeps the residual stream, and so the next token, from being the input token itself.
    weights = {"model.embed_tokens.weight": normal(config["vocab_size"], hidden, std=0.3 if tied else 1.0)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for name, (rows, columns, bias) in linears.items():
            weights[f"{prefix}{name}.weight"] = normal(rows, columns, std=1.5 * columns**-0.5)
            if bias:
                weights[f"{prefix}{name}.bias"] = normal(rows, std=0.3)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}{name}.weight"] = normal(hidden, std=0.2, mean=1.0)
        if family == "qwen3":
            for name in ("q_norm", "k_norm"):
                weights[f"{prefix}self_attn.{name}.weight"] = normal(head_dim, std=0.2, mean=1.0)
    weights["model.norm.weight"] = normal(hidden, std=0.2, mean=1.0)
    if not tied:
        weights["lm_head.weight"] = normal(config["vocab_size"], hidden, std=3.0 * hidden**-0.5)
    return weights


def write_tiny_model(  # noqa: PLR0913 (all but the first by keyword)
    folder: Path,
    *,
    config: Mapping[str, Any] | None = None,
    seed: int = 0,
    head: bool | None = None,
    shards: int = 1,
    chat_template: str | None = None,
) -> Path:
    """The random model of `tiny_config(**config)` with a byte-level tokenizer of 512 tokens. Returns the folder.

    `head` says whether `lm_head.weight` is in the file (None: where it is not tied); a tied model's is the embedding.
    """
    full = tiny_config(**(config or {}))
    weights = tiny_weights(full, seed)
    if head and full["tie_word_embeddings"]:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].copy()
    if head is False:
        weights.pop("lm_head.weight", None)
    _write_model(folder, full, weights, shards)
    write_byte_tokenizer(folder, chat_template=chat_template)
    return folder


def write_script_model(  # noqa: PLR0913 (all but two by keyword)
    folder: Path,
    scripts: Sequence[Sequence[int]],
    *,
    tokenizer: Path | None = None,
    eos_token_ids: Sequence[int] = (2,),
    ties: Sequence[tuple[int, int]] = (),
    config: Mapping[str, Any] | None = None,
) -> Path:
    """A model whose greedy answer to a prompt that ends in `script[0]` is `script[1:]`. Returns the folder.

    An id may have one successor in all scripts together, itself included (a loop at the end). Nothing attends: every
    layer adds zero, so only the last token counts. `tokenizer` is a folder whose tokenizer files are copied and whose
    vocabulary is taken; without it, the byte-level one of `write_tiny_model`. A pair (a, b) of `ties` gives b the
    very logits of a.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if tokenizer is None:
        write_byte_tokenizer(folder)
    else:
        for name in _TOKENIZER_FILES:
            if (tokenizer / name).exists() and tokenizer != folder:
                shutil.copy(tokenizer / name, folder / name)
    vocab_size = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size(with_added_tokens=True)
    full = tiny_config(**{"vocab_size": vocab_size, "eos_token_id": list(eos_token_ids), **(config or {})})
    weights = tiny_weights(full)
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight[:] = 0.0
    weights["model.norm.weight"][:] = 1.0
    embedding = weights["model.embed_tokens.weight"]
    embedding /= np.linalg.norm(embedding, axis=1, keepdims=True)
    head = weights["lm_head.weight"] = np.zeros_like(embedding)
    successors: dict[int, int] = {}
    for script in scripts:
        for before, after in pairwise(script):
            if successors.setdefault(before, after) != after:
                raise ValueError(f"token {before} is followed by both {successors[before]} and {after}")
    for before, after in successors.items():
        head[after] += 20.0 * embedding[before]
    for source, target in ties:
        head[target] = head[source]
    _write_model(folder, full, weights, shards=1)
    return folder


@dataclass(frozen=True, slots=True)
class PieceModel:
    """A script model over its own pieces of text."""

    folder: Path
    prompt: str  # the first piece: the prompt that makes the model say the rest
    text: str  # what it answers
    token_ids: tuple[int, ...]  # of the answer, the end of sequence included


def write_piece_model(folder: Path, pieces: Sequence[str], *, chat_template: str | None = None) -> PieceModel:
    """A script model with one token per piece, so that texts which repeat characters can be scripted.

    A prompt that ends in `pieces[0]` is answered by the other pieces and the end of sequence. Piece i has id i + 3.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_piece_tokenizer(folder, pieces, chat_template=chat_template)
    script = [*range(3, 3 + len(pieces)), 2]
    write_script_model(folder, [script], tokenizer=folder)
    return PieceModel(folder, pieces[0], "".join(pieces[1:]), tuple(script[1:]))


def write_byte_tokenizer(folder: Path, *, chat_template: str | None = None) -> None:
    """A byte-level BPE tokenizer of 512 tokens: 3 special ones, 256 bytes, the rest learnt from a few sentences."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=[END_OF_TEXT, IM_START, IM_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_TRAINING_TEXT], trainer)
    assert tokenizer.get_vocab_size() == 512
    _write_tokenizer(folder, tokenizer, chat_template)


def write_piece_tokenizer(folder: Path, pieces: Sequence[str], *, chat_template: str | None = None) -> None:
    """A tokenizer with one token per piece, ids from 3 on. Of equal pieces, text is encoded to the first."""
    repeat = "\ue000"  # a private-use character marks repeats, since a vocabulary holds no text twice
    seen: dict[str, int] = {}
    vocabulary = {END_OF_TEXT: 0, IM_START: 1, IM_END: 2}
    for piece in pieces:
        seen[piece] = seen.get(piece, -1) + 1
        vocabulary[piece + repeat * seen[piece]] = len(vocabulary)
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=END_OF_TEXT))
    longest_first = sorted(seen, key=lambda piece: (-len(piece), piece))
    pattern = "|".join("".join(f"\\x{{{ord(character):x}}}" for character in piece) for piece in longest_first)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    tokenizer.decoder = decoders.Sequence([decoders.Replace(repeat, ""), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in (END_OF_TEXT, IM_START, IM_END)])
    _write_tokenizer(folder, tokenizer, chat_template)


def _write_tokenizer(folder: Path, tokenizer: Tokenizer, chat_template: str | None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": IM_START,
        "eos_token": IM_END,
        "pad_token": IM_END,
        "unk_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
    }
    if chat_template is not None:
        settings["chat_template"] = chat_template
    _write_json(folder / "tokenizer_config.json", settings)


def _write_model(folder: Path, config: Mapping[str, Any], weights: Mapping[str, FloatArray], shards: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", config)
    generation = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(folder / "generation_config.json", generation)
    if shards == 1:
        save_file(dict(weights), folder / "model.safetensors", metadata={"format": "pt"})
        return
    names = list(weights)
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {name: weights[name] for name in names[shard::shards]}
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    total = sum(weight.nbytes for weight in weights.values())
    _write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False), encoding="utf-8")
