"""The cases of shared/cases that are seen over HTTP, by their numbers."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession

from asyncllm import AsyncEngine
from asyncllm.api import create_asgi_app
from asyncllm.testing.tiny_models import CHAT_TEMPLATE, write_piece_model, write_script_model, write_tiny_model
from tests.api.asgi_client import get, post, request, until
from tests.api.conftest import MakeEngine
from tests.api.servers import serving

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture
async def shadow_app(shadow: MakeEngine) -> AsyncIterator[Any]:
    async with shadow() as engine:
        yield create_asgi_app(engine, model_names=["m"])


@pytest.fixture
async def tiny_app(tiny_folder: Path) -> AsyncIterator[Any]:
    async with AsyncEngine(str(tiny_folder), device="cpu", num_blocks=256, block_size=16) as engine:
        yield create_asgi_app(engine, model_names=["m"])


def byte_ids(folder: Path, text: bytes) -> list[int]:
    """The byte tokenizer's ids of single bytes."""
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    alphabet = {}
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    extra = 0
    for byte in range(256):
        if byte in printable:
            alphabet[byte] = chr(byte)
        else:
            alphabet[byte] = chr(256 + extra)
            extra += 1
    return [vocabulary[alphabet[byte]] for byte in text]


async def test_g09_bytes_of_partial_characters(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "tokenizer", chat_template=CHAT_TEMPLATE)
    pepper = byte_ids(tmp_path / "tokenizer", "🌶".encode())
    script = [byte_ids(tmp_path / "tokenizer", b"\n")[0], *pepper, 2]
    folder = write_script_model(tmp_path / "model", [script], tokenizer=tmp_path / "tokenizer")
    async with AsyncEngine(str(folder), device="cpu", num_blocks=64) as engine:
        app = create_asgi_app(engine)
        body = {"messages": HI, "temperature": 0, "max_tokens": 4, "logprobs": True, "top_logprobs": 3}
        answer = (await post(app, CHAT, body)).json
        content = answer["choices"][0]["logprobs"]["content"]
        assert answer["choices"][0]["message"]["content"] == "🌶"
        assert [entry["bytes"] for entry in content[:4]] == [[byte] for byte in "🌶".encode()]
        joined = b"".join(bytes(entry["bytes"]) for entry in content[:4])
        assert joined.decode() == "🌶"
        streamed = (await post(app, CHAT, body | {"stream": True})).events
        parts = [chunk["choices"][0] for chunk in streamed if chunk != "[DONE]"]
        assert [entry for part in parts if part["logprobs"] for entry in part["logprobs"]["content"]] == content


async def test_g10_logprobs_are_finite(tiny_app: Any) -> None:
    body = {"messages": HI, "max_tokens": 4, "logprobs": True, "top_logprobs": 20, "allowed_token_ids": [70, 71],
            "logit_bias": {"71": -100}}  # fmt: skip
    answer = await post(tiny_app, CHAT, body)
    assert answer.status == 200
    for entry in answer.json["choices"][0]["logprobs"]["content"]:
        assert all(-9999 <= each["logprob"] <= 0 for each in [entry, *entry["top_logprobs"]])


async def test_g11_layouts_of_logprobs(tiny_app: Any) -> None:
    body = {"messages": HI, "max_tokens": 3, "logprobs": True, "ignore_eos": True}
    choice = (await post(tiny_app, CHAT, body)).json["choices"][0]
    assert [entry["top_logprobs"] for entry in choice["logprobs"]["content"]] == [[], [], []]
    assert (await post(tiny_app, CHAT, body | {"logprobs": False, "top_logprobs": 2})).status == 400
    body = {"prompt": "Hi", "max_tokens": 3, "logprobs": 0, "ignore_eos": True}
    logprobs = (await post(tiny_app, COMPLETIONS, body)).json["choices"][0]["logprobs"]
    assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == len(logprobs["text_offset"]) == 3
    assert all(len(entries) == 1 for entries in logprobs["top_logprobs"])


async def test_logprobs_of_named_tokens(tiny_app: Any) -> None:
    named = {"logprob_token_ids": [70, 71], "max_tokens": 3, "ignore_eos": True}
    body = {"messages": HI, "logprobs": True, "top_logprobs": 2, **named}
    choice = (await post(tiny_app, CHAT, body)).json["choices"][0]
    assert [len(entry["top_logprobs"]) for entry in choice["logprobs"]["content"]] == [4, 4, 4]
    last = [entry["top_logprobs"][2:] for entry in choice["logprobs"]["content"]]
    assert len({tuple(each["token"] for each in entries) for entries in last}) == 1
    logprobs = (await post(tiny_app, COMPLETIONS, {"prompt": "Hi", "logprobs": 0, **named})).json["choices"][0][
        "logprobs"
    ]
    assert {each["token"] for each in last[0]} <= set(logprobs["top_logprobs"][0])
    for path, unasked in ((CHAT, {"messages": HI}), (COMPLETIONS, {"prompt": "Hi"})):
        refused = await post(tiny_app, path, unasked | named)
        assert refused.status == 400
        assert refused.json["error"]["param"] == "logprob_token_ids"


