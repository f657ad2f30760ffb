"""Every keyword is enforced or refused by its name. `GOOD` texts must be possible, `BAD` ones must not, and whatever a
random walk through the masks comes to must be valid for the `jsonschema` package."""

from __future__ import annotations

import datetime
import json
import random
import re
from typing import Any

import pytest

from asyncllm.errors import GrammarError
from asyncllm.outputs.json_schema import enforceable_schema
from tests.outputs.grammars import accepts, check_valid, constraint, outputs, random_output, tokenizer

NODE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"v": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
            "required": ["v", "next"],
            "additionalProperties": False,
        }
    },
}
TREE = {
    "type": "object",
    "properties": {"v": {"enum": ["x"]}, "children": {"type": "array", "items": {"$ref": "#"}, "maxItems": 2}},
    "required": ["v"],
    "additionalProperties": False,
}


def with_type(kind: str, **keywords: Any) -> dict[str, Any]:
    return {"type": kind, **keywords}


def kind(name: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"kind": {"const": name}, name: {"type": "integer"}},
        "required": ["kind"],
        "additionalProperties": False,
    }


ENFORCED: dict[str, tuple[Any, list[str], list[str]]] = {
    "true": (True, ["1", '{"a":[null]}'], ["nul", "{", "01"]),
    "type": ({"type": "integer"}, ["0", "-12"], ["1.5", '"1"', "01", "+1", ""]),
    "types": ({"type": ["boolean", "null"]}, ["true", "null"], ["0", '"null"']),
    "number": ({"type": "number"}, ["1.5", "-0.1", "1e5"], [".5", "1.", "1e"]),
    "enum": ({"enum": ["a", 1, None, [1]]}, ['"a"', "1", "null", "[1]"], ['"b"', "2", "[]"]),
    "enum and type": (with_type("string", enum=["a", 1]), ['"a"'], ["1"]),
    "const": ({"const": {"a": [1, "ü"]}}, ['{"a":[1,"ü"]}'], ["{}", '{"a":[1,"u"]}']),
    "minimum": (with_type("integer", minimum=-5), ["-5", "100"], ["-6"]),
    "maximum": (with_type("number", maximum=2.5), ["2.5", "-7"], ["2.51", "3"]),
    "exclusiveMinimum": (with_type("number", exclusiveMinimum=0), ["0.1"], ["0", "-1", "0.0"]),
    "exclusiveMaximum": (with_type("integer", exclusiveMaximum=3), ["2"], ["3"]),
    "bounds of draft 4": (
        {"$schema": "http://json-schema.org/draft-04/schema#", "minimum": 3, "exclusiveMinimum": True},
        ["4"],
        ["3"],
    ),
    "multipleOf": (with_type("integer", multipleOf=7), ["0", "49", "-7"], ["48"]),
    "multipleOf a fraction": (with_type("number", multipleOf=0.05), ["1.15", "3"], ["1.16"]),
    "minLength": (with_type("string", minLength=2), ['"ab"', '"üü"', '"\\n\\n"'], ['"a"', '"ü"', '"\\n"']),
    "maxLength": (with_type("string", maxLength=2), ['""', '"ab"', '"😀😀"'], ['"abc"', '"😀😀😀"']),
    "a whole float as a count": (with_type("string", maxLength=2.0), ['"ab"'], ['"abc"']),
    "pattern": (with_type("string", pattern="^[a-c]+$"), ['"abc"'], ['"abd"', '""']),
    "pattern is searched": (with_type("string", pattern="b"), ['"abc"'], ['"ac"']),
    "pattern's classes are ECMA's": (with_type("string", pattern="^[[:a&&]+$"), ['"[:a&"'], ['"b"']),
    "pattern's digits are ASCII": (with_type("string", pattern=r"^\d\w$"), ['"5a"'], ['"٣a"', '"5é"']),
    "minItems": (with_type("array", items={"type": "null"}, minItems=2), ["[null,null]"], ["[null]", "[]"]),
    "maxItems": (with_type("array", items={"type": "null"}, maxItems=1), ["[]", "[null]"], ["[null,null]"]),
    "prefixItems": (
        with_type("array", prefixItems=[{"const": 1}, {"const": 2}], items=False),
        ["[]", "[1]", "[1, 2]"],
        ["[2]", "[1,2,3]"],
    ),
    "items of draft 7": (
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "items": [{"const": 1}],
            "additionalItems": {"const": 2},
        },
        ["[1]", "[1,2,2]", "5"],
        ["[2]", "[1,1]"],
    ),
    "required": (with_type("object", required=["a"]), ['{"a":1}', '{"a":1,"b":2}'], ["{}", '{"b":1}']),
    "properties": (
        with_type("object", properties={"a": {"type": "integer"}}),
        ["{}", '{"a":1}', '{"b":"x"}'],
        ['{"a":"x"}', '{"a":1,"a":"x"}', '{"\\u0061":"x"}'],
    ),
    "additionalProperties": (
        with_type("object", properties={"a": {}}, additionalProperties={"type": "null"}),
        ['{"a":1,"b":null}'],
        ['{"b":1}'],
    ),
    "no additionalProperties": (
        with_type("object", properties={"a": {}}, additionalProperties=False),
        ["{}"],
        ['{"b":1}'],
    ),
    "patternProperties": (
        with_type("object", patternProperties={"^x": {"type": "null"}}, additionalProperties=False),
        ["{}", '{"x1":null}'],
        ['{"x1":1}', '{"y":null}', '{"\\u0078":1}'],
    ),
    "minProperties of 1": (with_type("object", minProperties=1), ['{"a":1}'], ["{}"]),
    "minProperties that are required": (
        with_type("object", minProperties=2, required=["a", "b"]),
        ['{"a":1,"b":1}'],
        ['{"a":1}'],
    ),
    "maxProperties": (with_type("object", maxProperties=1), ["{}", '{"a":1}'], ['{"a":1,"b":1}']),
    "anyOf": ({"anyOf": [{"type": "null"}, {"const": 5}]}, ["null", "5"], ["6"]),
    "allOf": (
        {"allOf": [with_type("object", required=["a"]), {"required": ["b"]}]},
        ['{"a":1,"b":2}'],
        ['{"a":1}', '{"b":1}'],
    ),
    "oneOf of types": ({"oneOf": [{"type": "string"}, {"type": "integer"}]}, ['"a"', "1"], ["null", "1.5"]),
    "oneOf of values": ({"oneOf": [{"const": 1}, {"enum": [2, "3"]}]}, ["1", "2", '"3"'], ["3"]),
    "oneOf of references": (
        {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "$defs": {"a": kind("a"), "b": kind("b")}},
        ['{"kind":"a","a":1}', '{"kind":"b"}'],
        ['{"kind":"a","b":1}', '{"kind":"c"}', "{}"],
    ),
    "siblings of anyOf": (
        with_type("object", properties={"k": {"type": "null"}}, anyOf=[{"required": ["a"]}, {"required": ["k"]}]),
        ['{"k":null}', '{"a":1}'],
        ["{}", '{"k":1}'],
    ),
    "siblings of $ref": (
        {"$ref": "#/$defs/a", "minimum": 5, "$defs": {"a": {"type": "integer", "maximum": 9}}},
        ["7"],
        ["3", "10", '"a"'],
    ),
    "$ref to definitions": (
        {"properties": {"a": {"$ref": "#/definitions/x"}}, "definitions": {"x": {"type": "null"}}},
        ['{"a":null}'],
        ['{"a":1}'],
    ),
    "$ref to a property": (
        with_type(
            "object",
            properties={"a": {"type": "null"}, "b": {"$ref": "#/properties/a"}},
            required=["b"],
            additionalProperties=False,
        ),
        ['{"b":null}', '{"a":null,"b":null}'],
        ['{"b":1}', "{}"],
    ),
    "$ref to an escaped name": ({"$ref": "#/$defs/a~1b%25", "$defs": {"a/b%": {"type": "null"}}}, ["null"], ["1"]),
    "$ref to $anchor": ({"$ref": "#x", "$defs": {"a": {"$anchor": "x", "type": "null"}}}, ["null"], ["1"]),
    "$ref to $id": (
        {
            "$id": "http://example.com/root",
            "$ref": "leaf",
            "$defs": {"a": {"$id": "leaf", "$ref": "#/$defs/b", "$defs": {"b": {"type": "null"}}}},
        },
        ["null"],
        ["1"],
    ),
    "$ref to itself, a list": (NODE, ['{"v":1,"next":{"v":2,"next":null}}'], ['{"v":1}', '{"v":1,"next":{}}']),
    "$ref to the root, a tree": (
        TREE,
        ['{"v":"x"}', '{"v":"x","children":[{"v":"x"},{"v":"x","children":[]}]}'],
        ['{"v":"x","children":[{}]}'],
    ),
    "annotations": (
        with_type("null", title="t", description="d", default=1, examples=[1], deprecated=True, **{"x-note": 1}),
        ["null"],
        ["1"],
    ),
    "uniqueItems of an enum": (
        {"type": "array", "items": {"enum": ["a", "b", 1, 1.0]}, "uniqueItems": True, "minItems": 1},
        ['["a"]', '["b","a"]', '[1, "b", "a"]'],
        ["[]", '["a","a"]', "[1,1]", "[1,1.0]", '["a","b",1,"a"]'],
    ),
    "uniqueItems of a $ref": (
        {
            "properties": {"c": {"type": "array", "items": {"$ref": "#/$defs/C"}, "uniqueItems": True, "maxItems": 2}},
            "required": ["c"],
            "$defs": {"C": {"anyOf": [{"enum": ["a", 2, "b"], "type": "string"}, {"type": "null"}]}},
            "type": "object",
            "additionalProperties": False,
        },
        ['{"c":["b",null]}', '{"c":[]}'],
        ['{"c":[null,null]}', '{"c":[2]}', '{"c":["a","b",null]}'],
    ),
    "uniqueItems of booleans": (
        with_type("array", items={"type": "boolean"}, uniqueItems=True),
        ["[]", "[true,false]", "[false]"],
        ["[true,true]", "[true,false,true]"],
    ),
    "uniqueItems of at most one": (
        with_type("array", items={"type": "string"}, uniqueItems=True, maxItems=1),
        ['["a"]'],
        ['["a","b"]'],
    ),
    "uniqueItems of a tuple": (
        with_type("array", prefixItems=[{"type": "string"}, {"type": "integer"}], items=False, uniqueItems=True),
        ['["a",1]'],
        ["[1,1]"],
    ),
    "uniqueItems of no array": ({"type": "null", "uniqueItems": True}, ["null"], ["[1,1]"]),
    "what says nothing": (
        with_type("array", uniqueItems=False, minContains=3, then={"type": "null"}, unevaluatedItems=True),
        ["[1,1]"],
        ["1"],
    ),
}

