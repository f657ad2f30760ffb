from __future__ import annotations

import heapq
import json
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncllm.errors import TokenizerError
from asyncllm.inputs.tokenizer import Tokenizer, TokenizerData
from asyncllm.inputs.tokenizer_gguf import TokenType
from tests.inputs import toy_tokenizers as toys

SPACE = "▁"
TEXTS = (
    st.text(max_size=60)
    | st.text(" \n\tab1'sé中🌶\u0301", max_size=60)
    | st.lists(
        st.sampled_from(
            ["<|im_end|>", "<|im_start|>", "user", " don't", "12345", "  ", "\r\n", "한국", "naïve", "e\u0301"]
        )
    ).map("".join)
)


def load(fields: dict[str, Any]) -> Tokenizer:
    return Tokenizer.load(TokenizerData(gguf_fields=fields))


def byte_level_fields(**changes: Any) -> dict[str, Any]:
    vocab, merges = toys.byte_level_vocabulary()
    tokens = [token for token in vocab if token != "far"] + ["<s>", "</s>", "<think>", "[PAD1]"]
    types = (
        [TokenType.NORMAL] * (len(tokens) - 4) + [TokenType.CONTROL] * 2 + [TokenType.USER_DEFINED, TokenType.UNUSED]
    )
    fields = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": [int(kind) for kind in types],
        "merges": [" ".join(pair) for pair in merges],
        "bos_token_id": tokens.index("<s>"),
        "eos_token_id": tokens.index("</s>"),
    }
    return {f"tokenizer.ggml.{name}": value for name, value in (fields | changes).items() if value is not None}


@cache
def published_smollm2() -> tokenizers.Tokenizer:
    """The same vocabulary in a tokenizer.json of the published form."""
    fields = toys.smollm2_fields()
    tokens = fields["tokenizer.ggml.tokens"]
    digits = {"type": "Digits", "individual_digits": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return tokenizers.Tokenizer.from_str(
        json.dumps(
            {
                "version": "1.0",
                "added_tokens": [{"id": i, "content": token} | flags for i, token in enumerate(tokens[:17])],
                "normalizer": None,
                "pre_tokenizer": {"type": "Sequence", "pretokenizers": [digits, byte_level]},
                "post_processor": None,
                "decoder": byte_level,
                "model": {
                    "type": "BPE",
                    "vocab": {token: i for i, token in enumerate(tokens)},
                    "merges": fields["tokenizer.ggml.merges"],
                },
            }
        )
    )


@given(text=TEXTS)
@settings(max_examples=150, deadline=None)
def test_smollm2_encodes_as_its_tokenizer_json(text: str) -> None:
    ids = toys.smollm2().encode(text)
    assert ids == published_smollm2().encode(text).ids
    assert toys.smollm2().decode(ids) == published_smollm2().decode(ids)


def test_token_types() -> None:
    tokenizer = load(byte_level_fields())
    bos, eos, think = (tokenizer.token_id(token) for token in ("<s>", "</s>", "<think>"))
    assert tokenizer.special_ids == {bos, eos}
    assert tokenizer.encode("<s>a<think>") == [bos, 97, think]
    assert tokenizer.decode([bos, 97, think, eos]) == "a<think>"
    assert tokenizer.token_id("[PAD1]") is None
    assert (tokenizer.eos_token_ids, tokenizer.bos_token_id) == ({eos}, bos)
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}


def test_bos_and_eos_as_the_file_says() -> None:
    bos, eos = (load(byte_level_fields()).token_id(token) for token in ("<s>", "</s>"))
    cases: list[tuple[dict[str, Any], list[int | None]]] = [
        ({}, [97]),
        ({"add_bos_token": True}, [bos, 97]),
        ({"add_bos_token": True, "add_eos_token": True}, [bos, 97, eos]),
        ({"pre": "llama-bpe"}, [bos, 97]),
        ({"pre": "llama-bpe", "add_bos_token": False}, [97]),
        ({"pre": "llama-bpe", "bos_token_id": None}, [97]),
    ]
    for changes, ids in cases:
        tokenizer = load(byte_level_fields(**changes))
        assert tokenizer.encode("a") == ids
        assert tokenizer.encode("a", add_special_tokens=False) == [97]


def test_every_end_of_a_turn_ends_generation() -> None:
    fields = byte_level_fields()
    tokens = fields["tokenizer.ggml.tokens"]
    tokens[-4:] = ["<|im_end|>", "<|eot_id|>", "<|end|>", "[PAD1]"]  # "<|end|>" is not a control token
    fields |= {"tokenizer.ggml.eos_token_id": len(tokens) - 4, "tokenizer.ggml.eot_token_id": 7}
    assert load(fields).eos_token_ids == {len(tokens) - 4, len(tokens) - 3, 7}


