from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from asyncllm.errors import InvalidParamsError
from asyncllm.outputs import text_reader
from asyncllm.outputs.tool_calls import deltas, python_literal, qwen3_coder, tool_parser
from asyncllm.outputs.tool_calls.call_object import CallObject
from asyncllm.outputs.tool_calls.definitions import ToolDefinition
from asyncllm.outputs.tool_calls.deltas import ArgumentsDelta, CallWriter, ContentDelta, ToolCallStart, join_deltas
from asyncllm.outputs.tool_calls.tool_parser import TOOL_FORMATS, guess_tool_format, make_tool_parser
from tests.outputs.linear_time import check_linear
from tests.outputs.tool_calls import written_calls as wc

FORMATS = sorted(TOOL_FORMATS)
QUICK = settings(
    max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, phases=[Phase.generate]
)  # a failure is small as it is


def typed_tools(calls: list[wc.Call]) -> list[Any]:
    """Tools whose schemas say of each parameter what it is."""
    kinds = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
    properties = {
        call.name: {key: {"type": kinds.get(type(value), "null")} for key, value in call.arguments.items()}
        for call in calls
    }
    return [ToolDefinition(name, {"properties": found}) for name, found in properties.items()]


def check_round_trip(way: str) -> None:
    written = wc.WRITTEN[way]

    @QUICK
    @given(calls=wc.calls(written), before=wc.prose, after=wc.prose, places=wc.places)
    def check(calls: list[wc.Call], before: str, after: str, places: list[int]) -> None:
        before = before if written.before else ""
        text = before + written.write(calls) + after
        tools = typed_tools(calls)
        message = wc.parse(written.format, wc.cut(text, places), tools)
        assert message.content == before + after
        assert [call.name for call in message.calls] == [call.name for call in calls]
        for read, call in zip(message.calls, calls, strict=True):
            if written.exact:
                assert read.arguments == call.text
            assert json.loads(read.arguments) == call.arguments

    check()


@pytest.mark.parametrize("way", wc.WRITTEN)
def test_calls_are_read_as_written_however_they_are_cut(way: str) -> None:
    check_round_trip(way)


FRAGMENTS = (
    "<tool_call>", "</tool_call>", '{"name": "f", ', '"arguments": ', '"parameters": {', '{"a": 1', "}", "{", '"', "\\",
    "[", "]", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "f", "g", "(", ")", "a=", "'", ", ", ";", "<|python_tag|>",
    "<|python_start|>", "<|python_end|>", "<function=", "f>", "<parameter=", "a>", "</parameter>", "</function>", "\n",
    " ", "text", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>", "```", "json", "function", "null", '"{}"', ": ", '"name"', '{"a": "</tool_call>"}', "é",
)  # fmt: skip
"""What calls are made of."""

SOUND: dict[str, list[list[str]]] = {
    "hermes": [["<tool_call>", "{", '"name"', ": ", '"f"', ", ", '"arguments": ', '{"a": 1', "}", "}", "</tool_call>"]],
    "qwen3_coder": [
        ["<tool_call>", "<function=", "f>", "\n", "<parameter=", "a>", "text", "</parameter>", "</function>"],
        ["<tool_call>", '{"name": "f", ', '"arguments": ', "{", "}", "}", "</tool_call>"],
    ],
    "llama3_json": [['{"name": "f", ', '"parameters": {', "}", "}", ";"], ["<|python_tag|>", '{"name": "f", ']],
    "mistral": [
        ["[TOOL_CALLS]", "[", '{"name": "f", ', '"arguments": ', '{"a": 1', "}", "}", ", ", "]"],
        ["[TOOL_CALLS]", "f", "[ARGS]", '{"a": 1', "}"],
    ],
    "pythonic": [["[", "f", "(", "a=", "'", "text", "'", ")", ", ", "f", "(", ")", "]"]],
    "deepseek": [
        ["<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "function", "<｜tool▁sep｜>", "f", "\n", "```", "json",
         "\n", '{"a": 1', "}", "\n", "```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"],
        ["<｜tool▁call▁begin｜>", "f", "<｜tool▁sep｜>", "{", "}", "<｜tool▁call▁end｜>"],
    ],
}  # fmt: skip


