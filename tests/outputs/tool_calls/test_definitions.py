from __future__ import annotations

from typing import Any

import pytest

from asyncllm.errors import InvalidParamsError
from asyncllm.outputs.tool_calls.definitions import ToolDefinition, read_tools


def tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f"} | function}


def test_tools_are_read() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    first, second = read = read_tools([tool(description="d", parameters=schema), {"function": {"name": "g-2"}}])
    assert first == ToolDefinition("f", schema, "d")
    assert first.properties == {"a": {"type": "integer"}}
    assert second == ToolDefinition("g-2", {"type": "object", "properties": {}})
    assert read_tools(read) == read
    assert read_tools([]) == ()
    assert read_tools([tool(description=None, parameters=None)])[0].description == ""


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ("f", "tools must be a list, got str"),
        ({}, "tools must be a list, got dict"),
        (["f"], r"tools\[0\] must be an object"),
        ([tool(), {"type": "retrieval"}], r'tools\[1\]\.type must be "function"'),
        ([{"type": "function"}], r"tools\[0\]\.function must be an object"),
        ([tool(name=None)], r"tools\[0\]\.function\.name must be"),
        ([tool(name="")], r"tools\[0\]\.function\.name must be"),
        ([tool(name="a b")], r"tools\[0\]\.function\.name must be"),
        ([tool(name="x" * 65)], r"tools\[0\]\.function\.name must be"),
        ([tool(), tool()], r"tools\[1\]\.function\.name: 'f' is there twice"),
        ([tool(description=1)], r"tools\[0\]\.function\.description must be a string"),
        ([tool(parameters="x")], r"tools\[0\]\.function\.parameters must be a JSON schema"),
        ([tool(parameters={"type": "array"})], r'tools\[0\]\.function\.parameters\.type must be "object"'),
        ([tool(parameters={"properties": []})], r"parameters\.properties must be an object"),
        ([tool(parameters={"properties": {"a": "integer"}})], r"parameters\.properties\.a must be a JSON schema"),
        ([tool(parameters={"required": "a"})], r"parameters\.required must be a list of names"),
        ([tool(parameters={"required": [1]})], r"parameters\.required must be a list of names"),
        ([tool(name=f"f{i}") for i in range(1025)], "tools holds 1,025 tools"),
    ],
)
def test_the_bad_field_is_named(tools: Any, message: str) -> None:
    with pytest.raises(InvalidParamsError, match=message):
        read_tools(tools)
