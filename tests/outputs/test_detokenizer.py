from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncllm.inputs.tokenizer import Tokenizer
from asyncllm.outputs.detokenizer import MAX_HELD_BYTES, Detokenizer, TextStream, WindowDetokenizer
from tests.inputs import toy_tokenizers as toys

BUILDERS: list[Callable[[], Tokenizer]] = [
    toys.byte_level,
    toys.llama_like,
    toys.gemma_like,
    toys.metaspace,
    toys.wordpiece,
    toys.word_level,
    toys.suffixed,
]
build = cache(lambda builder: builder())


def id_of(tokenizer: Tokenizer, token: str) -> int:
    found = tokenizer.token_id(token)
    assert found is not None
    return found


def deltas(stream: TextStream, ids: Sequence[int]) -> list[str]:
    return [stream.push([token_id]) for token_id in ids] + [stream.flush()]


@st.composite
def id_lists(draw: st.DrawFn, tokenizer: Tokenizer) -> list[int]:
    """Ids in and beyond the vocabulary; valid text in UTF-8 now and then, among ids at random."""
    known = st.integers(0, tokenizer.vocab_size + 2)
    parts: list[st.SearchStrategy[list[int]]] = [st.lists(known, max_size=12)]
    table = tokenizer.table
    if table is not None and table.fragments:
        single = {data: token_id for token_id, data in table.fragments.items()}
        characters = st.text(st.characters(min_codepoint=128, exclude_categories=["Cs"]), min_size=1, max_size=3)
        parts.append(characters.map(lambda text: [single[bytes([b])] for b in text.encode() if bytes([b]) in single]))
        parts.append(st.lists(st.sampled_from(sorted(table.fragments)), max_size=8))
    return [token_id for part in draw(st.lists(st.one_of(parts), max_size=4)) for token_id in part]


def expected(tokenizer: Tokenizer, prompt: list[int], ids: list[int], *, skip: bool) -> str:
    before = tokenizer.decode(prompt, skip_special_tokens=skip)
    after = tokenizer.decode(prompt + ids, skip_special_tokens=skip)
    assert after.startswith(before)
    return after[len(before) :]


@pytest.mark.parametrize("builder", BUILDERS)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_joined_deltas_are_the_full_decode(builder: Callable[[], Tokenizer], data: st.DataObject) -> None:
    tokenizer = build(builder)
    ids = data.draw(id_lists(tokenizer))
    skip = data.draw(st.booleans())
    assert "".join(deltas(tokenizer.detokenizer(skip_special_tokens=skip), ids)) == tokenizer.decode(
        ids, skip_special_tokens=skip
    )


@pytest.mark.parametrize("builder", BUILDERS)
@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_text_goes_on_from_the_prompt(builder: Callable[[], Tokenizer], data: st.DataObject) -> None:
    tokenizer = build(builder)
    fragments = tokenizer.table.fragments if tokenizer.table is not None else {}
    prompt = [token_id for token_id in data.draw(id_lists(tokenizer)) if token_id not in fragments]
    ids = data.draw(id_lists(tokenizer))
    skip = data.draw(st.booleans())
    stream = tokenizer.detokenizer(skip_special_tokens=skip, prompt_ids=prompt)
    assert "".join(deltas(stream, ids)) == expected(tokenizer, prompt, ids, skip=skip)