@st.composite
def near_misses(draw: st.DrawFn, name: str) -> str:
    """Calls of a format with some fragments lost, doubled, put in or exchanged."""
    pieces = [piece for call in draw(st.lists(st.sampled_from(SOUND[name]), max_size=2)) for piece in call]
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(pieces)))
        match draw(st.sampled_from(("lose", "double", "put in", "exchange"))):
            case "lose":
                del pieces[at : at + 1]
            case "double":
                pieces[at:at] = pieces[at : at + 1]
            case "put in":
                pieces.insert(at, draw(st.sampled_from(FRAGMENTS)))
            case _:
                pieces[at : at + 1] = [draw(st.sampled_from(FRAGMENTS))]
    return "".join(pieces)


def check_cuts(name: str) -> None:
    @settings(QUICK, max_examples=200)
    @given(text=near_misses(name), places=wc.places)
    def check(text: str, places: list[int]) -> None:
        known = wc.tools("f")
        whole = wc.outcome(wc.parse(name, [text], known))
        assert wc.outcome(wc.parse(name, wc.cut(text, places), known)) == whole
        assert wc.outcome(wc.parse(name, list(text), known)) == whole
        content, calls = whole
        if not calls:
            assert content == text, "text without a call is shown as it is"
        assert all(call_name == "f" for call_name, _ in calls)

    check()


@pytest.mark.parametrize("name", FORMATS)
def test_any_cut_of_a_near_miss_gives_the_same(name: str) -> None:
    check_cuts(name)


def test_two_cuts_anywhere() -> None:
    text = '<tool_call>{"name":"w","arguments":{"city":"Münster","n":42}}</tool_call>'
    for places in combinations(range(len(text)), 2):
        (call,) = wc.parse("hermes", wc.cut(text, places), None).calls
        assert call.arguments == '{"city":"Münster","n":42}'


def check_order(name: str) -> None:
    """Id and name in the first delta of an index, and its arguments between it and the next."""

    @settings(QUICK, max_examples=100)
    @given(text=near_misses(name), places=wc.places)
    def check(text: str, places: list[int]) -> None:
        started = -1
        for delta in wc.parse_deltas(name, wc.cut(text, places), None):
            if isinstance(delta, ToolCallStart):
                started += 1
                assert (delta.index, bool(delta.id), bool(delta.name)) == (started, True, True)
            elif isinstance(delta, ArgumentsDelta):
                assert delta.index == started
            assert isinstance(delta, ToolCallStart) or delta.text

    check()


@pytest.mark.parametrize("name", FORMATS)
def test_deltas_come_in_order(name: str) -> None:
    check_order(name)


def swallow_a_partial_tag(self: text_reader.Tags, text: str, start: int) -> int:
    return len(text)


def escape_everything(text: str) -> str:
    return json.dumps(text)[1:-1]


def forget_blanks(self: CallWriter, text: str) -> None:
    if not text.isspace():
        self._write(deltas._Kind.CONTENT, text)


def forget_what_was_read(self: CallObject, text: str) -> None:
    return


