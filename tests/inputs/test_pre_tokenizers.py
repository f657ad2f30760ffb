from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from asyncllm.errors import TokenizerError
from asyncllm.inputs.pre_tokenizers import _RULES, pre_tokenizer_rule

TEXTS = st.text(max_size=40) | st.text(" \r\n\tabAB12'sé中한🌶.,!?/_\u0301", max_size=40)


def words(name: str, text: str) -> list[str]:
    spans = pre_tokenizer_rule(name).pre_tokenizer().pre_tokenize_str(text)
    return [text[start:end] for _, (start, end) in spans]


@pytest.mark.parametrize("name", sorted(_RULES))
@given(text=TEXTS)
@settings(max_examples=15, deadline=None)
def test_every_rule_keeps_all_of_the_text(name: str, text: str) -> None:
    spans = pre_tokenizer_rule(name).pre_tokenizer().pre_tokenize_str(text)
    joined = "".join(word for word, _ in spans)
    alone = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    assert joined == "".join(word for word, _ in alone)


@given(text=TEXTS)
@settings(max_examples=100, deadline=None)
def test_the_packages_own_forms(text: str) -> None:
    """GPT-2 and SmolLM are in the package as pre-tokenizers, not as patterns."""
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
    smollm = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
    for name, own in (("gpt-2", gpt2), ("smollm", smollm)):
        assert pre_tokenizer_rule(name).pre_tokenizer().pre_tokenize_str(text) == own.pre_tokenize_str(text)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("gpt-2", "It's 2024  now", ["It", "'s", " 2024", " ", " now"]),
        ("smollm", "in 2024", ["in", " ", "2", "0", "2", "4"]),
        ("llama-bpe", "I'LL pay $12345", ["I", "'LL", " pay", " $", "123", "45"]),
        ("qwen2", "I'LL pay 123\n\n!", ["I", "'LL", " pay", " ", "1", "2", "3", "\n\n", "!"]),
        ("qwen35", "e\u0301a b", ["e\u0301a", " b"]),
        ("tekken", "HelloWorld isn't/\n", ["Hello", "World", " isn", "'t", "/\n"]),
        ("gpt-4o", "HelloWorld isn't 1234", ["Hello", "World", " isn't", " ", "123", "4"]),
        ("deepseek-v3", "1234中文 ok", ["123", "4", "中文", " ok"]),
        ("default", "a+b 1234", ["a", "+", "b", " ", "123", "4"]),
        ("falcon", "a+b 1234", ["a", "+", "b", " ", "123", "4"]),
    ],
)
def test_how_words_are_cut(name: str, text: str, expected: list[str]) -> None:
    assert words(name, text) == expected


def test_unknown_names_are_refused() -> None:
    with pytest.raises(TokenizerError, match="'nonesuch', which is not known"):
        pre_tokenizer_rule("nonesuch")