@pytest.mark.parametrize("builder", BUILDERS)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_the_cut_between_pushes_does_not_matter(builder: Callable[[], Tokenizer], data: st.DataObject) -> None:
    tokenizer = build(builder)
    ids = data.draw(id_lists(tokenizer))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=4)))
    stream = tokenizer.detokenizer()
    pieces = [ids[start:end] for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
    assert "".join([stream.push(piece) for piece in pieces] + [stream.flush()]) == tokenizer.decode(ids)


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_held_text_is_what_the_stream_would_end_with(data: st.DataObject) -> None:
    tokenizer = build(data.draw(st.sampled_from([toys.llama_like, toys.gemma_like])))
    stream = tokenizer.detokenizer()
    shown = ""
    ids = data.draw(id_lists(tokenizer))
    for count, token_id in enumerate(ids, 1):
        shown += stream.push([token_id])
        if stream.held:
            assert shown + stream.held == tokenizer.decode(ids[:count])


def test_a_character_of_several_tokens_is_shown_once_and_whole() -> None:
    assert deltas(toys.smollm2().detokenizer(), [10813, 230, 131, 57]) == ["", "", "🌶", "I", ""]
    assert deltas(toys.smollm2().detokenizer(), [10813, 242, 218]) == ["", "", "😀", ""]
    assert deltas(toys.smollm2().detokenizer(), [143, 233]) == ["", "ď", ""]
    assert deltas(toys.smollm2().detokenizer(), [18645, 250]) == ["", "你", ""]


def test_bytes_that_are_no_text_are_replaced_and_raise_nothing() -> None:
    ids = [230, 131, 10813, 242, 57, 143, 250, 46, 2]
    for skip in (True, False):
        joined = "".join(deltas(toys.smollm2().detokenizer(skip_special_tokens=skip), ids))
        assert joined == toys.smollm2().decode(ids, skip_special_tokens=skip)
    assert deltas(toys.smollm2().detokenizer(), [10813]) == ["", "�"]


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_random_ids_of_the_real_tokenizer(data: st.DataObject) -> None:
    ids = data.draw(id_lists(toys.smollm2()))
    assert "".join(deltas(toys.smollm2().detokenizer(), ids)) == toys.smollm2().decode(ids)


def test_no_space_around_added_tokens_that_are_not_special() -> None:
    for builder in (toys.byte_level, toys.gemma_like):
        tokenizer = build(builder)
        ok = [id_of(tokenizer, "a"), id_of(tokenizer, "b")]
        ids = [id_of(tokenizer, "<think>"), *ok, id_of(tokenizer, "<think>"), id_of(tokenizer, "a")]
        for skip in (True, False):
            assert deltas(tokenizer.detokenizer(skip_special_tokens=skip), ids)[:-1] == [
                "<think>",
                "a",
                "b",
                "<think>",
                "a",
            ]


def test_special_tokens_are_left_out_or_shown() -> None:
    tokenizer = build(toys.byte_level)
    ids = [id_of(tokenizer, "a"), id_of(tokenizer, "</s>"), id_of(tokenizer, "b")]
    assert deltas(tokenizer.detokenizer(), ids) == ["a", "", "b", ""]
    assert deltas(tokenizer.detokenizer(skip_special_tokens=False), ids) == ["a", "</s>", "b", ""]


def test_a_special_token_within_a_character() -> None:
    tokenizer = build(toys.byte_level)
    ids = [0xC3, id_of(tokenizer, "</s>"), 0xA9]
    assert deltas(tokenizer.detokenizer(), ids) == ["", "", "é", ""]
    assert deltas(tokenizer.detokenizer(skip_special_tokens=False), ids) == ["", "�</s>", "�", ""]


@pytest.mark.parametrize("builder", [toys.llama_like, toys.metaspace])
def test_leading_spaces_between_deltas_and_after_the_prompt(builder: Callable[[], Tokenizer]) -> None:
    tokenizer = build(builder)
    ids = [id_of(tokenizer, piece) for piece in ("▁is", "▁the", "▁Kh", "aleesi")]
    after_text = tokenizer.detokenizer(prompt_ids=[id_of(tokenizer, "<s>"), id_of(tokenizer, "▁a")])
    assert deltas(after_text, ids) == [" is", " the", " Kh", "aleesi", ""]
    for prompt in ([], [id_of(tokenizer, "<s>")]):
        assert deltas(tokenizer.detokenizer(prompt_ids=prompt), ids) == ["is", " the", " Kh", "aleesi", ""]
    shown_bos = tokenizer.detokenizer(skip_special_tokens=False, prompt_ids=[id_of(tokenizer, "<s>")])
    assert deltas(shown_bos, ids)[0] == " is"


def test_bytes_of_the_prompt_are_not_joined_to_the_output() -> None:
    tokenizer = build(toys.llama_like)
    start, end = (id_of(tokenizer, f"<0x{byte:02X}>") for byte in "é".encode())
    assert deltas(tokenizer.detokenizer(prompt_ids=[start]), [end]) == ["", "�"]
    assert deltas(build(toys.byte_level).detokenizer(prompt_ids=[0xC3]), [0xA9]) == ["�", ""]


def fallback(tokenizer: Tokenizer, text: bytes) -> list[int]:
    return [id_of(tokenizer, f"<0x{byte:02X}>") for byte in text]


def test_a_run_of_fallback_bytes_is_judged_as_a_whole() -> None:
    tokenizer = build(toys.gemma_like)
    good, bad = fallback(tokenizer, "é\n".encode()), fallback(tokenizer, b"\n\xc3")
    a = id_of(tokenizer, "a")
    assert deltas(tokenizer.detokenizer(), [*good, a]) == ["", "", "", "é\na", ""]
    assert deltas(tokenizer.detokenizer(), [*bad, a]) == ["", "", "��a", ""]
    assert deltas(tokenizer.detokenizer(), good)[-1] == "é\n"


def test_held_bytes_are_offered_to_the_stop_matcher() -> None:
    tokenizer = build(toys.gemma_like)
    stream = tokenizer.detokenizer()
    assert (stream.push(fallback(tokenizer, b"\n")), stream.held) == ("", "\n")
    assert (stream.push(fallback(tokenizer, b"\n")), stream.held) == ("", "\n\n")
    assert (stream.push(fallback(tokenizer, b"\xc3")), stream.held) == ("", "")
    assert (stream.push([id_of(tokenizer, "a")]), stream.held) == ("���a", "")


def test_a_model_that_writes_only_bytes_is_not_silent() -> None:
    tokenizer = build(toys.gemma_like)
    stream = tokenizer.detokenizer()
    text = "བོད་སྐད།" * 40
    shown, longest_silence, silence = "", 0, 0
    for token_id in fallback(tokenizer, text.encode()):
        delta = stream.push([token_id])
        shown += delta
        silence = 0 if delta else silence + 1
        longest_silence = max(longest_silence, silence)
    assert shown + stream.flush() == text
    assert longest_silence <= MAX_HELD_BYTES


def test_a_long_run_that_is_no_text_is_replaced_byte_by_byte() -> None:
    tokenizer = build(toys.gemma_like)
    ids = [*fallback(tokenizer, b"\xff" + b"a" * 100), id_of(tokenizer, "a"), *fallback(tokenizer, "é".encode())]
    assert "".join(deltas(tokenizer.detokenizer(), ids)) == tokenizer.decode(ids) == "�" * 101 + "aé"


def test_a_long_run_that_goes_wrong_keeps_what_was_shown() -> None:
    tokenizer = build(toys.gemma_like)
    ids = [*fallback(tokenizer, "é".encode() * 40 + b"\xff\xc3"), id_of(tokenizer, "a")]
    assert "".join(deltas(tokenizer.detokenizer(), ids)) == "é" * 40 + "��a"


def test_tables_serve_the_known_decoders_and_the_window_the_rest() -> None:
    for builder in BUILDERS:
        kind: type[Any] = WindowDetokenizer if builder is toys.suffixed else Detokenizer
        assert isinstance(build(builder).detokenizer(), kind)


def test_the_window_holds_back_what_may_be_half_a_character() -> None:
    tokenizer = build(toys.byte_level)

    def decode(ids: Sequence[int], skip: bool) -> str:
        return tokenizer.decode(ids, skip_special_tokens=skip)

    stream = WindowDetokenizer(decode, prompt_ids=[97])
    assert deltas(stream, [0xC3, 0xA9, 0xFF, 98, 0xF0]) == ["", "é", "", "�b", "", "�"]
    endless = WindowDetokenizer(decode)
    assert "".join(endless.push([0xFF]) for _ in range(100)) != ""


def test_special_tokens_without_spaces_between_them() -> None:
    tokenizer = build(toys.wordpiece)
    ids = [id_of(tokenizer, token) for token in ("the", "[CLS]", "[SEP]", "[SEP]", "a", "[CLS]", "##a")]
    spaced = tokenizer.detokenizer(skip_special_tokens=False)
    assert "".join(deltas(spaced, ids)) == "the [CLS] [SEP] [SEP] a [CLS]a"
    compact = tokenizer.detokenizer(skip_special_tokens=False, spaces_between_special_tokens=False)
    assert "".join(deltas(compact, ids)) == "the [CLS][SEP][SEP] a [CLS]a"
    skipped = tokenizer.detokenizer(spaces_between_special_tokens=False)
    assert "".join(deltas(skipped, ids)) == "the aa"


def test_bytes_are_held_back_between_compact_special_tokens() -> None:
    tokenizer = build(toys.byte_level)
    ids = [id_of(tokenizer, "<s>"), id_of(tokenizer, "</s>"), *tokenizer.encode("é"), id_of(tokenizer, "<s>")]
    stream = tokenizer.detokenizer(skip_special_tokens=False, spaces_between_special_tokens=False)
    assert "".join(deltas(stream, ids)) == "<s></s>é<s>"
