"""What the grammar of a forced call allows is parsed as a call whose arguments fit the tool's schema."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest

from asyncllm.errors import GrammarError, InvalidParamsError
from asyncllm.outputs.grammar import GrammarCompiler, GrammarConstraint, GrammarVocabulary
from asyncllm.outputs.reasoning import make_reasoning_parser
from asyncllm.outputs.tool_calls import TOOL_FORMATS, make_tool_parser, tool_choice_grammar
from asyncllm.outputs.tool_calls.deltas import ToolMessage, join_deltas
from asyncllm.structured import StructuredOutput

pytest.importorskip("llguidance", reason="needs the extra `grammar`")
jsonschema = pytest.importorskip("jsonschema")

FORMATS = sorted(TOOL_FORMATS)
EOS = 256
COMPILER = GrammarCompiler(
    GrammarVocabulary(
        tokens=[*(bytes([byte]) for byte in range(256)), b"</s>"],
        special_ids=frozenset({EOS}),
        eos_ids=frozenset({EOS}),
        size=EOS + 1,
        encode=lambda text: list(text.encode()),
    )
)
"""One token a byte."""


def tool(name: str, parameters: dict[str, Any] | None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [
    tool(
        "f",
        {
            "type": "object",
            "properties": {
                "count": {"type": "integer", "minimum": 3, "maximum": 99},
                "city": {"enum": ["Münster", 'a "b"', "x\ny"]},
                "flags": {"type": "array", "items": {"$ref": "#/$defs/flag"}, "maxItems": 3},
                "free": {"type": "string", "maxLength": 4},
            },
            "required": ["count"],
            "$defs": {"flag": {"type": ["boolean", "null"]}},
        },
    ),
    tool("g-2", None),
    tool("h", {"properties": {"x": {"type": "object", "properties": {"y": {"const": 1}}, "required": ["y"],
                                    "additionalProperties": False}}, "required": ["x"]}),
]  # fmt: skip
SCHEMAS = {each["function"]["name"]: each["function"]["parameters"] or {} for each in TOOLS}


def walk(structured: StructuredOutput, seed: int, limit: int = 1500) -> str | None:
    """A text at random among those allowed; None where it did not come to its end."""
    rng = random.Random(seed)
    constraint = COMPILER.constraint(structured)
    assert isinstance(constraint, GrammarConstraint)
    written: list[int] = []
    while len(written) < limit:
        legal = np.flatnonzero(np.unpackbits(constraint.mask().view(np.uint8), bitorder="little"))
        if EOS in legal and (len(legal) == 1 or rng.random() < 0.5):
            return bytes(written).decode()
        # closing marks more often, else a string goes on for ever
        choices = [int(token) for token in legal if token != EOS]
        closing = [token for token in choices if token in b'"]})\n<']
        token = rng.choice(closing if closing and rng.random() < 0.3 else choices)
        constraint.accept([token])
        written.append(token)
    return None


def parse(format: str, text: str) -> ToolMessage:
    parser = make_tool_parser(format, TOOLS)
    return join_deltas(parser.push(text) + parser.flush())


def check(format: str, text: str) -> list[str]:
    message = parse(format, text)
    assert message.calls, text
    assert message.content == "", text
    for call in message.calls:
        jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
    return [call.name for call in message.calls]


@pytest.mark.parametrize("format", FORMATS)
def test_whatever_is_allowed_is_a_call_of_a_tool(format: str) -> None:
    tools = [each for each in TOOLS if format != "pythonic" or each["function"]["name"].isidentifier()]
    structured = tool_choice_grammar(format, tools, "required", parallel=True)
    counts = set()
    for seed in range(25):
        text = walk(structured, seed)
        if text is not None:
            counts.add(len(check(format, text)))
    assert counts >= {1, 2}, "one call, and several"


@pytest.mark.parametrize("format", FORMATS)
def test_a_named_tool_is_the_only_one(format: str) -> None:
    structured = tool_choice_grammar(format, TOOLS, "h", parallel=False)
    texts = [text for seed in range(5) if (text := walk(structured, seed)) is not None]
    assert texts
    assert all(check(format, text) == ["h"] for text in texts)


@pytest.mark.parametrize("format", FORMATS)
def test_one_call_where_several_are_not_wanted(format: str) -> None:
    structured = tool_choice_grammar(format, [TOOLS[0], TOOLS[2]], "required", parallel=False)
    texts = [text for seed in range(10) if (text := walk(structured, seed)) is not None]
    assert texts
    assert {len(check(format, text)) for text in texts} == {1}


def accepts(structured: StructuredOutput, text: str) -> bool:
    constraint = COMPILER.constraint(structured)
    for byte in text.encode():
        mask = constraint.mask()
        if not mask[byte // 32] >> (byte % 32) & 1:
            return False
        constraint.accept([byte])
    mask = constraint.mask()
    return bool(mask[EOS // 32] >> (EOS % 32) & 1)


def test_other_texts_are_not_allowed() -> None:
    structured = tool_choice_grammar("hermes", TOOLS, "f", parallel=False)
    sound = '<tool_call>\n{"name": "f", "arguments": {"count": 3}}\n</tool_call>'
    assert accepts(structured, sound)
    for other in (
        "Sure." + sound,
        sound + sound,
        sound.replace("3", "2"),
        sound.replace('"f"', '"h"'),
        sound.replace("}}", ', "more": 1}}'),
        sound.replace('"count": 3', ""),
        sound[:-1],
        "",
    ):
        assert not accepts(structured, other), other


def test_thinking_comes_first() -> None:
    sound = '<tool_call>\n{"name": "h", "arguments": {"x": {"y": 1}}}\n</tool_call>'
    opened = tool_choice_grammar("hermes", TOOLS, "h", False, reasoning="deepseek_r1", opened=True)
    text = f"So <b> it \n is.\n</think>{sound}"
    assert accepts(opened, text)
    assert not accepts(opened, sound)
    parser = make_reasoning_parser("deepseek_r1")
    delta, rest = parser.push(text), parser.flush()
    assert (delta.reasoning, check("hermes", delta.content + rest.content)) == ("So <b> it \n is.", ["h"])
    closed = tool_choice_grammar("hermes", TOOLS, "h", False, reasoning="qwen3")
    assert accepts(closed, sound)
    assert accepts(closed, f"<think>\nHm.\n</think>{sound}")
    assert not accepts(closed, f"Hm.</think>{sound}")


@pytest.mark.parametrize(
    ("format", "tools", "choice", "message"),
    [
        ("hermes", [], "required", "needs tools"),
        ("hermes", TOOLS, "gone", "names 'gone', which is not among the tools"),
        ("pascal", TOOLS, "required", "unknown tool-call format"),
        ("hermes", [tool("f", {"x": float("nan")})], "f", "not JSON"),
        ("pythonic", [tool("f", {"minProperties": 1})], "f", "hold minProperties, which this model's format cannot"),
        ("pythonic", [tool("f", {"properties": {"a-b": {}}, "required": ["a-b"]})], "f", "requires a-b, which"),
        ("pythonic", [tool("f", {"required": ["a"]})], "f", "requires a, which"),
    ],
)
def test_what_cannot_be_is_refused(format: str, tools: Any, choice: str, message: str) -> None:
    with pytest.raises(InvalidParamsError, match=message):
        tool_choice_grammar(format, tools, choice, parallel=True)


def test_a_schema_that_cannot_be_enforced_is_refused_when_it_is_compiled() -> None:
    structured = tool_choice_grammar("hermes", [tool("f", {"properties": {"a": {"pattern": "(?=x)"}}})], "f", False)
    with pytest.raises(GrammarError):
        COMPILER.constraint(structured)


def test_a_schema_is_closed_only_where_that_takes_nothing_away() -> None:
    combined = tool("f", {"anyOf": [{"properties": {"a": {"const": 1}}, "required": ["a"]}]})
    assert accepts(tool_choice_grammar("llama3_json", [combined], "f", False), '{"name": "f", "parameters": {"a": 1}}')
    open_ended = tool("f", {"properties": {}, "additionalProperties": True})
    text = '{"name": "f", "parameters": {"any": 1}}'
    assert accepts(tool_choice_grammar("llama3_json", [open_ended], "f", False), text)
    assert not accepts(tool_choice_grammar("llama3_json", [tool("f", None)], "f", False), text)
