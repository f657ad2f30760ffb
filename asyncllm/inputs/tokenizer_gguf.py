"""Builds a tokenizer from the metadata fields of a GGUF file.

Two kinds are known: "gpt2", byte-level BPE with merges and a named pre-tokenizer, and "llama", SentencePiece BPE,
whose merges follow from the scores of its tokens. Facts: the GGUF specification's tokenizer section, and the defaults
of llama.cpp's llama-vocab.cpp.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers

from asyncllm.errors import TokenizerError
from asyncllm.inputs.pre_tokenizers import pre_tokenizer_rule
from asyncllm.inputs.tokenizer_folder import named_templates, set_bos_and_eos
from asyncllm.inputs.tokenizer_parts import TokenizerParts

SPACE = "\u2581"
"""What SentencePiece writes for a space."""

_TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|eom_id|>")
"""Control tokens that end a turn whether or not the file names them as such: older files do not."""


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class _Fields:
    """The `tokenizer.` fields of a file."""

    values: Mapping[str, Any]

    def get(self, name: str, default: Any = None) -> Any:
        return self.values.get(f"tokenizer.ggml.{name}", default)

    def array(self, name: str) -> list[Any]:
        values = self.get(name)
        if values is None:
            raise TokenizerError(f"the GGUF file has no tokenizer.ggml.{name}")
        return list(values)

    def tokens(self) -> list[str]:
        tokens = self.array("tokens")
        if len(set(tokens)) != len(tokens):
            raise TokenizerError("the GGUF file's tokenizer.ggml.tokens holds a token twice")
        return tokens

    def types(self, count: int) -> list[int]:
        types = list(self.get("token_type", [TokenType.NORMAL] * count))
        if len(types) != count:
            raise TokenizerError(f"the GGUF file has {len(types)} token types for {count} tokens")
        return [int(kind) for kind in types]


def read_tokenizer_gguf(values: Mapping[str, Any]) -> TokenizerParts:
    """Builds the tokenizer that these fields describe. Raises `TokenizerError` for what is missing or not known."""
    fields = _Fields(values)
    model = fields.get("model")
    builders = {"gpt2": _byte_level_bpe, "llama": _sentencepiece_bpe}
    if model not in builders:
        raise TokenizerError(
            f"the GGUF file's tokenizer.ggml.model is {model!r}; known are {' and '.join(map(repr, builders))}"
        )
    tokens = fields.tokens()
    try:
        backend, add_bos = builders[model](fields, tokens)
    except TokenizerError:
        raise
    except Exception as error:  # the package raises bare Exception for a vocabulary that does not fit its merges
        raise TokenizerError(f"the GGUF file's tokenizer cannot be built: {error}") from error
    types = fields.types(len(tokens))
    _add_tokens(backend, tokens, types)
    special_tokens = _special_tokens(fields, tokens)
    set_bos_and_eos(
        backend,
        special_tokens.get("bos_token") if fields.get("add_bos_token", add_bos) else None,
        special_tokens.get("eos_token") if fields.get("add_eos_token", False) else None,
    )
    return TokenizerParts(
        backend=backend,
        eos_token_ids=_end_ids(fields, tokens, types),
        special_tokens=special_tokens,
        chat_templates=_chat_templates(values),
    )


def _byte_level_bpe(fields: _Fields, tokens: Sequence[str]) -> tuple[tokenizers.Tokenizer, bool]:
    """The tokenizer, and whether it adds a BOS where the file does not say."""
    rule = pre_tokenizer_rule(fields.get("pre", "default"))
    types = fields.types(len(tokens))
    # Unused tokens fill a vocabulary up to a round size; the model's own tokenizer does not have them.
    vocab = {token: i for i, token in enumerate(tokens) if types[i] != TokenType.UNUSED}
    model = models.BPE(vocab=vocab, merges=_merges(fields), ignore_merges=rule.whole_words)
    backend = tokenizers.Tokenizer(model)
    normalizer = rule.normalizer()
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = rule.pre_tokenizer()
    backend.decoder = decoders.ByteLevel()
    return backend, rule.add_bos


def _merges(fields: _Fields) -> list[tuple[str, str]]:
    merges = []
    for merge in fields.array("merges"):
        space = merge.find(" ", 1)
        if space < 0:
            raise TokenizerError(f"the GGUF file's tokenizer.ggml.merges holds {merge!r}, which is not two tokens")
        merges.append((merge[:space], merge[space + 1 :]))
    return merges


def _sentencepiece_bpe(fields: _Fields, tokens: Sequence[str]) -> tuple[tokenizers.Tokenizer, bool]:
    """The tokenizer, and whether it adds a BOS where the file does not say."""
    types = fields.types(len(tokens))
    scores = fields.array("scores")
    if len(scores) != len(tokens):
        raise TokenizerError(f"the GGUF file has {len(scores)} scores for {len(tokens)} tokens")
    unknown = next((token for token, kind in zip(tokens, types, strict=True) if kind == TokenType.UNKNOWN), None)
    model = models.BPE(
        vocab={token: i for i, token in enumerate(tokens)},
        merges=list(_merges_of_scores(tokens, types, scores)),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = tokenizers.Tokenizer(model)
    to_space = normalizers.Replace(" ", SPACE)
    undo_space = decoders.Replace(SPACE, " ")
    if fields.get("add_space_prefix", True):
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), to_space])
        backend.decoder = decoders.Sequence(
            [undo_space, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    else:
        backend.normalizer = to_space
        backend.decoder = decoders.Sequence([undo_space, decoders.ByteFallback(), decoders.Fuse()])
    return backend, True


def _merges_of_scores(
    tokens: Sequence[str], types: Sequence[int], scores: Sequence[float]
) -> Iterator[tuple[str, str]]:
    """SentencePiece joins the pair whose joined token has the highest score; the same as merges in that order. Among
    the pairs that join into one token, the one whose parts have the lower ids comes first (as in transformers)."""
    mergeable = (TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.UNUSED)
    ids = {token: i for i, token in enumerate(tokens) if types[i] in mergeable}
    for token in sorted(ids, key=lambda token: -scores[ids[token]]):
        pairs = [
            (left, right)
            for cut in range(1, len(token))
            if (left := token[:cut]) in ids and (right := token[cut:]) in ids
        ]
        if len(pairs) > 1:
            pairs.sort(key=lambda pair: (ids[pair[0]], ids[pair[1]]))
        yield from pairs


def _add_tokens(backend: tokenizers.Tokenizer, tokens: Sequence[str], types: Sequence[int]) -> None:
    special = (TokenType.CONTROL, TokenType.UNKNOWN)
    backend.add_tokens(
        [
            AddedToken(token, special=kind in special, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind in special or kind == TokenType.USER_DEFINED
        ]
    )


def _special_tokens(fields: _Fields, tokens: Sequence[str]) -> dict[str, str]:
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "sep": "seperator", "mask": "mask"}
    found = {}
    for name, field in names.items():  # "seperator" is how the specification spells it
        token_id = fields.get(f"{field}_token_id")
        if token_id is not None and 0 <= token_id < len(tokens):
            found[f"{name}_token"] = tokens[token_id]
    return found


def _end_ids(fields: _Fields, tokens: Sequence[str], types: Sequence[int]) -> frozenset[int]:
    named = (fields.get(f"{name}_token_id") for name in ("eos", "eot", "eom"))
    ends = {int(token_id) for token_id in named if token_id is not None and 0 <= token_id < len(tokens)}
    ends |= {i for i, token in enumerate(tokens) if types[i] == TokenType.CONTROL and token in _TURN_ENDS}
    return frozenset(ends)


def _chat_templates(values: Mapping[str, Any]) -> dict[str, str]:
    prefix = "tokenizer.chat_template"
    named = {name.removeprefix(f"{prefix}."): text for name, text in values.items() if name.startswith(f"{prefix}.")}
    return named | named_templates(values.get(prefix))
