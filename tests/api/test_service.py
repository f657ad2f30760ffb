"""Who may in, what is let through, and how requests end that do not end well."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import ClientSession

from asyncllm import AsyncEngine, errors
from asyncllm.api import ApiSettings, create_asgi_app
from asyncllm.api.errors import ANSWERS, api_error
from asyncllm.errors import AsyncLLMError, ConfigError
from asyncllm.inputs.tokenizer import Tokenizer
from asyncllm.testing.shadow_engine import ShadowModel
from asyncllm.testing.tiny_models import CHAT_TEMPLATE
from tests.api.asgi_client import get, post, request, until
from tests.api.servers import serving

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HI = [{"role": "user", "content": "Hi"}]
PROMPT = {"prompt": "Hi", "max_tokens": 2}
ENDLESS = {"prompt": "Hi", "max_tokens": 2000, "ignore_eos": True}


@pytest.fixture
def shadow_model(tokenizer: Tokenizer) -> ShadowModel:
    return ShadowModel(tokenizer=tokenizer, chat_template=CHAT_TEMPLATE)


@pytest.fixture
async def engine(shadow_model: ShadowModel) -> AsyncIterator[AsyncEngine]:
    async with AsyncEngine(shadow_model, max_model_len=2048, num_blocks=512, max_num_seqs=4) as running:
        try:
            yield running
        finally:
            assert shadow_model.runner is not None
            shadow_model.runner.resume()
        await idle(running)


async def idle(engine: AsyncEngine, seconds: float = 2.0) -> None:
    """Wait until nothing runs."""
    await until(lambda: not (engine.statistics().requests_running or engine.statistics().blocks_used), seconds)


async def busy(engine: AsyncEngine) -> None:
    """Wait until something runs."""
    await until(lambda: engine.statistics().requests_running > 0)


# --- keys ---


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"authorization": "Bearer wrong"}, 401),
        ({"authorization": "Bearer "}, 401),
        ({"authorization": "one"}, 401),
        ({"authorization": "Basic b25lOm9uZQ=="}, 401),
        ({"x-api-key": "on"}, 401),
        ({"authorization": "Bearer one"}, 200),
        ({"authorization": "bearer two"}, 200),
        ({"x-api-key": "two"}, 200),
    ],
)
async def test_keys(engine: AsyncEngine, headers: dict[str, str], status: int) -> None:
    app = create_asgi_app(engine, api_keys=["one", "two"])
    for path in ("/v1/models", "/version", "/openapi.json", "/metrics"):
        answer = await get(app, path, **headers)
        assert answer.status in (status, 404 if status == 200 else status), path
    assert (await post(app, COMPLETIONS, PROMPT, **headers)).status == status
    assert (await get(app, "/unknown", **headers)).status == (401 if status == 401 else 404)
    assert (await get(app, "/health", **headers)).status == 200
    assert (await get(app, "/health/live", **headers)).status == 200


async def test_a_key_has_a_prefix_cache_of_its_own(engine: AsyncEngine) -> None:
    app = create_asgi_app(engine, api_keys=["one", "two"])
    body = {"prompt": "word " * 40, "max_tokens": 1}

    async def cached(key: str, **more: str) -> int:
        answer = await post(app, COMPLETIONS, body | more, authorization=f"Bearer {key}")
        found: int = answer.json["usage"]["prompt_tokens_details"]["cached_tokens"]
        return found

    assert await cached("one") == 0
    assert await cached("one") > 0
    assert await cached("two") == 0
    assert await cached("one", cache_salt="x") == 0
    assert await cached("one", cache_salt="x") > 0


async def test_stored_responses_belong_to_a_key(engine: AsyncEngine) -> None:
    app = create_asgi_app(engine, api_keys=["one", "two"])
    made = await post(app, "/v1/responses", {"input": "Hi", "max_output_tokens": 2}, authorization="Bearer one")
    path = f"/v1/responses/{made.json['id']}"
    assert (await get(app, path, authorization="Bearer two")).status == 404
    assert (await request(app, "DELETE", path, headers={"authorization": "Bearer two"})).status == 404
    assert (await get(app, path, authorization="Bearer one")).json == made.json


# --- limits ---


async def test_body_size(engine: AsyncEngine) -> None:
    app = create_asgi_app(engine, max_body_bytes=100)
    assert (await post(app, COMPLETIONS, PROMPT)).status == 200
    assert (await post(app, COMPLETIONS, PROMPT | {"user": "u" * 100})).status == 413
    announced = await request(app, "POST", COMPLETIONS, PROMPT, {"content-length": "101"})
    assert announced.status == 413


async def test_a_body_that_is_not_encoded_as_its_headers_say(engine: AsyncEngine) -> None:
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    async with (
        serving("aiohttp", engine) as port,
        ClientSession() as session,
        session.post(f"http://127.0.0.1:{port}{COMPLETIONS}", data=b"no gzip", headers=headers) as answer,
    ):
        assert answer.status == 400
        assert (await answer.json())["error"]["code"] == "invalid_body"


async def test_a_path_writes_no_line_of_its_own_into_the_log(
    engine: AsyncEngine, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "asyncllm"):
        await get(create_asgi_app(engine), "/v1/\n2026-11-30 INFO forged\x1b[2J")
    assert "/v1/\\n2026-11-30 INFO forged\\x1b[2J 404" in caplog.text


async def test_numbers(engine: AsyncEngine) -> None:
    app = create_asgi_app(engine, max_prompts=2, max_choices=3, max_tokens=5)
    assert (await post(app, COMPLETIONS, PROMPT | {"prompt": ["a", "b", "c"]})).status == 400
    assert (await post(app, COMPLETIONS, PROMPT | {"n": 4})).status == 400
    assert (await post(app, COMPLETIONS, PROMPT | {"max_tokens": 6})).status == 400
    open_ended = await post(app, CHAT, {"messages": HI, "ignore_eos": True})
    assert open_ended.json["usage"]["completion_tokens"] == 5


async def test_refused_fields(engine: AsyncEngine) -> None:
    app = create_asgi_app(engine)
    for change in ({"suffix": "x"}, {"best_of": 2}, {"top_p": 0}, {"n": 0}, {"max_tokens": -1}, {"seed": "1"}):
        assert (await post(app, COMPLETIONS, PROMPT | change)).status == 400, change
    for change in ({"tool_choice": "required"}, {"modalities": ["audio"]}, {"chat_template": "x"}):
        assert (await post(app, CHAT, {"messages": HI, "max_tokens": 1} | change)).status == 400, change


async def test_a_full_queue(engine: AsyncEngine, shadow_model: ShadowModel) -> None:
    assert shadow_model.runner is not None
    app = create_asgi_app(engine, max_queue=1)  # beside the engine's 4 rows
    shadow_model.runner.hold()
    waiting = [asyncio.create_task(post(app, COMPLETIONS, PROMPT)) for _ in range(5)]
    await until(lambda: app.service.serving.admission.choices == 5)
    refused = await post(app, COMPLETIONS, PROMPT)
    assert refused.status == 429
    assert int(refused.headers["retry-after"]) >= 1
    shadow_model.runner.resume()
    assert [(await each).status for each in waiting] == [200] * 5
    assert (await post(app, COMPLETIONS, PROMPT)).status == 200


async def test_so_many_may_watch(engine: AsyncEngine) -> None:
    app = create_asgi_app(engine, max_viewers=2)
    viewers = app.service.serving.viewers
    leaving = [asyncio.Event(), asyncio.Event()]
    watching = [asyncio.create_task(request(app, "GET", "/engine/events", gone=gone)) for gone in leaving]
    await until(lambda: viewers.count == 2)
    refused = await get(app, "/engine/events")
    assert (refused.status, refused.json["error"]["code"]) == (429, "too_many_viewers")
    assert int(refused.headers["retry-after"]) > 0
    assert "2 clients" in refused.json["error"]["message"]
    leaving[0].set()
    await watching[0]
    assert viewers.count == 1
    leaving.append(asyncio.Event())
    watching.append(asyncio.create_task(request(app, "GET", "/engine/events", gone=leaving[-1])))
    await until(lambda: viewers.count == 2)
    for gone in leaving:
        gone.set()
    await asyncio.gather(*watching)
    assert viewers.count == 0
    assert (await get(create_asgi_app(engine, max_viewers=0), "/engine/events")).status == 429


async def test_the_servers_timeout(engine: AsyncEngine, shadow_model: ShadowModel) -> None:
    assert shadow_model.runner is not None
    shadow_model.runner.latency = 0.01
    app = create_asgi_app(engine, request_timeout=0.1)
    whole = await post(app, COMPLETIONS, ENDLESS)
    assert whole.status == 504
    streamed = (await post(app, COMPLETIONS, ENDLESS | {"stream": True})).events
    assert streamed[-1]["error"]["code"] == "timeout"
    own = await post(app, COMPLETIONS, ENDLESS | {"deadline_ms": 50})
    assert own.status == 200
    assert own.json["choices"][0]["finish_reason"] == "length"
    assert own.json["choices"][0]["stop_reason"] == "deadline"


async def test_content_types(engine: AsyncEngine) -> None:
    app = create_asgi_app(engine)
    for kind, status in (("text/plain", 415), ("application/json; charset=utf-8", 200), ("", 200)):
        assert (await request(app, "POST", COMPLETIONS, PROMPT, {"content-type": kind})).status == status


async def test_cors(engine: AsyncEngine) -> None:
    asked = {"origin": "https://a.example", "access-control-request-method": "POST"}
    closed = await request(create_asgi_app(engine), "OPTIONS", CHAT, headers=asked)
    assert closed.status == 405
    assert not any(name.startswith("access-control") for name in closed.headers)
    app = create_asgi_app(engine, cors_origins=["https://a.example"], api_keys=["one"])
    allowed = await request(app, "OPTIONS", CHAT, headers=asked)
    assert allowed.status == 204
    assert allowed.headers["access-control-allow-origin"] == "https://a.example"
    other = await request(app, "OPTIONS", CHAT, headers=asked | {"origin": "https://b.example"})
    assert "access-control-allow-origin" not in other.headers


# --- endings ---


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes(engine: AsyncEngine, stream: bool) -> None:
    app = create_asgi_app(engine)
    gone = asyncio.Event()
    going = asyncio.create_task(
        request(app, "POST", COMPLETIONS, ENDLESS | {"stream": stream, "max_tokens": 2040}, gone=gone)
    )
    await busy(engine)
    gone.set()
    await going
    await idle(engine, 1)  # the answer would take longer
    assert engine.statistics().requests_aborted == 1
    assert engine.statistics().tokens_generated < 2040
    assert app.service.serving.admission.choices == 0


async def test_a_normal_end_aborts_nothing(engine: AsyncEngine) -> None:
    app = create_asgi_app(engine)
    await asyncio.gather(*(post(app, COMPLETIONS, PROMPT | {"stream": bool(i % 2)}) for i in range(20)))
    assert engine.statistics().requests_aborted == 0
    assert app.service.serving.admission.choices == 0
    await idle(engine)


async def test_a_client_that_goes_while_it_sends(engine: AsyncEngine) -> None:
    app = create_asgi_app(engine)
    scope = {"type": "http", "method": "POST", "path": CHAT, "headers": [], "root_path": ""}
    messages = [{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}]

    async def receive() -> dict[str, Any]:
        return messages.pop(0)

    async def send(message: dict[str, Any]) -> None:
        raise AssertionError("nobody is there")

    await app(scope, receive, send)


async def test_cancelling_the_server_is_no_disconnect(engine: AsyncEngine) -> None:
    app = create_asgi_app(engine)
    task = asyncio.create_task(post(app, COMPLETIONS, ENDLESS))
    await busy(engine)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await idle(engine)


async def test_a_step_that_fails(
    engine: AsyncEngine, shadow_model: ShadowModel, caplog: pytest.LogCaptureFixture
) -> None:
    assert shadow_model.runner is not None
    app = create_asgi_app(engine)
    shadow_model.runner.latency = 0.005
    for stream in (False, True):
        failing = asyncio.create_task(post(app, COMPLETIONS, ENDLESS | {"stream": stream}))
        await busy(engine)
        shadow_model.runner.fail_next(RuntimeError("boom at /srv/model"))
        caplog.clear()
        answer = await failing
        assert answer.status == (200 if stream else 500)
        told = (answer.events[-1] if stream else answer.json)["error"]
        assert told["code"] == "request_failed"
        assert b"[DONE]" not in answer.body
        assert b"boom" not in answer.body  # it is the log's
        request_id = answer.headers["x-request-id"]
        assert told["message"].endswith(f"under request {request_id}.")
        errors = [each for each in caplog.records if each.name == "asyncllm.api" and each.levelname == "ERROR"]
        assert [request_id in each.getMessage() for each in errors] == [True]
        assert "boom at /srv/model" in caplog.text
    assert (await post(app, COMPLETIONS, PROMPT)).status == 200


async def test_draining(engine: AsyncEngine, shadow_model: ShadowModel) -> None:
    assert shadow_model.runner is not None
    app = create_asgi_app(engine, drain_timeout=5)
    shadow_model.runner.hold()
    running = asyncio.create_task(post(app, COMPLETIONS, PROMPT))
    await busy(engine)
    draining = asyncio.create_task(app.service.drain())
    await asyncio.sleep(0.01)
    refused = await post(app, COMPLETIONS, PROMPT)
    assert refused.status == 503
    assert "retry-after" in refused.headers
    assert (await get(app, "/health/ready")).status == 503
    assert (await get(app, "/health/live")).status == 200
    assert not draining.done()
    shadow_model.runner.resume()
    assert (await running).status == 200
    await draining


async def test_an_engine_that_does_not_run(shadow_model: ShadowModel) -> None:
    engine = AsyncEngine(shadow_model)
    app = create_asgi_app(engine)
    assert (await post(app, COMPLETIONS, PROMPT)).status == 503
    assert (await get(app, "/health/ready")).status == 503
    async with engine:
        assert (await post(app, COMPLETIONS, PROMPT)).status == 200
    assert (await post(app, COMPLETIONS, PROMPT)).json["error"]["code"] == "engine_closed"


async def test_lifespan_starts_and_closes_the_engine(shadow_model: ShadowModel) -> None:
    engine = AsyncEngine(shadow_model)
    app = create_asgi_app(engine)
    inbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    outbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    lifespan = asyncio.create_task(app({"type": "lifespan"}, inbox.get, outbox.put))
    await inbox.put({"type": "lifespan.startup"})
    assert (await outbox.get())["type"] == "lifespan.startup.complete"
    assert (await get(app, "/health")).status == 200
    await inbox.put({"type": "lifespan.shutdown"})
    assert (await outbox.get())["type"] == "lifespan.shutdown.complete"
    await lifespan
    assert engine.state == "closed"


# --- the rest ---


async def test_request_ids_and_the_log(engine: AsyncEngine, caplog: pytest.LogCaptureFixture) -> None:
    app = create_asgi_app(engine)
    with caplog.at_level(logging.INFO, "asyncllm"):
        answer = await request(app, "POST", COMPLETIONS, {"prompt": "a secret"}, {"x-request-id": "mine-1"})
        made = await request(app, "POST", COMPLETIONS, PROMPT, {"x-request-id": "not\nmine"})
    assert answer.headers["x-request-id"] == "mine-1"
    assert made.headers["x-request-id"].startswith("req_")
    fields = [record.fields for record in caplog.records if hasattr(record, "fields")]
    assert fields[0]["request_id"] == "mine-1"
    assert fields[0]["status"] == 200
    assert "secret" not in caplog.text


async def test_models(engine: AsyncEngine) -> None:
    app = create_asgi_app(engine, model_names=["org/name", "alias"])
    assert [card["id"] for card in (await get(app, "/v1/models")).json["data"]] == ["org/name", "alias"]
    assert (await get(app, "/v1/models/org/name")).json["max_model_len"] == 2048
    assert (await post(app, COMPLETIONS, PROMPT | {"model": "alias"})).json["model"] == "alias"
    head = await request(app, "HEAD", "/v1/models")
    assert head.status == 200
    assert head.body == b""


async def test_tokenize_and_back(engine: AsyncEngine) -> None:
    app = create_asgi_app(engine)
    tokens = (await post(app, "/tokenize", {"prompt": "Hello there"})).json["tokens"]
    assert (await post(app, "/detokenize", {"tokens": tokens})).json == {"prompt": "Hello there"}
    chat = (await post(app, "/tokenize", {"messages": HI})).json
    used = (await post(app, CHAT, {"messages": HI, "max_tokens": 1})).json["usage"]["prompt_tokens"]
    assert chat["count"] == used
    assert (await post(app, "/detokenize", {"tokens": [99999]})).status == 400


async def test_completions_merge_several_prompts(engine: AsyncEngine) -> None:
    app = create_asgi_app(engine)
    body = {"prompt": ["One", "Two", [70, 71]][:2], "max_tokens": 4, "echo": True, "temperature": 0}
    whole = (await post(app, COMPLETIONS, body)).json
    streamed = (await post(app, COMPLETIONS, body | {"stream": True, "stream_options": {"include_usage": True}})).events
    texts = ["", ""]
    for chunk in streamed[:-1]:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == [choice["text"] for choice in whole["choices"]]
    assert streamed[-2]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] == 8
    assert texts[0].startswith("One")


async def test_token_ids(engine: AsyncEngine) -> None:
    app = create_asgi_app(engine)
    body = {"messages": HI, "max_tokens": 4, "return_token_ids": True, "temperature": 0}
    whole = (await post(app, CHAT, body)).json
    chunks = [chunk for chunk in (await post(app, CHAT, body | {"stream": True})).events if chunk != "[DONE]"]
    streamed = [token_id for chunk in chunks for token_id in chunk["choices"][0].get("token_ids", ())]
    assert streamed == whole["choices"][0]["token_ids"]
    prompts = [c["choices"][0]["prompt_token_ids"] for c in chunks if "prompt_token_ids" in c["choices"][0]]
    assert prompts == [whole["prompt_token_ids"]]


def test_every_error_has_an_answer() -> None:
    for _, kind in inspect.getmembers(errors, inspect.isclass):
        if issubclass(kind, AsyncLLMError):
            told = api_error(kind("what went wrong"), "req_1")
            assert 400 <= told.status < 600
            assert ("what went wrong" in told.message) != ("under request req_1" in told.message)
    told = api_error(ValueError("a secret"), "req_2")
    assert (told.status, told.code) == (500, "internal_error")
    assert "a secret" not in told.message
    assert all(issubclass(kind, AsyncLLMError) for kind in ANSWERS)


@pytest.mark.parametrize(
    "wrong",
    [
        {"api_keys": "key"},
        {"api_keys": [""]},
        {"api_keys": ["key'\ud800"]},
        {"model_names": ["fine", "half a pair \ud800"]},
        {"max_body_bytes": 0},
        {"max_queue": -1},
        {"max_viewers": -1},
        {"request_timeout": 0},
        {"drain_timeout": -1},
        {"request_chat_templates": 1},
        {"tool_format": "hermes2"},
        {"reasoning_format": "think"},
        {"api_key": ["x"]},
    ],
)
def test_impossible_settings(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        ApiSettings().override(**wrong)
    assert "key'" not in str(caught.value) or "did you mean" in str(caught.value)


async def test_the_document_is_complete(engine: AsyncEngine) -> None:
    document = (await get(create_asgi_app(engine), "/openapi.json")).json
    assert {"/v1/chat/completions", "/v1/responses", "/v1/messages", "/health"} <= set(document["paths"])
    text = json.dumps(document)
    for name in document["components"]["schemas"]:
        assert f"#/components/schemas/{name}" in text
