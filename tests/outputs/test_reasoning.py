from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from asyncllm.errors import InvalidParamsError
from asyncllm.outputs import text_reader
from asyncllm.outputs.reasoning import (
    REASONING_FORMATS,
    answers_of,
    closed_in_prompt,
    guess_reasoning_format,
    make_reasoning_parser,
    opens_in_prompt,
)
from tests.outputs.linear_time import check_linear

FRAGMENTS = ("<think>", "</think>", "<", "think>", "</", "\n", "\r\n", " ", "a", "so <b>")
PIECES = st.lists(st.sampled_from(FRAGMENTS), max_size=12)
CUTS = st.lists(st.integers(0, 1000), max_size=10)


def split(name: str, pieces: Sequence[str], opened: bool | None = None) -> tuple[str, str]:
    parser = make_reasoning_parser(name, opened=opened)
    deltas = [parser.push(piece) for piece in pieces] + [parser.flush()]
    return "".join(delta.reasoning for delta in deltas), "".join(delta.content for delta in deltas)


def naive(text: str, opened: bool) -> tuple[str, str]:
    """The same of a whole text, by regular expressions."""
    started = re.match(r"\s*<think>[\r\n]*(.*)", text, re.DOTALL)
    if started is None and not opened:
        return "", text
    rest = started.group(1) if started else re.sub(r"^\s*", lambda blank: blank.group().lstrip("\r\n"), text)
    ended = re.match(r"(.*?)[\r\n]*</think>[\r\n]*(.*)", rest, re.DOTALL)
    return (rest, "") if ended is None else (ended.group(1), ended.group(2))


@given(pieces=PIECES, cuts=CUTS, opened=st.booleans())
@example(pieces=[" ", "\n", "</think>"], cuts=[], opened=True)
@settings(max_examples=300, deadline=None)
def test_streamed_is_the_naive_split_of_the_whole(pieces: list[str], cuts: list[int], opened: bool) -> None:
    text = "".join(pieces)
    ends = sorted(place % (len(text) + 1) for place in cuts)
    cut = [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]
    assert split("qwen3", cut, opened) == naive(text, opened)
    assert split("qwen3", list(text), opened) == naive(text, opened)


@given(pieces=PIECES)
@settings(max_examples=200, deadline=None)
def test_only_what_may_become_a_tag_is_withheld(pieces: list[str]) -> None:
    parser = make_reasoning_parser("qwen3", opened=True)
    known, shown = "", ""
    for character in "x" + "".join(pieces):
        delta = parser.push(character)
        known += character
        shown += delta.reasoning
        if not parser.in_reasoning:
            break
        held = re.search(r"[\r\n]*(<(/(t(h(i(n(k)?)?)?)?)?)?)?\Z", known)
        assert held is not None
        assert shown + held.group() == known


CASES: list[tuple[str, str, tuple[str, str]]] = [
    ("qwen3", "<think>\nhm\n\nok\n</think>\n\nHi <think>", ("hm\n\nok", "Hi <think>")),
    ("qwen3", "\n<think>hm</think>Hi", ("hm", "Hi")),
    ("qwen3", "<think>\n\n</think>\n\n  x = 1", ("", "  x = 1")),
    ("qwen3", "Hi </think>\n", ("", "Hi </think>\n")),
    ("qwen3", " \n<thin", ("", " \n<thin")),
    ("qwen3", "", ("", "")),
    ("deepseek_r1", "hm\n</think>\n\nHi</think>", ("hm", "Hi</think>")),
    ("deepseek_r1", "<think>\nhm\n</think>\nHi", ("hm", "Hi")),
    ("deepseek_r1", "never ends\n</thin", ("never ends\n</thin", "")),
    ("mistral", "[THINK]hm[/THINK]Hi", ("hm", "Hi")),
    ("seed_oss", "<seed:think>hm</seed:think>Hi", ("hm", "Hi")),
    ("granite", "Here is my thought process: hm\n\nHere is my response: Hi", (" hm", " Hi")),
]


@pytest.mark.parametrize(("name", "text", "expected"), CASES)
def test_formats(name: str, text: str, expected: tuple[str, str]) -> None:
    for size in (1, 2, 3, 1000):
        assert split(name, [text[at : at + size] for at in range(0, len(text), size)]) == expected


def test_every_format_has_a_case() -> None:
    assert {name for name, _, _ in CASES} == set(REASONING_FORMATS)


def test_a_tag_shows_up_in_neither_part() -> None:
    parser = make_reasoning_parser("deepseek_r1")
    shown = [(delta.reasoning, delta.content) for delta in map(parser.push, ["A", " B", "</th", "ink>", "C", " <D"])]
    assert shown == [("A", ""), (" B", ""), ("", ""), ("", ""), ("", "C"), ("", " <D")]
    assert not parser.in_reasoning


def test_a_shown_partial_tag_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_reader.Tags, "held_from", lambda self, text, start: len(text))
    with pytest.raises(AssertionError):
        test_a_tag_shows_up_in_neither_part()


def test_unknown_format() -> None:
    with pytest.raises(InvalidParamsError, match="known are deepseek_r1, granite"):
        make_reasoning_parser("deep")


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ m.content.split('</think>')[-1] }}assistant\n{% if off %}<think>\n\n</think>{% endif %}", "qwen3"),
        ("{{ m.content.split('</think>')[-1] }}<|im_start|>assistant\n<think>\n", "deepseek_r1"),
        ("{{ m.content.split('</think>')[-1] }}<｜Assistant｜><think>\\n", "deepseek_r1"),
        ("[SYSTEM_PROMPT]think within [THINK] and [/THINK]", "mistral"),
        ("reason inside <seed:think>", "seed_oss"),
        ("{{ m.content }}", None),
    ],
)
def test_formats_are_guessed_from_the_template(template: str, name: str | None) -> None:
    assert guess_reasoning_format(template) == name


def test_whether_the_prompt_opens_the_reasoning() -> None:
    assert opens_in_prompt("qwen3", "<|im_start|>assistant\n<think>\n")
    assert not opens_in_prompt("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert not opens_in_prompt("qwen3", "What is <think>?<|im_end|>\n<|im_start|>assistant\n")
    assert opens_in_prompt("qwen3", "…", continued="<think>Let me")
    assert not opens_in_prompt("qwen3", "…", continued="<think>Let me</think> So")


@pytest.mark.parametrize("unit", ["<", "\n", "<think>", "</think", "a"])
def test_time_is_linear(unit: str) -> None:
    check_linear(lambda count: split("deepseek_r1", list(unit * count)), 200)


def test_what_follows_the_reasoning_comes_first() -> None:
    assert [*answers_of("<think>a</think>b</think>")] == ["b</think>", "<think>a</think>b</think>"]
    assert [*answers_of('{"a":"</think>"}')][-1] == '{"a":"</think>"}'
    assert [*answers_of("b")] == ["b"]


def test_what_a_prompt_ends_with() -> None:
    assert closed_in_prompt("qwen3", "x<think>\n\n</think>\n\n")
    assert not closed_in_prompt("qwen3", "x</think> and so on")
