"""An error is the last event, behind all that came before it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any, NoReturn

import pytest

from asyncllm import AsyncEngine, SamplingParams, TokenDelta
from asyncllm.api import create_asgi_app
from asyncllm.api.admission import Admission
from asyncllm.api.answers import AnswerFormat, PlainAnswer, held_back
from asyncllm.api.chat_chunks import ChatChunks
from asyncllm.api.generation import Generation
from asyncllm.api.response_writer import ResponseWriter
from asyncllm.api.service_metrics import ServiceMetrics
from asyncllm.api.token_events import TokenEvents
from asyncllm.inputs.tokenizer import Tokenizer
from asyncllm.outputs.tool_calls import ContentDelta
from asyncllm.results import FinishReason
from asyncllm.testing.shadow_engine import ShadowModel
from asyncllm.testing.tiny_models import CHAT_TEMPLATE
from tests.api.asgi_client import post

HI = [{"role": "user", "content": "Hi"}]
ENDLESS = {"max_tokens": 2000, "ignore_eos": True, "temperature": 0}


class Serving:
    """All that a generation asks of one."""

    metrics = ServiceMetrics("m")


async def events_of(engine: AsyncEngine, prompts: int, n: int, deadline: float | None = None) -> TokenEvents:
    """Each token is an event; those of its choice's end too."""
    params = SamplingParams(max_tokens=400, ignore_eos=True, seed=1, n=n)
    streams = [engine.stream([5, 6, 7 + prompt], params, deadline=deadline) for prompt in range(prompts)]
    ticket = Admission(100).enter(prompts * n, 100)
    serving: Any = Serving()
    generation = Generation(serving, streams, ticket, request_id="r", server_limits=deadline is not None)
    await generation.start()

    def render(delta: TokenDelta, position: int) -> str:
        text = f"{position}.{delta.index} " * len(delta.token_ids)
        return text if delta.finish_reason is None else f"{text}{delta.finish_reason} "

    return TokenEvents(generation, render, lambda error: f"error:{type(error).__name__}", n=n)


CHOICES = pytest.mark.parametrize(("prompts", "n"), [(1, 1), (1, 3), (3, 1), (2, 2)])


@CHOICES
@pytest.mark.parametrize("asleep", [False, True])
async def test_behind_the_tokens_of_all_choices(prompts: int, n: int, asleep: bool) -> None:
    shadow = ShadowModel(latency=0.002)
    async with AsyncEngine(shadow) as engine:
        events = await events_of(engine, prompts, n)
        sent = [await anext(events)]
        assert shadow.runner is not None
        if asleep:
            time.sleep(0.02)  # noqa: ASYNC251  # tokens come meanwhile, and the error
        shadow.runner.fail_next(RuntimeError("the device is tired"))
        if asleep:
            time.sleep(0.02)  # noqa: ASYNC251
        sent += [event async for event in events]
        told = b"".join(sent).decode().split()
        assert told.pop() == "error:RequestFailed"
        assert len(told) == engine.statistics().tokens_generated
        assert not any(word.startswith("error") for word in told)


@CHOICES
async def test_the_servers_limit_is_behind_them_too(prompts: int, n: int) -> None:
    async with AsyncEngine(ShadowModel(latency=0.002)) as engine:
        events = await events_of(engine, prompts, n, deadline=0.05)
        time.sleep(0.1)  # noqa: ASYNC251  # all that comes is told at once
        told = b"".join([event async for event in events]).decode().split()
        assert told.pop() == "error:ApiError"
        assert len(told) == engine.statistics().tokens_generated
        assert "deadline" not in told  # which is no end of an answer


def completion_text(event: Any) -> str:
    return str(event["choices"][0]["text"])


def chat_text(event: Any) -> str:
    return str(event["choices"][0]["delta"].get("content", ""))


def message_text(event: Any) -> str:
    return str(event["delta"]["text"]) if event["type"] == "content_block_delta" else ""


def response_text(event: Any) -> str:
    return str(event["delta"]) if event["type"] == "response.output_text.delta" else ""


@pytest.mark.parametrize(
    ("path", "body", "text_of"),
    [
        ("/v1/completions", {"prompt": "Hi"}, completion_text),
        ("/v1/chat/completions", {"messages": HI}, chat_text),
        ("/v1/messages", {"messages": HI}, message_text),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 2000}, response_text),
    ],
)
async def test_every_api(tokenizer: Tokenizer, path: str, body: Any, text_of: Callable[[Any], str]) -> None:
    shadow = ShadowModel(tokenizer=tokenizer, chat_template=CHAT_TEMPLATE, latency=0.002)
    async with AsyncEngine(shadow, max_model_len=2048, num_blocks=512) as engine:
        app = create_asgi_app(engine, request_timeout=0.1)
        answer = await post(app, path, ENDLESS | body | {"stream": True})
        prompt = await engine.tokenize("Hi" if path == "/v1/completions" else HI)
        ids = shadow.expected(prompt, engine.statistics().tokens_generated)
        *events, last = answer.events
        assert answer.status == 200
        assert "error" in str(last)
        assert "".join(map(text_of, events)) == tokenizer.decode(ids)
        assert "[DONE]" not in events


def contents(events: str, index: int) -> str:
    """The text that these chunks have for a choice."""
    chunks = [json.loads(line.removeprefix("data: ")) for line in events.splitlines() if line.startswith("data: {")]
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return "".join(choice["delta"].get("content", "") for choice in choices)


def test_what_a_parser_held_back_is_told() -> None:
    make = AnswerFormat(reasoning="qwen3", tool_calls="hermes").maker("")
    chunks = ChatChunks(
        head={"id": "x"}, n=3, make_answer=make, plain=False, logprobs=False, token_ids=False, include_usage=False,
        continuous_usage=False, show_reasoning=True, prompt_token_ids=(),
    )  # fmt: skip
    first, second = TokenDelta("Yes <tool", (1,), 0), TokenDelta("No <tool", (1,), 1, FinishReason.LENGTH)
    told = chunks.render(first) + chunks.render(second)
    assert (contents(told, 0), contents(told, 1)) == ("Yes ", "No <tool")
    rest = chunks.rest()  # of the third, which has said nothing, there is none
    assert (contents(rest, 0), contents(rest, 1), contents(rest, 2)) == ("<tool", "", "")
    assert '"index":2' not in rest


def test_an_answer_that_cannot_be_taken_apart_has_held_back_nothing() -> None:
    class Broken(PlainAnswer):
        def flush(self) -> NoReturn:
            raise RecursionError

    assert held_back(Broken()) == ()


def test_a_response_that_fails_has_what_came() -> None:
    writer = ResponseWriter({"output": []}, show_logprobs=False)
    writer.push([ContentDelta("as far as "), ContentDelta("this")])
    events = writer.fail("server_error", "no")
    assert events.rstrip().splitlines()[-2] == "event: response.failed"
    assert writer.response["output"][0]["content"][0]["text"] == "as far as this"
    assert (writer.response["status"], writer.response["output"][0]["status"]) == ("failed", "incomplete")
