"""Builds the `TokenTable` of a tokenizer: its decoder, read and turned into one text an id.

The texts come out of the tokenizer's own decoder; what is known here is only which decoders work token by token, and
what they do with bytes and at the start of a text. Facts: the `decoders` module of the `tokenizers` crate.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tokenizers

from asyncllm.outputs.token_table import TokenTable

_CHUNK = 4096
"""Ids decoded at a time: turning the result into Python strings holds the interpreter lock."""

_PER_TOKEN = frozenset({"Replace", "Strip", "Metaspace", "WordPiece"})


def byte_alphabet() -> dict[str, int]:
    """Character to byte, of byte-level BPE: printable Latin-1 stands for itself, the other 68 bytes for the characters
    from U+0100 on (`bytes_to_unicode` of GPT-2's encoder.py)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_ALPHABET = byte_alphabet()


@dataclass(frozen=True, slots=True)
class _Decoder:
    """What a decoder does that is not per token."""

    byte_level: bool = False
    byte_fallback: bool = False
    first_differs: bool = False  # the first token of a text is decoded in its own way
    stripped: str = ""


def vocabulary_size(backend: tokenizers.Tokenizer) -> int:
    """The highest id + 1."""
    return max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1


def build_token_table(backend: tokenizers.Tokenizer, special_ids: frozenset[int]) -> TokenTable | None:
    """The table of this tokenizer, or None where its decoder does more than a table can say."""
    decoder = _read_decoder(_decoder_state(backend))
    if decoder is None:
        return None
    alone = _texts_alone(backend)
    texts: list[str | None] = [*alone]
    first_texts: list[str | None] | None = None
    if decoder.byte_level:
        fragments = _partial_characters(backend, alone)
    else:
        fragments = _fallback_bytes(backend) if decoder.byte_fallback else {}
        if decoder.first_differs or decoder.stripped:
            before = _plain_token(backend, alone)
            if before is None:
                return None
            texts = [*_texts_after(backend, len(alone), before)]
            first_texts = [*alone] if decoder.first_differs else None
    for token_id in fragments:
        texts[token_id] = None
        if first_texts is not None:
            first_texts[token_id] = None
    return TokenTable(
        texts=texts,
        fragments=fragments,
        special_ids=special_ids,
        absent_ids=_absent_ids(backend, alone),
        byte_level=decoder.byte_level,
        first_texts=first_texts,
        stripped=decoder.stripped,
    )


def _decoder_state(backend: tokenizers.Tokenizer) -> Mapping[str, Any] | None:
    if backend.decoder is None:
        return None
    state: Mapping[str, Any] = json.loads(backend.decoder.__getstate__())
    return state


def _read_decoder(state: Mapping[str, Any] | None) -> _Decoder | None:
    """None for a decoder that is not known to work token by token."""
    if state is None:
        return _Decoder(first_differs=True)  # tokens joined by spaces
    steps: Sequence[Mapping[str, Any]] = state["decoders"] if state["type"] == "Sequence" else [state]
    kinds = [step["type"] for step in steps]
    if kinds and kinds[0] == "ByteLevel" and all(kind == "Fuse" for kind in kinds[1:]):
        return _Decoder(byte_level=True)
    count = next((i for i, kind in enumerate(kinds) if kind not in _PER_TOKEN), len(kinds))
    first_differs = any(kind in ("Metaspace", "WordPiece") for kind in kinds[:count])
    rest = kinds[count:]
    byte_fallback = rest[:1] == ["ByteFallback"]
    if byte_fallback:
        rest = rest[1:]
    if rest == ["Fuse", "Strip"] and steps[-1]["stop"] == 0:
        stripped = steps[-1]["content"] * steps[-1]["start"]
    elif rest in ([], ["Fuse"]):
        stripped = ""
    else:
        return None
    return _Decoder(byte_fallback=byte_fallback, first_differs=first_differs, stripped=stripped)


def _decode_each(backend: tokenizers.Tokenizer, sequences: Sequence[list[int]]) -> list[str]:
    texts: list[str] = []
    for start in range(0, len(sequences), _CHUNK):
        texts += backend.decode_batch(sequences[start : start + _CHUNK], skip_special_tokens=False)
    return texts


def _texts_alone(backend: tokenizers.Tokenizer) -> list[str]:
    """The decode of each id by itself, from 0 to the highest."""
    count = backend.get_vocab_size(with_added_tokens=True)
    texts = _decode_each(backend, [[token_id] for token_id in range(count)])
    if _absent_ids(backend, texts):  # as many ids are higher than the count
        texts += _decode_each(backend, [[token_id] for token_id in range(count, vocabulary_size(backend))])
    return texts


def _absent_ids(backend: tokenizers.Tokenizer, alone: Sequence[str]) -> frozenset[int]:
    return frozenset(i for i, text in enumerate(alone) if not text and backend.id_to_token(i) is None)


def _partial_characters(backend: tokenizers.Tokenizer, alone: Sequence[str]) -> dict[int, bytes]:
    """The ids of a byte-level tokenizer that are not UTF-8 by themselves."""
    fragments: dict[int, bytes] = {}
    for token_id in [token_id for token_id, text in enumerate(alone) if "\ufffd" in text]:
        data = _alphabet_bytes(backend.id_to_token(token_id))
        if data is not None and data != alone[token_id].encode():
            fragments[token_id] = data
    return fragments


def _alphabet_bytes(token: str | None) -> bytes | None:
    """None for a token with a character outside the alphabet: the decoder then takes it as it is."""
    if token is None or not all(character in _ALPHABET for character in token):
        return None
    return bytes(_ALPHABET[character] for character in token)


def _plain_token(backend: tokenizers.Tokenizer, alone: Sequence[str]) -> int | None:
    """An id whose text is its token as it is: what stands before another token without touching it."""
    return next((i for i, text in enumerate(alone) if text and text == backend.id_to_token(i)), None)


def _texts_after(backend: tokenizers.Tokenizer, vocab_size: int, before: int) -> list[str]:
    """What each id adds to a text that holds one token."""
    (prefix,) = _decode_each(backend, [[before]])
    texts = _decode_each(backend, [[before, token_id] for token_id in range(vocab_size)])
    return [text[len(prefix) :] for text in texts]


def _fallback_bytes(backend: tokenizers.Tokenizer) -> dict[int, bytes]:
    """The ids of tokens such as <0x0A>."""
    found: dict[int, bytes] = {}
    for byte in range(256):
        for form in (f"<0x{byte:02X}>", f"<0x{byte:02x}>"):
            token_id = backend.token_to_id(form)
            if token_id is not None:
                found[token_id] = bytes([byte])
    return found
