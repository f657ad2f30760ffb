from __future__ import annotations

import copy
from collections import OrderedDict
from enum import StrEnum
from types import MappingProxyType
from typing import Any

import pytest

from asyncllm.errors import InvalidPromptError
from asyncllm.inputs.chat_messages import normalise_messages, normalise_tools


class Role(StrEnum):
    USER = "user"


def call(arguments: object) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}


def test_content_in_every_legal_shape() -> None:
    parts = [{"type": "text", "text": "Hi"}, {"type": "text", "text": " you"}, "!"]
    messages = [
        {"role": "user", "content": parts},
        {"role": "user", "content": "Hi"},
        {"role": "user", "content": None},
        {"role": "user", "content": []},
        {"role": "assistant", "tool_calls": [call("{}")]},
    ]
    assert [message["content"] for message in normalise_messages(messages)] == ["Hi you!", "Hi", "", "", ""]


def test_keys_without_a_value_go_and_others_stay() -> None:
    (message,) = normalise_messages(
        [{"role": "assistant", "content": "a", "tool_calls": [], "name": None, "refusal": None, "reasoning": "b"}]
    )
    assert message == {"role": "assistant", "content": "a", "reasoning": "b"}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [('{"a": 1}', {"a": 1}), ({"a": [1]}, {"a": [1]}), ("", {}), (" ", {}), (None, {}), ('{"é": null}', {"é": None})],
)
def test_tool_arguments_become_mappings(arguments: object, expected: dict[str, Any]) -> None:
    (message,) = normalise_messages([{"role": "assistant", "content": None, "tool_calls": [call(arguments)]}])
    assert message["tool_calls"] == [call(expected)]


def test_the_callers_messages_are_left_alone_and_not_shared() -> None:
    messages = [{"role": "assistant", "content": [{"type": "text", "text": "a"}], "tool_calls": [call('{"a": [1]}')]}]
    before = copy.deepcopy(messages)
    result = normalise_messages(messages)
    result[0]["tool_calls"][0]["function"]["name"] = "other"
    assert messages == before


def test_the_result_is_plain_data() -> None:
    message = MappingProxyType({"role": Role.USER, "content": "a", "extra": OrderedDict(a=(1, 2.5, True, None))})
    (plain,) = normalise_messages((message,))
    assert plain == {"role": "user", "content": "a", "extra": {"a": [1, 2.5, True, None]}}
    assert type(plain["role"]) is str
    assert type(plain["extra"]) is dict


GOOD = {"role": "user", "content": "a"}
DEEP: list[Any] = []
for _ in range(100_000):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    ("messages", "where"),
    [
        ("hi", "a list of messages, got str"),
        (GOOD, "a list of messages, got dict"),
        (7, "a list of messages, got int"),
        ([], "no messages"),
        ([GOOD, "hi"], r"messages\[1\] must be a mapping"),
        ([GOOD, {"content": "a"}], r"messages\[1\] has no role"),
        ([{"role": 1, "content": "a"}], r"messages\[0\] has no role"),
        ([GOOD, {"role": "user"}], r"messages\[1\] \(role 'user'\) has no content"),
        ([{"role": "user", "content": 7}], r"messages\[0\]: content must be text"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], r"messages\[0\]\.content\[0\] must be"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"messages\[0\]\.content\[0\] must be"),
        ([{"role": "user", "content": "a", "extra": {1, 2}}], r"messages\[0\] holds a set"),
        ([{"role": "user", "content": "a", "extra": DEEP}], r"messages\[0\] is nested too deeply"),
        ([{"role": "assistant", "tool_calls": "f"}], r"messages\[0\]: tool_calls must be a list"),
        ([{"role": "assistant", "tool_calls": [{}]}], r"messages\[0\]\.tool_calls\[0\] must be"),
        ([{"role": "assistant", "tool_calls": [call("{")]}], r"tool_calls\[0\]: the arguments are not JSON"),
        ([{"role": "assistant", "tool_calls": [call("[" * 100_000)]}], r"tool_calls\[0\]: the arguments are not JSON"),
        ([{"role": "assistant", "tool_calls": [call("[1]")]}], r"tool_calls\[0\]: the arguments must be a JSON object"),
    ],
)
def test_the_bad_message_is_named(messages: Any, where: str) -> None:
    with pytest.raises(InvalidPromptError, match=where):
        normalise_messages(messages)


def test_tools() -> None:
    assert normalise_tools(None) is None
    assert normalise_tools([]) is None
    assert normalise_tools(({"type": "function"},)) == [{"type": "function"}]
    for tools, message in (({}, "must be a list"), (["f"], r"tools\[0\]"), ([{"f": print}], r"tools\[0\] holds a")):
        with pytest.raises(InvalidPromptError, match=message):
            normalise_tools(tools)  # type: ignore[arg-type]
