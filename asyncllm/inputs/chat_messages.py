"""Chat messages, brought into the one shape that templates can rely on.

Callers write messages in every shape that the OpenAI API allows; most templates know only one. Content parts are
joined, null becomes "", empty `tool_calls` and keys that are None are dropped, tool arguments, which the API has as
JSON text, become mappings, and what answers a call is linked to it. What comes out is made of plain JSON types, and
shares nothing with what came in.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

from asyncllm.errors import InvalidPromptError

Message = dict[str, Any]

_SHORT_ID = re.compile(r"[a-zA-Z0-9]{9}")


class ToolArguments(dict[str, Any]):
    """The arguments of a call: a mapping, and for a template that writes them as they are, the text that they came as.

    So what a model wrote stays what it wrote, and the prompt's beginning is found in the cache.
    """

    def __init__(self, values: Mapping[str, Any], text: str | None = None) -> None:
        super().__init__(values)
        self._text = text

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False) if self._text is None else self._text


def normalise_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """New messages in the shape above. Raises `InvalidPromptError` that names the index of the bad message."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise InvalidPromptError(f"a chat must be a list of messages, got {type(messages).__name__}")
    if not messages:
        raise InvalidPromptError("the chat has no messages")
    normalised = [_normalise(message, f"messages[{index}]") for index, message in enumerate(messages)]
    _link_calls(normalised)
    return normalised


def with_short_ids(messages: Sequence[Message]) -> list[Message]:
    """The same messages; ids of calls that are not nine letters and digits become such, equal ones equal."""
    short: list[Message] = []
    for message in messages:
        changed = dict(message)
        if "tool_call_id" in message:
            changed["tool_call_id"] = _short_id(message["tool_call_id"])
        if "tool_calls" in message:
            changed["tool_calls"] = [call | {"id": _short_id(call["id"])} for call in message["tool_calls"]]
        short.append(changed)
    return short


def _short_id(given: object) -> str:
    text = str(given)
    if _SHORT_ID.fullmatch(text):
        return text
    return blake2b(text.encode("utf-8", "replace"), digest_size=5).hexdigest()[:9]


def _link_calls(messages: Sequence[Message]) -> None:
    """Give calls without an id one, and tell each answer which call it belongs to, and its tool's name."""
    names: dict[object, str] = {}
    open_calls: list[object] = []  # without an answer yet
    for message in messages:
        for call in message.get("tool_calls", ()):
            if call.get("id") in (None, ""):
                call["id"] = f"call{len(names):05}"
            names[call["id"]] = call["function"]["name"]
            open_calls.append(call["id"])
        if message["role"] == "tool":
            if "tool_call_id" not in message and open_calls:
                message["tool_call_id"] = open_calls[0]
            answered = message.get("tool_call_id")
            if answered in open_calls:
                open_calls.remove(answered)
            if "name" not in message and answered in names:
                message["name"] = names[answered]


def normalise_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Tools as plain data; none of them and an empty list are the same. Raises `InvalidPromptError`."""
    if tools is None:
        return None
    if isinstance(tools, str | bytes | Mapping) or not isinstance(tools, Sequence):
        raise InvalidPromptError(f"tools must be a list, got {type(tools).__name__}")
    for index, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise InvalidPromptError(f"tools[{index}] must be a mapping with a JSON schema, got {tool!r:.100}")
    return [plain(tool, f"tools[{index}]") for index, tool in enumerate(tools)] or None


def plain(value: object, where: str) -> Any:
    """A copy made of JSON's types alone, so that a template reaches no method of a caller's object."""
    try:
        return _plain(value, where)
    except RecursionError as error:
        raise InvalidPromptError(f"{where} is nested too deeply") from error


def _plain(value: object, where: str) -> Any:
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)  # an enum, say
    if isinstance(value, Mapping):
        return {_plain(key, where): _plain(item, where) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, where) for item in value]
    raise InvalidPromptError(f"{where} holds a {type(value).__name__}, which is not JSON data")


def _normalise(message: object, where: str) -> Message:
    if not isinstance(message, Mapping):
        raise InvalidPromptError(f"{where} must be a mapping with role and content, got {message!r:.100}")
    kept = plain({key: value for key, value in message.items() if value is not None}, where)
    role = kept.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidPromptError(f"{where} has no role")
    if "content" not in message and role != "assistant":
        raise InvalidPromptError(f"{where} (role {role!r}) has no content")
    if not isinstance(kept.get("tool_call_id"), str | None):
        raise InvalidPromptError(f"{where}: tool_call_id must be a string, got {kept['tool_call_id']!r:.100}")
    result: Message = {"role": role, "content": _text(kept.get("content", ""), where)}
    calls = _tool_calls(kept.get("tool_calls", []), where)
    if calls:
        result["tool_calls"] = calls
    return result | {key: value for key, value in kept.items() if key not in ("role", "content", "tool_calls")}


def _text(content: object, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidPromptError(f"{where}: content must be text or a list of parts, got {content!r:.100}")
    return "".join(_part_text(part, f"{where}.content[{index}]") for index, part in enumerate(content))


def _part_text(part: object, where: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise InvalidPromptError(f'{where} must be {{"type": "text", "text": ...}}, got {part!r:.100}')
    return str(part["text"])


def _tool_calls(calls: object, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise InvalidPromptError(f"{where}: tool_calls must be a list, got {calls!r:.100}")
    return [_tool_call(call, f"{where}.tool_calls[{index}]") for index, call in enumerate(calls)]


def _tool_call(call: object, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidPromptError(f"{where} must be a mapping with a function and its name, got {call!r:.100}")
    if not isinstance(call.get("id"), str | None):
        raise InvalidPromptError(f"{where}: the id must be a string, got {call['id']!r:.100}")
    function = function | {"arguments": _arguments(function.get("arguments"), where)}
    return {"type": "function"} | call | {"function": function}


def _arguments(arguments: object, where: str) -> ToolArguments:
    text = arguments if isinstance(arguments, str) and arguments.strip() else None
    if text is not None:
        try:
            arguments = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InvalidPromptError(f"{where}: the arguments are not JSON: {error}") from error
    elif arguments is None or isinstance(arguments, str):
        arguments = {}
    if not isinstance(arguments, dict):
        raise InvalidPromptError(f"{where}: the arguments must be a JSON object, got {arguments!r:.100}")
    return ToolArguments(arguments, text)
