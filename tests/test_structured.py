from __future__ import annotations

import json
import pickle
import subprocess
import sys
from types import MappingProxyType
from typing import Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field

from asyncllm import SamplingParams, StructuredOutput
from asyncllm.errors import GrammarError, InvalidParamsError
from asyncllm.structured import MAX_CHARACTERS, MAX_DEPTH


class Person(BaseModel):
    name: str
    age: int = Field(ge=0)


def nested(depth: int) -> Any:
    schema: Any = {}
    for _ in range(depth - 1):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("form", "named"),
    [
        ({}, "exactly one"),
        ({"regex": "a", "choice": ["a"]}, "regex, choice"),
        ({"json_object": False}, "json_object"),
        ({"json_object": 1}, "json_object"),
        ({"regex": 5}, "regex"),
        ({"regex": "a" * (MAX_CHARACTERS + 1)}, "regex"),
        ({"regex": "\ud800"}, "Unicode"),
        ({"grammar": " \n"}, "grammar"),
        ({"choice": []}, "choice"),
        ({"choice": "yes"}, "choice"),
        ({"choice": ["a", ""]}, "choice"),
        ({"choice": ["a", 1]}, "choice"),
        ({"choice": [str(i) for i in range(20_000)]}, "choice"),
        ({"choice": ["a\udc00"]}, "choice"),
        ({"json_schema": "{"}, "not JSON"),
        ({"json_schema": "[1]"}, "must be an object"),
        ({"json_schema": 5}, "must be an object"),
        ({"json_schema": {"enum": [float("nan")]}}, "not JSON"),
        ({"json_schema": '{"minimum": NaN}'}, "not JSON"),
        ({"json_schema": '{"minimum": 1e999}'}, "not JSON"),
        ({"json_schema": {"enum": [object()]}}, "no JSON value"),
        ({"json_schema": {"enum": [b"x"]}}, "no JSON value"),
        ({"json_schema": {"description": "x" * 3_000_000}}, "characters"),
        ({"json_schema": nested(MAX_DEPTH + 1)}, "nested"),
        ({"json_schema": "[" * 100_000}, "not JSON"),
        ({"json_schema": int}, "must be an object"),
        ({"structural_tag": True}, "structural_tag"),
        ({"regex": "a", "model": Person}, "model"),
    ],
)
def test_impossible_forms_are_refused_by_name(form: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidParamsError, match=named):
        StructuredOutput(**form)


def test_a_schema_that_holds_itself_is_refused() -> None:
    schema: dict[str, Any] = {}
    schema["items"] = schema
    with pytest.raises(InvalidParamsError, match="not JSON"):
        StructuredOutput(json_schema=schema)


def test_equal_content_is_equal() -> None:
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    one, other = StructuredOutput(json_schema=schema), StructuredOutput(json_schema=json.dumps(schema, indent=4))
    assert one == other == StructuredOutput(json_schema=MappingProxyType(schema))
    assert hash(one) == hash(other)
    assert one.kind == "json_schema"
    assert list(json.loads(one.source)["properties"]) == ["b", "a"]  # the order of properties is kept
    assert StructuredOutput(choice=["a", "b", "a"]) == StructuredOutput(choice=("a", "b"))
    assert StructuredOutput(regex="a") != StructuredOutput(grammar="a")
    assert pickle.loads(pickle.dumps(one)) == one
    assert StructuredOutput(json_schema=nested(MAX_DEPTH)).kind == "json_schema"
    assert StructuredOutput(json_schema={"const": '[{"[['}).kind == "json_schema"  # brackets in a text are none
    with pytest.raises(AttributeError):
        one.regex = "a"  # type: ignore[misc]


def test_pydantic_models_are_schemas() -> None:
    forms = [
        StructuredOutput.from_model(Person),
        StructuredOutput(json_schema=Person),  # type: ignore[arg-type]
        SamplingParams(structured_output=Person).structured_output,  # type: ignore[arg-type]
    ]
    for form in forms:
        assert form is not None
        assert json.loads(form.source) == {**Person.model_json_schema(), "additionalProperties": False}
        assert form.parse('{"name":"Ada","age":36}') == Person(name="Ada", age=36)
        with pytest.raises(ValueError, match="age"):
            form.parse('{"name":"Ada","age":-1}')
    assert StructuredOutput.from_model(list[Person]).parse('[{"name":"Ada","age":36}]') == [Person(name="Ada", age=36)]
    assert StructuredOutput.from_model(Literal["x", "y"]).parse('"x"') == "x"


def test_a_model_has_no_properties_but_its_own() -> None:
    class Open(BaseModel):
        model_config = ConfigDict(extra="allow")
        person: Person
        counts: dict[str, int]

    schema = json.loads(StructuredOutput.from_model(Open).source)
    assert schema["additionalProperties"] is True  # it says so
    assert schema["properties"]["counts"]["additionalProperties"] == {"type": "integer"}
    assert schema["$defs"]["Person"]["additionalProperties"] is False


@pytest.mark.parametrize("model", ["Person", None, {"type": "string"}, True, object()])
def test_what_is_no_model_is_refused(model: Any) -> None:
    with pytest.raises(InvalidParamsError):
        StructuredOutput.from_model(model)


def test_outputs_are_parsed_by_their_kind() -> None:
    assert StructuredOutput(json_schema={}).parse("[1]") == [1]
    assert StructuredOutput(json_object=True).parse('{"a":1}') == {"a": 1}
    assert StructuredOutput(choice=["1"]).parse("1") == "1"
    with pytest.raises(ValueError, match="nested"):
        StructuredOutput(json_schema={}).parse("[" * 200_000)


def test_params_take_nothing_else() -> None:
    with pytest.raises(InvalidParamsError, match="StructuredOutput"):
        SamplingParams(structured_output={"type": "object"})  # type: ignore[arg-type]
    assert issubclass(GrammarError, InvalidParamsError)


def test_nothing_optional_is_imported() -> None:
    code = (
        "import sys, asyncllm; from asyncllm import AsyncEngine; asyncllm.StructuredOutput(json_schema={});"
        "assert not {'pydantic', 'llguidance', 'jsonschema'} & sys.modules.keys(), sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
