"""Structured output over HTTP: the cases of `tests/test_cases_structured.py` as a client sees them. What cannot be held
to is a 400 that names it, and never text without its form."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from asyncllm import AsyncEngine
from asyncllm.api import create_asgi_app
from tests.api.asgi_client import post
from tests.outputs.grammars import check_valid
from tests.outputs.test_json_schema import ENFORCED, NODE, REFUSED, TREE

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture
async def app(tiny_folder: Path) -> AsyncIterator[Any]:
    async with AsyncEngine(str(tiny_folder), device="cpu", num_blocks=1024, block_size=16) as engine:
        yield create_asgi_app(engine)


def held_to(schema: Any, **more: Any) -> dict[str, Any]:
    response_format = {"type": "json_schema", "json_schema": {"name": "form", "schema": schema}}
    return {"messages": HI, "max_tokens": 120, "seed": 7, "response_format": response_format, **more}


async def check_schema(app: Any, schema: Any, choices: int) -> int:
    """How many answers ended by themselves; these are valid."""
    answer = await post(app, CHAT, held_to(schema, n=choices))
    assert answer.status == 200, answer.body
    ended = [each["message"]["content"] for each in answer.json["choices"] if each["finish_reason"] == "stop"]
    for text in ended:
        check_valid(schema, text)
    return len(ended)


@pytest.mark.parametrize("choices", [4, pytest.param(16, marks=pytest.mark.full)])
async def test_g29_each_keyword_is_enforced(choices: int, app: Any) -> None:
    schemas = [schema for schema, _, _ in ENFORCED.values()]
    ended = await asyncio.gather(*(check_schema(app, schema, choices) for schema in schemas))
    assert sum(count > 0 for count in ended) > 0.9 * len(schemas)


async def test_g29_or_refused_by_name(app: Any) -> None:
    for name, schema in REFUSED.items():
        refused = await post(app, CHAT, held_to(schema))
        assert refused.status == 400, (name, refused.body)
        assert name.strip() in refused.json["error"]["message"]
    assert (await post(app, CHAT, held_to({"type": "boolean"}))).status == 200


async def test_g30_recursive_schemas(app: Any) -> None:
    assert await check_schema(app, {"type": "boolean"}, 1)  # the first form of an engine builds what all share
    for schema in (NODE, TREE, {"type": "array", "items": {"$ref": "#"}, "maxItems": 2}):
        started = time.perf_counter()
        assert (await post(app, CHAT, held_to(schema, max_tokens=1))).status == 200
        assert time.perf_counter() - started < 1
        assert await check_schema(app, schema, 16)
    for place in ("#/$defs/x", "#/definitions/x", "#/properties/x"):
        defined = {place.split("/")[1]: {"x": {"enum": ["y"]}}}
        wanted = {"type": "object", "properties": {"x": {"enum": ["y"]}, "a": {"$ref": place}}, "required": ["a"]}
        assert await check_schema(app, {**defined, **wanted, "additionalProperties": False}, 8)


@pytest.mark.parametrize("response_format", [{"type": "json_object"}, held_to(TREE)["response_format"]])
async def test_g31_blanks_do_not_go_on(response_format: dict[str, Any], app: Any) -> None:
    blanks = [(await post(app, "/tokenize", {"prompt": text})).json["tokens"] for text in (" ", "\n", "\n\n", "\t")]
    quote, brace = [(await post(app, "/tokenize", {"prompt": text})).json["tokens"][-1] for text in ('"', "}")]
    bias = {str(token): 50 for tokens in blanks for token in tokens} | {str(quote): 45, str(brace): 48}
    body = held_to(TREE, max_tokens=200, n=4, logit_bias=bias, response_format=response_format)
    for choice in (await post(app, CHAT, body)).json["choices"]:
        assert choice["finish_reason"] == "stop"
        text = choice["message"]["content"]
        json.loads(text)
        assert not re.search(r"\s\s", re.sub(r'"(?:[^"\\]|\\.)*"', '""', text))


BAD: dict[str, dict[str, Any]] = {
    "type": held_to({"type": "str"}),
    "properties": held_to({"properties": {"a": "bar"}}),
    "pattern": held_to({"type": "string", "pattern": "("}),
    "lookahead": held_to({"type": "string", "pattern": "(?=a)b"}),
    "explosive": {"messages": HI, "structured_outputs": {"regex": "a{1000000}{1000}"}},
    "EBNF": {"messages": HI, "structured_outputs": {"grammar": "root ::= foo"}},
    "two forms": {"messages": HI, "structured_outputs": {"regex": "a", "choice": ["b"]}},
    "3 MB": held_to({"type": "object", "properties": {f"p{i}": {"description": "x" * 900} for i in range(3300)}}),
}


FORM_FIELDS = ("response_format", "structured_outputs", "structured_output", "json_schema", "regex", "grammar")


async def test_g32_a_bad_form_is_a_400_and_harms_nobody(app: Any) -> None:
    other = {"messages": HI, "max_tokens": 300, "ignore_eos": True}
    beside = asyncio.create_task(post(app, CHAT, other))
    for name, body in [*BAD.items(), *BAD.items()]:  # the second time is no better
        started = time.perf_counter()
        refused = await post(app, CHAT, body)
        assert refused.status == 400, (name, refused.body)
        assert refused.json["error"]["type"] == "invalid_request_error"
        assert refused.json["error"]["param"] in FORM_FIELDS, refused.body
        assert time.perf_counter() - started < 5, name
        streamed = await post(app, CHAT, {**body, "stream": True})
        assert streamed.status == 400, name
    answer = await beside
    assert answer.status == 200
    assert answer.json["usage"]["completion_tokens"] == 300
    assert await check_schema(app, {"type": "boolean"}, 2) == 2


async def test_g10_masked_alternatives_are_finite(app: Any) -> None:
    body = {"messages": HI, "structured_outputs": {"choice": ["yes", "no"]}, "logprobs": True, "top_logprobs": 20}
    answer = await post(app, CHAT, body)
    assert answer.status == 200
    (choice,) = answer.json["choices"]  # strict JSON: no infinities
    assert choice["message"]["content"] in ("yes", "no")
    for entry in choice["logprobs"]["content"]:
        assert all(-9999 <= each["logprob"] <= 0 for each in (entry, *entry["top_logprobs"]))