async def test_an_answer_that_repeats_itself_ends(tiny_app: Any) -> None:
    body = {"messages": HI, "max_tokens": 50, "ignore_eos": True, "allowed_token_ids": [70]}
    body["repetition_detection"] = {"max_pattern_size": 2, "min_count": 5}
    answer = (await post(tiny_app, CHAT, body)).json
    assert answer["usage"]["completion_tokens"] == 5
    assert answer["choices"][0]["finish_reason"] == "stop"
    body["repetition_detection"] = {"max_pattern_size": 2, "min_pattern_size": 3}
    refused = await post(tiny_app, CHAT, body)
    assert refused.status == 400
    assert "repetition_detection.min_pattern_size" in refused.json["error"]["message"]


async def test_g12_scores_a_prompt(tiny_app: Any) -> None:
    prompt = "The capital of France is"
    body = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 0}
    answer = (await post(tiny_app, COMPLETIONS, body)).json
    (choice,) = answer["choices"]
    logprobs = choice["logprobs"]
    assert choice["text"] == prompt == "".join(logprobs["tokens"])
    assert len(logprobs["tokens"]) == answer["usage"]["prompt_tokens"]
    assert logprobs["token_logprobs"][0] is None
    assert all(value <= 0 for value in logprobs["token_logprobs"][1:])
    assert answer["usage"]["completion_tokens"] == 0
    streamed = (await post(tiny_app, COMPLETIONS, body | {"stream": True})).events
    assert streamed[0]["choices"] == answer["choices"]
    assert streamed[-1] == "[DONE]"


@pytest.mark.parametrize(
    "change",
    [
        {"logit_bias": {"512": 5}},
        {"logit_bias": {"-1": 5}},
        {"logit_bias": {"abc": 1}},
        {"stop_token_ids": [10**6], "min_tokens": 1},
        {"prompt": [-1]},
        {"prompt": [512]},
    ],
)
async def test_g15_ids_outside_the_vocabulary(shadow_app: Any, change: dict[str, Any]) -> None:
    plain = {"prompt": "Hi", "max_tokens": 2}
    assert (await post(shadow_app, COMPLETIONS, plain | change)).status == 400
    assert (await post(shadow_app, COMPLETIONS, plain)).status == 200


async def test_g16_zero_is_not_null(shadow_app: Any) -> None:
    body = {"messages": HI, "ignore_eos": True}
    assert (await post(shadow_app, CHAT, body | {"max_tokens": 0})).json["usage"]["completion_tokens"] == 0
    usage = (await post(shadow_app, CHAT, body | {"max_tokens": None})).json["usage"]
    assert usage["total_tokens"] == 2048
    start = time.monotonic()
    answer = await post(shadow_app, COMPLETIONS, {"prompt": [7] * 2049, "max_tokens": 1})
    assert answer.status == 400
    assert answer.json["error"]["code"] == "context_length_exceeded"
    assert time.monotonic() - start < 1


@pytest.mark.parametrize("kind", ["aiohttp", "uvicorn", "hypercorn"])
async def test_g22_who_goes_is_served_no_more(shadow: MakeEngine, kind: str) -> None:
    engine = shadow()
    body = {"messages": HI, "max_tokens": 1900, "ignore_eos": True}
    async with serving(kind, engine) as port, ClientSession(f"http://127.0.0.1:{port}") as session:
        for _ in range(20):
            async with session.post(CHAT, json=body | {"max_tokens": 2}) as answer:
                assert answer.status == 200
        assert engine.statistics().requests_aborted == 0
        for left, stream in enumerate((False, True), start=1):
            async with ClientSession(f"http://127.0.0.1:{port}") as leaving:
                going = asyncio.create_task(leaving.post(CHAT, json=body | {"stream": stream}))
                await until(lambda: engine.statistics().requests_running > 0)
                going.cancel()
            await until(lambda: engine.statistics().requests_running == 0, 2)  # a whole answer takes longer
            await until(lambda: engine.statistics().blocks_used == 0, 2)
            assert engine.statistics().requests_aborted == left