FORMATS: dict[str, tuple[list[str], list[str]]] = {
    "date": (["2024-02-29", "2000-02-29", "0400-12-31"], ["2023-02-29", "1900-02-29", "2024-04-31", "0000-01-01"]),
    "time": (["23:59:59Z", "01:02:03.5+02:00"], ["24:00:00Z", "23:59:60Z", "01:02:03", "1:02:03Z"]),
    "date-time": (["2024-02-29T00:00:00Z"], ["2023-02-29T00:00:00Z", "2024-01-01 00:00:00Z"]),
    "duration": (["P1D", "PT2H"], ["1D", "P"]),
    "email": (["a@example.com"], ["a", "a@"]),
    "hostname": (["example.com"], ["-a.com", "a b"]),
    "ipv4": (["127.0.0.1"], ["256.0.0.1", "1.2.3"]),
    "ipv6": (["::1"], [":1", "12345::"]),
    "uuid": (["2eb8aa08-aa98-11ea-b4aa-73b441d16380"], ["2eb8aa08-aa98-11ea-b4aa-73b441d1638"]),
    "uri": (["http://a.b/c?d#e"], ["a b"]),
    "base64": (["", "YQ==", "YWI=", "YWJj"], ["YQ=", "YQ===", "Y*=="]),
    "base64url": (["YW-_"], ["YW+/"]),
    "json-pointer": (["", "/a~0b/c~1"], ["a", "/~2"]),
    "relative-json-pointer": (["0#", "1/a"], ["/a", "01"]),
    "password": (["anything"], []),
}

