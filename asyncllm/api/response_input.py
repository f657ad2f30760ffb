"""The input of a response as the messages of a chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from asyncllm.api.chat_job import Tools, make_tools
from asyncllm.api.errors import InvalidRequest
from asyncllm.api.protocol.responses import InputItem, InputPart, NamedResponseTool, ResponseRequest

_TEXT_PARTS = ("input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text")


def input_items(given: str | Sequence[InputItem]) -> list[dict[str, Any]]:
    """As they are kept."""
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": given}]}]
    return [item.model_dump(exclude_none=True) for item in given]


def input_messages(given: str | Sequence[InputItem]) -> list[dict[str, Any]]:
    """Raises `InvalidRequest` for items that this model has no use for."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages: list[dict[str, Any]] = []
    thought = ""
    for index, item in enumerate(given):
        where = f"input[{index}]"
        match item.type:
            case None | "message":
                messages.append(_message(item, where))
            case "function_call":
                _add_call(messages, item, where)
            case "function_call_output":
                output = _text(item.output, where)
                messages.append({"role": "tool", "tool_call_id": item.call_id or "", "content": output})
            case "reasoning":
                thought += _text(item.content, where)
                continue
            case _:
                raise InvalidRequest(f"{where}: this server has no {item.type!r:.40}", param="input")
        if thought and messages[-1]["role"] == "assistant":
            messages[-1]["reasoning_content"] = thought
        thought = ""
    if not messages:
        raise InvalidRequest("input holds nothing to answer", param="input")
    return messages


def response_tools(body: ResponseRequest) -> Tools:
    """In the shape that templates want. Raises `InvalidRequest`."""
    given = []
    for index, tool in enumerate(body.tools or ()):
        if tool.type != "function" or not tool.name:
            raise InvalidRequest(f"tools[{index}]: functions are the only tools here", param="tools")
        function = tool.model_dump(exclude_none=True, include={"name", "description", "parameters", "strict"})
        given.append({"type": "function", "function": function})
    choice = body.tool_choice
    name = choice.name if isinstance(choice, NamedResponseTool) else None
    kind = choice if isinstance(choice, str) else None
    return make_tools(given, choice=kind, name=name, parallel=body.parallel_tool_calls is not False)


def answer_messages(output: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The items of an answer as messages of the chat that goes on."""
    return input_messages([InputItem.model_validate(item) for item in output]) if output else []


def _message(item: InputItem, where: str) -> dict[str, Any]:
    if item.role is None:
        raise InvalidRequest(f"{where}: a message needs a role", param="input")
    role = "system" if item.role == "developer" else item.role
    return {"role": role, "content": _text(item.content, where)}


def _add_call(messages: list[dict[str, Any]], item: InputItem, where: str) -> None:
    """Calls of one turn are one message, together with what was said before them."""
    if not item.name:
        raise InvalidRequest(f"{where}: a function_call needs a name", param="input")
    function = {"name": item.name, "arguments": item.arguments or "{}"}
    call = {"id": item.call_id or item.id or "", "type": "function", "function": function}
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    messages[-1].setdefault("tool_calls", []).append(call)


def _text(content: str | Sequence[InputPart] | None, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    for part in content:
        if part.type not in _TEXT_PARTS:
            raise InvalidRequest(f"{where}: this model takes text, not {part.type!r:.40}", param="input")
    return "".join(part.text or part.refusal or "" for part in content)