@pytest.mark.parametrize("prompt", ["", [], [""], ["ok", ""], [[]]])
async def test_g23_empty_prompts(shadow_app: Any, prompt: Any) -> None:
    assert (await post(shadow_app, COMPLETIONS, {"prompt": prompt, "max_tokens": 2})).status == 400
    assert (await post(shadow_app, COMPLETIONS, {"prompt": "Hi", "max_tokens": 2})).status == 200
    assert (await get(shadow_app, "/health")).status == 200


async def test_g24_a_large_body_holds_up_nobody(shadow_app: Any) -> None:
    text = "word " * 1_000_000
    large = asyncio.create_task(post(shadow_app, CHAT, {"messages": [{"role": "user", "content": text}]}))
    worst = 0.0
    while not large.done():
        start = time.monotonic()
        assert (await get(shadow_app, "/health")).status == 200
        worst = max(worst, time.monotonic() - start)
        await asyncio.sleep(0.02)
    assert (await large).status == 400
    assert worst < 0.3


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", CHAT, b"{", 400),
        ("POST", CHAT, b"[]", 400),
        ("POST", CHAT, b"\xff", 400),
        ("POST", CHAT, {"messages": HI, "temperature": -1}, 400),
        ("POST", CHAT, {"messages": HI, "model": "gpt-unknown"}, 404),
        ("POST", CHAT, {"messages": [{"role": "user", "content": "word " * 9000}]}, 400),
        ("GET", CHAT, None, 405),
        ("POST", CHAT, {"messages": []}, 400),
        ("POST", CHAT, {"messages": "x"}, 400),
        ("POST", CHAT, {}, 400),
        ("GET", "/v1/unknown", None, 404),
        ("GET", "/v1/models/unknown", None, 404),
        ("POST", "/v1/responses", {"input": []}, 400),
        ("POST", "/tokenize", {}, 400),
    ],
)
async def test_g25_errors_have_one_layout(shadow_app: Any, method: str, path: str, body: Any, status: int) -> None:
    answer = await request(shadow_app, method, path, body)
    assert answer.status == status
    error = answer.json["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]


async def test_g26_unknown_fields_are_ignored(shadow_app: Any, caplog: pytest.LogCaptureFixture) -> None:
    part = {"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}
    body = {
        "messages": [{"role": "user", "name": "bob", "content": [part], "bar": 2}],
        "foo": "a secret of the prompt",
        "store": False,
        "metadata": {},
        "user": "u",
        "max_tokens": 1,
    }
    assert (await post(shadow_app, CHAT, body)).status == 200
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert any("'foo'" in warning for warning in warnings)
    assert not any("secret" in record.getMessage() for record in caplog.records)
    assert (await post(shadow_app, CHAT, body | {"top_p": "high"})).status == 400


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("usage", [False, True])
async def test_g27_shape_of_a_stream(shadow_app: Any, usage: bool, n: int) -> None:
    body = {"messages": HI, "stream": True, "max_tokens": 6, "n": n, "ignore_eos": True}
    if usage:
        body["stream_options"] = {"include_usage": True}
    answer = await post(shadow_app, CHAT, body)
    *chunks, done = answer.events
    assert done == "[DONE]"
    assert answer.body.count(b"[DONE]") == 1
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    if usage:
        last = chunks.pop()
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == 6 * n
        assert all(chunk["usage"] is None for chunk in chunks)
    else:
        assert all("usage" not in chunk for chunk in chunks)
    for index in range(n):
        mine = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        assert [choice["delta"].get("role") for choice in mine] == ["assistant"] + [None] * (len(mine) - 1)
        reasons = [choice["finish_reason"] for choice in mine]
        assert reasons == [None] * (len(mine) - 1) + ["length"]


async def test_g28_tool_calls_streamed_and_whole(tmp_path: Path) -> None:
    pieces = [
        "\n",
        "<tool_call>",
        '{"name": ',
        '"w", "arguments": ',
        '{"city": "Mün',
        'ster", "n": 42}}',
        "</tool_call>",
    ]
    model = write_piece_model(tmp_path, pieces, chat_template=CHAT_TEMPLATE + "{# <tool_call> #}")
    tools = [{"type": "function", "function": {"name": "w", "parameters": {"type": "object"}}}]
    async with AsyncEngine(str(model.folder), device="cpu", num_blocks=64) as engine:
        app = create_asgi_app(engine)
        body = {"messages": HI, "temperature": 0, "max_tokens": 20, "tools": tools}
        whole = (await post(app, CHAT, body)).json["choices"][0]
        streamed = await post(app, CHAT, body | {"stream": True})
    assert whole["finish_reason"] == "tool_calls"
    (call,) = whole["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"city": "Münster", "n": 42}
    deltas = [
        each
        for chunk in streamed.events
        if chunk != "[DONE]"
        for each in chunk["choices"][0]["delta"].get("tool_calls", ())
    ]
    assert "".join(delta["function"]["arguments"] for delta in deltas) == call["function"]["arguments"]
    assert [delta.get("id") is not None for delta in deltas] == [True] + [False] * (len(deltas) - 1)
    assert "ü".encode() in streamed.body


async def test_g35_message_shapes(tiny_app: Any, tiny_folder: Path) -> None:
    whole = await post(tiny_app, CHAT, {"messages": HI, "max_tokens": 1})
    part = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    parted = await post(tiny_app, CHAT, {"messages": part, "max_tokens": 1})
    assert parted.json["usage"]["prompt_tokens"] == whole.json["usage"]["prompt_tokens"]
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        *HI,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "4"}]},
    ]
    assert (await post(tiny_app, CHAT, {"messages": messages, "max_tokens": 1})).status == 200
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://localhost/x"}}]}]
    assert (await post(tiny_app, CHAT, {"messages": image, "max_tokens": 1})).status == 400
    template = "{% for k, v in messages[0].tool_calls[0].function.arguments|items %}{{ k }}{% endfor %}"
    body = {"messages": [{"role": "assistant", "tool_calls": [call]}], "max_tokens": 1, "chat_template": template}
    refused = await post(tiny_app, CHAT, body)
    assert refused.status == 400  # templates from requests are off
    app = create_asgi_app(tiny_app.service.serving.engine, request_chat_templates=True)
    assert (await post(app, CHAT, body)).status == 200
    refused = await post(app, CHAT, body | {"chat_template": "{{ raise_exception('no cats') }}"})
    assert refused.status == 400
    assert "no cats" in refused.json["error"]["message"]