REFUSED: dict[str, Any] = {
    "type": {"type": "str"},
    "type ": {"type": []},
    "enum": {"enum": []},
    "pattern": {"pattern": "("},
    "look-ahead": {"type": "string", "pattern": "(?=a)b"},
    "backreference": {"type": "string", "pattern": r"(a)\1"},
    "empty character class": {"type": "string", "pattern": "[]a]"},
    "control character": {"type": "string", "pattern": r"^a\x01b$"},
    "control characters": {"type": "string", "pattern": "^[\\x00-\\x02]$"},
    "control character ": {"const": "a\x00b"},
    "format": {"type": "string", "format": "idn-email"},
    "required": {"required": "a"},
    "properties": {"properties": {"a": "bar"}},
    "properties ": {"properties": []},
    "not": {"not": {"type": "string"}},
    "if": {"if": {"type": "string"}, "then": {"minLength": 2}},
    "contains": {"contains": {"type": "null"}},
    "uniqueItems": {"uniqueItems": True},
    "uniqueItems ": with_type("array", items={"type": "string"}, uniqueItems=True),
    "uniqueItems  ": with_type("array", items={"enum": [*range(7)]}, uniqueItems=True),
    "uniqueItems   ": with_type("array", items={"enum": [1, 2, "x"]}, uniqueItems=True, minItems=4),
    "uniqueItems    ": with_type("array", items={"enum": [1]}, prefixItems=[{"enum": [1]}], uniqueItems=True),
    "uniqueItems     ": {"type": ["array", "null"], "items": {"enum": [1, 2]}, "uniqueItems": True},
    "uniqueItems      ": {"type": "array", "uniqueItems": 1},
    "minProperties": {"minProperties": 2},
    "propertyNames": {"propertyNames": {"pattern": "a"}},
    "dependentRequired": {"dependentRequired": {"a": ["b"]}},
    "dependentSchemas": {"dependentSchemas": {"a": {}}},
    "dependencies": {"dependencies": {"a": ["b"]}},
    "unevaluatedProperties": {"unevaluatedProperties": False},
    "unevaluatedItems": {"unevaluatedItems": False},
    "nullable": {"type": "string", "nullable": True},
    "$dynamicRef": {"$dynamicRef": "#x"},
    "$schema": {"$schema": "http://example.com/dialect"},
    "$ref": {"$ref": "#/$defs/none"},
    "no schema": {"$ref": "#/const", "const": {"not": {}}},
    "present": {"$ref": "https://example.com/other.json"},
    "needs itself": {"$ref": "#"},
    "needs itself ": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    "needs itself  ": {"properties": {"a": {"allOf": [{"$ref": "#/properties/a"}]}}},
    "needs itself   ": {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    "needs itself    ": {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
    "oneOf": {"oneOf": [{"type": "integer"}, {"minimum": 3}]},
    "oneOf ": {"oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
    "anyOf": {"anyOf": []},
    "minimum": {"type": "integer", "minimum": 5, "maximum": 3},
    "double": {"type": "integer", "minimum": 2**53 + 1},
    "double ": {"const": 10**25},
    "multipleOf": {"type": "integer", "multipleOf": 1_000_003},
    "multipleOf ": {"type": "integer", "allOf": [{"multipleOf": 101}, {"multipleOf": 103}]},
    "multipleOf  ": {"type": "number", "multipleOf": 0},
    "count": {"minLength": -1},
    "count ": {"minItems": 1.5},
    "minLenght": {"type": "string", "minLenght": 3},
    "x-guidance": {"x-guidance": {"lenient": True}, "not": {}},
    "schema": {"items": 5},
    "Unsatisfiable": False,
    "1,000 properties": {"properties": {f"p{i}": {} for i in range(1_001)}},
    "1,000 properties, with an allOf": {"allOf": [{"properties": {f"p{j}{i}": {} for i in range(600)}} for j in "ab"]},
}


@pytest.mark.parametrize("name", ENFORCED)
def test_keyword_is_enforced(name: str) -> None:
    schema, good, bad = ENFORCED[name]
    start = constraint(json_schema=schema)
    assert [text for text in good if not accepts(start, text)] == []
    assert [text for text in bad if accepts(start, text)] == []
    texts = outputs(start, seeds=30)
    assert texts
    for text in texts:
        check_valid(schema, text)


@pytest.mark.parametrize("name", FORMATS)
def test_format_is_enforced(name: str) -> None:
    good, bad = FORMATS[name]
    schema = {"type": "string", "format": name}
    start = constraint(json_schema=schema)
    assert [text for text in good if not accepts(start, json.dumps(text))] == []
    assert [text for text in bad if accepts(start, json.dumps(text))] == []
    for text in outputs(start, seeds=30):
        check_valid(schema, text)


def test_every_date_is_one() -> None:
    start = constraint(json_schema={"format": "date", "type": "string"})
    for text in outputs(start, seeds=200):
        datetime.date.fromisoformat(json.loads(text))


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_enforced_is_refused_by_name(name: str) -> None:
    with pytest.raises(GrammarError, match=re.escape(name.strip())):
        constraint(json_schema=REFUSED[name])


def test_errors_name_the_place() -> None:
    schema = {"properties": {"a/b": {"items": [{"uniqueItems": True}]}}}
    with pytest.raises(GrammarError, match=r"uniqueItems cannot be enforced, .* \(at #/properties/a~1b/items/0"):
        enforceable_schema(schema)


@pytest.mark.parametrize(
    "schema", [{"type": "object"}, {"type": "array"}, NODE, {"type": "object", "required": ["a", "b"]}]
)
def test_whitespace_is_bounded(schema: Any) -> None:
    """However much a model likes blanks: one at most, after a comma or a colon."""
    start = constraint(json_schema=schema)
    for text in (*outputs(start, seeds=50), *filter(lambda text: not accepts(start, text), ['{ "a":1}', "{}\n"])):
        outside = re.sub(r'"(?:[^"\\]|\\.)*"', '""', text)
        assert not re.search(r"(?<![,:])\s|[\t\n\r]|\s\s", outside) or text in ('{ "a":1}', "{}\n"), text
    assert not accepts(start, '{"a":  1}')
    assert not accepts(start, " {}")


def test_mixtures_of_keywords_stay_valid() -> None:
    """Random schemas of what is supported: every complete output is valid."""
    rng = random.Random(5)
    complete = 0
    for _ in range(60):
        schema = random_schema(rng, 3)
        try:
            start = constraint(json_schema=schema)
        except GrammarError:
            continue
        for seed in range(4):
            ids, ended = random_output(start, random.Random(seed), 150)
            if ended:
                complete += 1
                check_valid(schema, tokenizer().decode(ids))
    assert complete > 80


def random_schema(rng: random.Random, depth: int) -> Any:
    leaves = [
        lambda: with_type("integer", minimum=rng.randint(-50, 0), maximum=rng.randint(0, 500)),
        lambda: with_type("number", exclusiveMinimum=rng.randint(-5, 5) / 4),
        lambda: with_type("string", minLength=rng.randint(0, 2), maxLength=rng.randint(2, 6)),
        lambda: with_type("string", pattern=rng.choice(["^a+b?$", "[0-9]{2}", "^(x|yy|zzz)$"]), maxLength=12),
        lambda: with_type("string", format=rng.choice(["date", "uuid", "ipv4", "time"])),
        lambda: {"enum": rng.sample(["a", "b", 1, 2.5, None, True, [], {"q": 1}], 3)},
        lambda: with_type("boolean"),
        lambda: with_type("integer", multipleOf=rng.choice([2, 3, 25]), maximum=400),
    ]
    branches = [
        lambda: with_type("array", items=random_schema(rng, depth - 1), minItems=rng.randint(0, 2), maxItems=3),
        lambda: with_type(
            "object",
            properties={name: random_schema(rng, depth - 1) for name in rng.sample("abcdef", rng.randint(1, 3))},
            required=rng.sample("abc", rng.randint(0, 2)),
            additionalProperties=rng.choice([False, random_schema(rng, 0)]),
        ),
        lambda: {"anyOf": [random_schema(rng, depth - 1), random_schema(rng, depth - 1)]},
        lambda: {"allOf": [random_schema(rng, depth - 1), {"type": rng.choice(["object", "array", "string"])}]},
    ]
    return rng.choice(branches if depth > 0 and rng.random() < 0.8 else leaves)()
