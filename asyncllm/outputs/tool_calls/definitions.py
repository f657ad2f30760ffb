"""ToolDefinition: a tool that a model may call, checked when a request comes in."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncllm.errors import InvalidParamsError

MAX_TOOLS = 1024

_NAME = re.compile(r"[a-zA-Z0-9_.:/-]{1,64}")  # OpenAI's [a-zA-Z0-9_-], and what separates namespaces elsewhere


@dataclass(frozen=True, slots=True)
class ToolDefinition:
    """One function of a request's `tools`."""

    name: str
    parameters: Mapping[str, Any]
    """A JSON schema of an object; without properties where the function takes none."""
    description: str = ""

    @property
    def properties(self) -> Mapping[str, Any]:
        """The schemas of the parameters, by name."""
        found = self.parameters.get("properties", {})
        return found if isinstance(found, Mapping) else {}


Tools = Sequence[Mapping[str, Any] | ToolDefinition]
"""Tools in OpenAI's form, or read already."""


def read_tools(tools: Tools) -> tuple[ToolDefinition, ...]:
    """The tools of a request. Raises `InvalidParamsError` that names the bad field."""
    if isinstance(tools, str | bytes | Mapping) or not isinstance(tools, Sequence):
        raise InvalidParamsError(f"tools must be a list, got {type(tools).__name__}")
    if len(tools) > MAX_TOOLS:
        raise InvalidParamsError(f"tools holds {len(tools):,} tools, over {MAX_TOOLS:,}")
    read = tuple(_read_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools))
    names: set[str] = set()
    for index, tool in enumerate(read):
        if tool.name in names:
            raise InvalidParamsError(f"tools[{index}].function.name: {tool.name!r} is there twice")
        names.add(tool.name)
    return read


def _read_tool(tool: object, where: str) -> ToolDefinition:
    if isinstance(tool, ToolDefinition):
        return tool
    if not isinstance(tool, Mapping):
        raise InvalidParamsError(f"{where} must be an object, got {tool!r:.100}")
    if tool.get("type", "function") != "function":
        raise InvalidParamsError(f'{where}.type must be "function", got {tool["type"]!r:.100}')
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise InvalidParamsError(f"{where}.function must be an object, got {function!r:.100}")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidParamsError(
            f"{where}.function.name must be 1 to 64 letters, digits or _ . : / -, got {name!r:.100}"
        )
    description = function.get("description")
    if description is not None and not isinstance(description, str):
        raise InvalidParamsError(f"{where}.function.description must be a string, got {description!r:.100}")
    parameters = _read_parameters(function.get("parameters"), f"{where}.function.parameters")
    return ToolDefinition(name, parameters, description or "")


def _read_parameters(parameters: object, where: str) -> Mapping[str, Any]:
    if parameters is None:
        return {"type": "object", "properties": {}}
    if not isinstance(parameters, Mapping):
        raise InvalidParamsError(f"{where} must be a JSON schema, got {parameters!r:.100}")
    kind = parameters.get("type", "object")
    if kind != "object":
        raise InvalidParamsError(f'{where}.type must be "object", got {kind!r:.100}')
    properties = parameters.get("properties", {})
    if not isinstance(properties, Mapping):
        raise InvalidParamsError(f"{where}.properties must be an object, got {properties!r:.100}")
    for name, schema in properties.items():
        if not isinstance(name, str) or not isinstance(schema, Mapping | bool):
            raise InvalidParamsError(f"{where}.properties.{name} must be a JSON schema, got {schema!r:.100}")
    required = parameters.get("required", [])
    if not isinstance(required, list | tuple) or not all(isinstance(name, str) for name in required):
        raise InvalidParamsError(f"{where}.required must be a list of names, got {required!r:.100}")
    return parameters