async def test_g36_no_chat_template(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    async with AsyncEngine(str(folder), device="cpu", num_blocks=64) as engine:
        app = create_asgi_app(engine)
        assert (await post(app, COMPLETIONS, {"prompt": "Hi", "max_tokens": 1})).status == 200
        refused = await post(app, CHAT, {"messages": HI, "max_tokens": 1})
        assert refused.status == 400
        assert "chat template" in refused.json["error"]["message"]
    async with AsyncEngine(str(folder), device="cpu", num_blocks=64, chat_template=CHAT_TEMPLATE) as engine:
        assert (await post(create_asgi_app(engine), CHAT, {"messages": HI, "max_tokens": 1})).status == 200


EMBEDDINGS = "/v1/embeddings"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"input": ""}, "prompt is empty"),
        ({"input": []}, "input is empty"),
        ({"input": ["One", ""]}, "prompt is empty"),
        ({"input": [5, 100_000]}, "outside the vocabulary"),
        ({"input": [-1]}, "outside the vocabulary"),
        ({"input": [5] * 5000}, "context"),
        ({"input": ["One"] * 129}, "at most 128 texts"),
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": 65}, "at most 64"),
        ({"encoding_format": "int8"}, "encoding_format"),
        ({"input": None}, "input"),
    ],
)
async def test_embeddings_that_cannot_be(tiny_app: Any, change: dict[str, Any], told: str) -> None:
    refused = await post(tiny_app, EMBEDDINGS, {"input": "One"} | change)
    assert refused.status == 400
    assert told in refused.json["error"]["message"]
    assert refused.json["error"]["type"] == "invalid_request_error"
    assert (await post(tiny_app, EMBEDDINGS, {"input": "One"})).status == 200


async def test_embeddings_where_there_are_none(shadow_app: Any) -> None:
    refused = await post(shadow_app, EMBEDDINGS, {"input": "One"})
    assert refused.status == 400
    assert "no embeddings" in refused.json["error"]["message"]


async def test_embeddings_of_ids_and_texts(tiny_app: Any) -> None:
    ids = (await post(tiny_app, "/tokenize", {"prompt": "One"})).json["tokens"]
    texts = (await post(tiny_app, EMBEDDINGS, {"input": ["One", "One two"]})).json
    of_ids = (await post(tiny_app, EMBEDDINGS, {"input": ids})).json
    several = (await post(tiny_app, EMBEDDINGS, {"input": [ids, ids]})).json
    assert of_ids["data"][0]["embedding"] == texts["data"][0]["embedding"] != texts["data"][1]["embedding"]
    assert [each["embedding"] for each in several["data"]] == [of_ids["data"][0]["embedding"]] * 2
    assert of_ids["usage"] == {"prompt_tokens": len(ids), "completion_tokens": 0, "total_tokens": len(ids)}