FAULTS: dict[str, tuple[Any, str, Any, Callable[[], None]]] = {
    "a partial tag is shown": (text_reader.Tags, "held_from", swallow_a_partial_tag, lambda: check_cuts("hermes")),
    "braces in strings count": (text_reader, "_BRACES", re.compile(r"[{}]"), lambda: check_round_trip("hermes")),
    "escapes are not seen": (text_reader, "_STRING_END", re.compile(r'["]'), lambda: check_round_trip("mistral")),
    "blanks are dropped": (CallWriter, "content", forget_blanks, lambda: check_cuts("pythonic")),
    "a broken head is lost": (CallObject, "_keep", forget_what_was_read, lambda: check_cuts("llama3_json")),
    "any tool is called": (CallWriter, "knows", lambda self, name: True, lambda: check_cuts("deepseek")),
    "text is not escaped": (qwen3_coder, "_escape", str, lambda: check_round_trip("qwen3_coder")),
    "Python's escapes stay": (python_literal, "_unescape", lambda m: m.group(), lambda: check_round_trip("pythonic")),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, attribute, broken, check = FAULTS[fault]
    monkeypatch.setattr(owner, attribute, broken)
    with pytest.raises((AssertionError, ValueError)):
        check()


def test_text_is_passed_on_at_once() -> None:
    """No constant window: only what may become a tag is withheld (and white space at the start)."""
    for name in FORMATS:
        parser = make_tool_parser(name, wc.tools("f"))
        pieces = ["A", " B", " C", "\n", " D", " <", "b>", " <", "|", "x [", "y"]
        shown = [join_deltas(parser.push(piece)).content for piece in pieces]
        assert shown[:5] == pieces[:5]
        assert "".join(shown) == "".join(pieces)
        assert all(len(piece) - len(text) < 2 for piece, text in zip(pieces, shown, strict=True)), "one < or [ at most"
        assert parser.flush() == []


def test_arguments_come_as_the_model_writes_them() -> None:
    parser = make_tool_parser("hermes", wc.tools("f"))
    assert parser.push('<tool_call>\n{"name": "f", "arguments": ') == []
    first, second = parser.push('{"a": "x')
    assert isinstance(first, ToolCallStart)
    assert second == ArgumentsDelta(0, '{"a": "x')
    assert parser.push(' ü"') == [ArgumentsDelta(0, ' ü"')]
    assert parser.push("}}\n") == [ArgumentsDelta(0, "}")]
    assert parser.push("</tool_call>\n") == []
    assert parser.push("x") == [ContentDelta("\nx")]
    assert parser.flush() == []


def test_ids() -> None:
    text = "[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]f[ARGS]{}"
    ids = [call.id for call in wc.parse("mistral", [text], None).calls]
    assert len(set(ids)) == 2
    assert all(re.fullmatch("[a-zA-Z0-9]{9}", each) for each in ids)
    (call,) = wc.parse("hermes", [wc.hermes([wc.Call("f", {}, (",", ":"))])], None).calls
    assert re.fullmatch("call_[0-9a-f]{24}", call.id)


def test_unknown_format() -> None:
    with pytest.raises(InvalidParamsError, match="known are deepseek, hermes"):
        make_tool_parser("pascal", ())


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "unit",
    ["<tool_call>", '<tool_call>{"', "{", "[TOOL_CALLS][", "[TOOL_CALLS]f[ARGS]{", "<function=f><parameter=a>", "<",
     "[f(", '[f(a="', "<｜tool▁calls▁begin｜>", "\n", "<function=f>\n<parameter=a>\n</parameter>\n", '"\\'],
)  # fmt: skip
def test_time_is_linear(name: str, unit: str) -> None:
    for size, most in ((8, 60), (1_000_000, 150)):

        def run(count: int, size: int = size) -> None:
            text = unit * count
            wc.parse(name, [text[at : at + size] for at in range(0, len(text), size)], wc.tools("f"))

        check_linear(run, most)


def test_what_was_read_is_not_kept() -> None:
    parser = make_tool_parser("hermes", None)
    parser.push('<tool_call>{"name": "f", "arguments": {"a": "')
    for _ in range(100):
        parser.push("a word, ")
    assert len(parser._reader._text) < 20


TEMPLATES = {
    "hermes": "For each call return a JSON object within <tool_call></tool_call> tags",
    "qwen3_coder": "<tool_call>\n<function=example>\n<parameter=p>\nvalue\n</parameter>\n</function>\n</tool_call>",
    "mistral": '{{- "[TOOL_CALLS] [" }}',
    "llama3_json": 'Respond in the format {"name": function name, "parameters": dictionary of argument name and value}',
    "pythonic": "put it in the format of [func_name1(params_name1=params_value1), func_name2(params)]",
    "deepseek": "{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type']}}",
    None: "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_formats_are_guessed_from_the_template(name: str | None) -> None:
    assert guess_tool_format(TEMPLATES[name]) == name


@pytest.mark.parametrize(
    "template",
    [
        "<tool_call>{function-name}\n<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>",
        "<seed:tool_call>\n<function=f>\n<parameter=p>v</parameter>\n</function>\n</seed:tool_call>",
        "<|tool_call|>[{'name': 'f', 'arguments': {}}]",
    ],
)
def test_a_format_that_only_looks_alike_is_not_guessed(template: str) -> None:
    assert guess_tool_format(template) is None


def test_every_format_is_guessed_from_some_template() -> None:
    assert set(TEMPLATES) - {None} == set(tool_parser.TOOL_FORMATS)
