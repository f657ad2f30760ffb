from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers, pre_tokenizers

from asyncllm.inputs.token_bound import token_bound
from tests.inputs import toy_tokenizers as toys


@given(text=st.text(max_size=200) | st.text(" \x04\n", max_size=200))
@settings(max_examples=60, deadline=None)
def test_no_text_has_fewer_tokens(text: str) -> None:
    tokenizer = toys.smollm2()
    bound = token_bound(tokenizer._backend, tokenizer.table)
    assert bound is not None
    assert len(tokenizer.encode(text)) >= bound.at_least(text)


@pytest.mark.parametrize("builder", [toys.llama_like, toys.metaspace, toys.wordpiece, toys.suffixed])
def test_only_byte_level_tokenizers_have_a_bound(builder: object) -> None:
    tokenizer = builder()  # type: ignore[operator]
    assert token_bound(tokenizer._backend, tokenizer.table) is None


def test_no_bound_where_text_may_vanish() -> None:
    for change in (
        lambda backend: setattr(backend, "normalizer", normalizers.NFC()),
        lambda backend: setattr(backend, "pre_tokenizer", pre_tokenizers.Split("\n", "removed")),
        lambda backend: setattr(backend, "pre_tokenizer", pre_tokenizers.WhitespaceSplit()),
        lambda backend: backend.add_tokens([AddedToken("<mask>", lstrip=True)]),
    ):
        tokenizer = toys.byte_level()
        assert token_bound(tokenizer._backend, tokenizer.table) is not None
        change(tokenizer._backend)
        assert token_bound(tokenizer._backend, tokenizer.table) is None
