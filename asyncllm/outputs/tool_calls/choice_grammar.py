"""The grammar of an answer that must be a tool call: `tool_choice` of "required", or of one tool.

What it allows is what the model's own format looks like, so that the answer is parsed as any other; the arguments are
held to the tool's schema. A schema that cannot be enforced is refused when the request is submitted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncllm.errors import InvalidParamsError
from asyncllm.outputs.reasoning import find_reasoning_format
from asyncllm.outputs.tool_calls import deepseek, hermes
from asyncllm.outputs.tool_calls.definitions import ToolDefinition, Tools, read_tools
from asyncllm.outputs.tool_calls.tool_parser import tool_format
from asyncllm.structured import StructuredOutput

_OPEN_ENDED = frozenset(
    ("$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "if", "not", "patternProperties", "dependentSchemas",
     "unevaluatedProperties")
)  # fmt: skip
"""Keywords beside which properties that a schema does not list may still be wanted."""

_KEYWORD_ARGUMENTS = frozenset(
    ("type", "properties", "required", "additionalProperties", "$defs", "definitions", "title", "description",
     "$schema", "$id", "$comment")
)  # fmt: skip
"""What a schema may hold whose object is written as `a=1, b=2`."""

_ANY = r"/(.|\n)*/"


@dataclass(frozen=True, slots=True)
class _Form:
    """How a format writes calls: `before`, calls with `between` them, `after`. `open` and `close` stand around the
    arguments, with NAME for the tool's."""

    open: str
    close: str
    between: str = ""
    before: str = ""
    after: str = ""


_HERMES = _Form(f'{hermes.OPEN}\n{{"name": "NAME", "arguments": ', f"}}\n{hermes.CLOSE}", "\n")
_FORMS = {
    "hermes": _HERMES,
    "qwen3_coder": _HERMES,  # its parser reads both, and only JSON can be held to a schema
    "llama3_json": _Form('{"name": "NAME", "parameters": ', "}", "; "),
    "mistral": _Form('{"name": "NAME", "arguments": ', "}", ", ", "[TOOL_CALLS] [", "]"),
    "pythonic": _Form("NAME(", ")", ", ", "[", "]"),
    "deepseek": _Form(
        f"{deepseek.CALL_BEGIN}function{deepseek.SEPARATOR}NAME\n```json\n",
        f"\n```{deepseek.CALL_END}",
        "\n",
        deepseek.CALLS_BEGIN,
        deepseek.CALLS_END,
    ),
}


def tool_choice_grammar(  # noqa: PLR0913  # the last two by keyword
    format: str,
    tools: Tools,
    choice: str,
    parallel: bool,
    *,
    reasoning: str | None = None,
    opened: bool = False,
) -> StructuredOutput:
    """What an answer in this format must look like. `choice` is "required" (any tool) or a tool's name; one call, or
    with `parallel` one or more.

    `reasoning` names the format of a model that may think before it; `opened`: it has begun to in the prompt. Raises
    `InvalidParamsError`.
    """
    tool_format(format)
    form = _FORMS[format]
    chosen = _chosen(read_tools(tools), choice)
    rules = ["start: answer"]
    if reasoning is not None:
        tags = find_reasoning_format(reasoning)
        rules = [
            "start: thought answer" if opened else f"start: ({_text(tags.start)} thought)? answer",
            f"thought[suffix={_text(tags.end)}]: {_ANY}",
        ]
    more = f"({_text(form.between)} call)*" if parallel else ""
    rules.append(f"answer: {_text(form.before)} call {more} {_text(form.after)}")
    rules.append("call: " + " | ".join(f"call_{i}" for i in range(len(chosen))))
    for i, tool in enumerate(chosen):
        opening, closing = form.open.replace("NAME", tool.name), form.close
        rules.append(f"call_{i}: {_text(opening)} arguments_{i} {_text(closing)}")
        if format == "pythonic":
            rules += _keyword_rules(tool, i)
        else:
            rules.append(f"arguments_{i}: %json {_json(_arguments_schema(tool.parameters))}")
    return StructuredOutput(grammar="\n".join(rules))


def _chosen(tools: Sequence[ToolDefinition], choice: str) -> Sequence[ToolDefinition]:
    if not tools:
        raise InvalidParamsError("tool_choice needs tools")
    if choice == "required":
        return tools
    chosen = [tool for tool in tools if tool.name == choice]
    if not chosen:
        raise InvalidParamsError(f"tool_choice names {choice!r:.100}, which is not among the tools")
    return chosen


def _arguments_schema(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The schema, closed where that takes nothing away that it describes: else a model may invent arguments."""
    schema = {"type": "object", **parameters}
    if _OPEN_ENDED.isdisjoint(schema):
        schema.setdefault("additionalProperties", False)
    return schema


def _keyword_rules(tool: ToolDefinition, i: int) -> Iterator[str]:
    """`a=1, b=2`, in the schema's order; what is not required may be left out."""
    unknown = sorted(set(tool.parameters) - _KEYWORD_ARGUMENTS)
    if unknown:
        raise InvalidParamsError(
            f"the parameters of {tool.name!r} hold {', '.join(unknown)}, which this model's format cannot be held to"
        )
    required = set(tool.parameters.get("required", ()))
    names = [name for name in tool.properties if name.isidentifier()]
    missing = sorted(required - set(names))
    if missing:
        raise InvalidParamsError(
            f"{tool.name!r} requires {', '.join(missing)}, which this model's format cannot write as a keyword argument"
        )
    definitions = {key: tool.parameters[key] for key in ("$defs", "definitions") if key in tool.parameters}
    count = len(names)
    yield f"arguments_{i}: first_{i}_0"
    yield f'first_{i}_{count}: ""'
    yield f'rest_{i}_{count}: ""'
    for k, name in enumerate(names):
        skip = "" if name in required else " | {}" + f"_{i}_{k + 1}"
        yield f"first_{i}_{k}: item_{i}_{k} rest_{i}_{k + 1}{skip.format('first')}"
        yield f'rest_{i}_{k}: ", " item_{i}_{k} rest_{i}_{k + 1}{skip.format("rest")}'
        yield f"item_{i}_{k}: {_text(name + '=')} value_{i}_{k}"
        schema = tool.properties[name]
        yield f"value_{i}_{k}: %json {_json({**definitions, **schema} if isinstance(schema, Mapping) else schema)}"


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _json(schema: Any) -> str:
    try:
        return json.dumps(schema, ensure_ascii=False, allow_nan=False, default=dict)
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidParamsError(f"the parameters of a tool are not JSON: {error!s:.200}") from None