def test_whole_words_before_merges() -> None:
    for pre, ids in {"llama-bpe": ["cab"], "gpt-2": ["c", "a", "b"]}.items():
        fields = byte_level_fields(pre=pre, add_bos_token=False)
        fields["tokenizer.ggml.tokens"][-2] = "cab"
        fields["tokenizer.ggml.token_type"][-2] = int(TokenType.NORMAL)
        tokenizer = load(fields)
        assert tokenizer.encode("cab") == [tokenizer.token_id(token) for token in ids]


def test_chat_templates() -> None:
    fields = byte_level_fields() | {"tokenizer.chat_template": "one", "tokenizer.chat_template.tool_use": "two"}
    assert load(fields).chat_templates == {"default": "one", "tool_use": "two"}
    assert load(byte_level_fields()).chat_templates == {}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "bert"}, "tokenizer.ggml.model is 'bert'"),
        ({"model": None}, "tokenizer.ggml.model is None"),
        ({"pre": "none-such"}, "'none-such', which is not known"),
        ({"tokens": None}, "no tokenizer.ggml.tokens"),
        ({"merges": None}, "no tokenizer.ggml.merges"),
        ({"merges": ["ab"]}, "'ab', which is not two tokens"),
        ({"merges": ["no such"]}, "cannot be built"),
        ({"tokens": ["a", "a"]}, "holds a token twice"),
        ({"token_type": [1]}, "1 token types"),
        ({"model": "llama"}, "no tokenizer.ggml.scores"),
        ({"model": "llama", "scores": [0.0]}, "1 scores"),
    ],
)
def test_what_is_missing_or_unknown_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        load(byte_level_fields(**changes))


PIECES = ["▁t", "he", "▁the", "▁a", "ab", "aab", "▁▁", "▁▁▁▁", "th", "▁th", "ca", "cab", "▁cab", "é", "中", "bb", "abb"]


def sentencepiece_fields(**changes: Any) -> dict[str, Any]:
    letters = [SPACE, *"theabc"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES, *letters, "<think>"]
    types = [TokenType.UNKNOWN, *[TokenType.CONTROL] * 2, *[TokenType.BYTE] * 256]
    types += [TokenType.NORMAL] * (len(PIECES) + len(letters)) + [TokenType.USER_DEFINED]
    fields = {
        "model": "llama",
        "tokens": tokens,
        "token_type": [int(kind) for kind in types],
        "scores": [0.0] * 259 + [-float(rank) for rank in range(len(tokens) - 259)],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    return {f"tokenizer.ggml.{name}": value for name, value in (fields | changes).items() if value is not None}


def sentencepiece_encode(text: str, fields: dict[str, Any]) -> list[int]:
    """SentencePiece's own way: join the neighbours whose joined piece has the highest score, the leftmost of equals."""
    tokens = fields["tokenizer.ggml.tokens"]
    ids = {token: i for i, token in enumerate(tokens) if fields["tokenizer.ggml.token_type"][i] == TokenType.NORMAL}
    scores = fields["tokenizer.ggml.scores"]
    parts = list(text.replace(" ", SPACE))
    while True:
        joins = [
            (-scores[ids[left + right]], at) for at, (left, right) in enumerate(pairwise(parts)) if left + right in ids
        ]
        if not joins:
            break
        _, at = heapq.nsmallest(1, joins)[0]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    found: list[int] = []
    for part in parts:
        found += [ids[part]] if part in ids else [3 + byte for byte in part.encode()]
    return found


@given(text=st.text(" theabc", max_size=30) | st.text(" aé中🌶\n", max_size=12), prefix=st.booleans())
@settings(max_examples=200, deadline=None)
def test_sentencepiece_by_scores(text: str, prefix: bool) -> None:
    tokenizer = sentencepiece(prefix)
    fields = sentencepiece_fields()
    expected = sentencepiece_encode(f" {text}" if prefix and text else text, fields)
    assert tokenizer.encode(text) == [1, *expected]
    assert tokenizer.decode(expected) == text


@cache
def sentencepiece(prefix: bool) -> Tokenizer:
    return load(sentencepiece_fields(add_space_prefix=prefix))


def test_sentencepiece_special_and_added_tokens() -> None:
    tokenizer = sentencepiece(True)
    think = tokenizer.token_id("<think>")
    assert tokenizer.encode("a<think></s>") == [1, tokenizer.token_id("▁a"), think, 2]
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.token_bytes(3 + 0xE4) == b"\xe4"
    assert load(sentencepiece_fields(add_bos_token=False)).encode("a") == [tokenizer.token_id("▁a")]
