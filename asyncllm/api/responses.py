"""/v1/responses: answers that a later request may go on from."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncllm.api.answers import Answer, held_back
from asyncllm.api.chat_job import ChatJob, chat_job
from asyncllm.api.errors import ApiError, InvalidRequest
from asyncllm.api.exchange import Reply, json_reply
from asyncllm.api.generation import Generation
from asyncllm.api.parameters import structured_output
from asyncllm.api.protocol.fields import JsonSchemaFormat, ResponseFormat
from asyncllm.api.protocol.responses import ResponseRequest
from asyncllm.api.response_input import answer_messages, input_items, input_messages, response_tools
from asyncllm.api.response_store import StoredResponse
from asyncllm.api.response_writer import ResponseWriter
from asyncllm.api.serving import Call, Serving
from asyncllm.api.token_events import TokenEvents
from asyncllm.results import Completion, TokenDelta
from asyncllm.structured import StructuredOutput


@dataclass(frozen=True, slots=True)
class _Job:
    """A request, made ready."""

    body: ResponseRequest
    chat: ChatJob
    messages: Sequence[Mapping[str, Any]]  # without the instructions, which hold for this response alone
    writer: ResponseWriter


async def create_response(serving: Serving, call: Call) -> Reply:
    """Make a response, at once or as a stream."""
    job = await _job(serving, call)
    generation = job.chat.generation(serving, call)
    if not job.body.stream:
        (done,) = await generation.completions()
        return json_reply(await _collected(serving, call, job, done))
    make_answer = await job.chat.start(serving, generation)
    return generation.reply(_events(serving, call, job, generation, make_answer()))


async def show_response(serving: Serving, call: Call) -> Reply:
    """A response that was kept, or the items it began with."""
    response_id, _, rest = call.parameters["response_id"].partition("/")
    stored = await serving.responses.get(call.owner, response_id)
    if stored is None or rest not in ("", "input_items"):
        raise ApiError(404, f"There is no response {response_id!r:.100}.", code="not_found")
    if not rest:
        return json_reply(stored.response)
    items = [{"id": f"in_{index}", **item} for index, item in enumerate(stored.input_items)]
    ids = {"first_id": items[0]["id"], "last_id": items[-1]["id"]} if items else {"first_id": None, "last_id": None}
    return json_reply({"object": "list", "data": items, "has_more": False, **ids})


async def delete_response(serving: Serving, call: Call) -> Reply:
    """Forget a response."""
    response_id = call.parameters["response_id"]
    if not await serving.responses.delete(call.owner, response_id):
        raise ApiError(404, f"There is no response {response_id!r:.100}.", code="not_found")
    return json_reply({"id": response_id, "object": "response.deleted", "deleted": True})


async def _job(serving: Serving, call: Call) -> _Job:
    body: ResponseRequest = call.body
    model = serving.name(body.model)
    for name in ("background", "conversation", "prompt"):
        if getattr(body, name):
            raise InvalidRequest(f"{name} is not supported here", param=name)
    earlier: Sequence[Mapping[str, Any]] = ()
    if body.previous_response_id is not None:
        stored = await serving.responses.get(call.owner, body.previous_response_id)
        if stored is None:
            raise InvalidRequest(
                f"There is no response {body.previous_response_id!r:.100} any more.",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        earlier = stored.messages
    messages = [*earlier, *input_messages(body.input)]
    instructions = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
    variables = dict(body.chat_template_kwargs or {})
    if body.reasoning is not None and body.reasoning.effort is not None:
        variables.setdefault("reasoning_effort", body.reasoning.effort)
        if body.reasoning.effort == "none":
            variables.setdefault("enable_thinking", False)
    logprobs = body.top_logprobs
    if logprobs is None and "message.output_text.logprobs" in (body.include or ()):
        logprobs = 0
    chat = await chat_job(
        serving,
        call,
        [*instructions, *messages],
        sampling=body,
        request=body,
        max_tokens=body.max_output_tokens,
        logprobs=logprobs,
        tools=response_tools(body),
        structured=_structured(body),
        template_variables=variables,
    )
    writer = ResponseWriter(_response(body, model), show_logprobs=logprobs is not None)
    return _Job(body, chat, messages, writer)


def _structured(body: ResponseRequest) -> StructuredOutput | None:
    chosen = None if body.text is None else body.text.format
    if chosen is None:
        return None
    schema = None
    if chosen.type == "json_schema":
        schema = JsonSchemaFormat.model_validate({"name": chosen.name, "schema": chosen.schema_})
    return structured_output(ResponseFormat(type=chosen.type, json_schema=schema), None)


def _response(body: ResponseRequest, model: str) -> dict[str, Any]:
    given = body.model_dump(include={"tools", "tool_choice", "text"}, exclude_none=True, by_alias=True)
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "store": body.store is not False,
        "temperature": body.temperature,
        "text": given.get("text") or {"format": {"type": "text"}},
        "tool_choice": given.get("tool_choice", "auto"),
        "tools": given.get("tools", []),
        "top_p": body.top_p,
        "truncation": body.truncation or "disabled",
        "usage": None,
    }


async def _collected(serving: Serving, call: Call, job: _Job, done: Completion) -> dict[str, Any]:
    answer = (await job.chat.answer_maker(serving, done.prompt_token_ids))()
    writer = job.writer
    writer.push(answer.push(done.text), done.choices[0].logprobs)
    writer.push(answer.flush())
    writer.end(done.finish_reason, done.usage)
    await _keep(serving, call, job)
    return writer.response


def _events(serving: Serving, call: Call, job: _Job, generation: Generation, answer: Answer) -> TokenEvents:
    writer, ended = job.writer, ""

    def render(delta: TokenDelta, position: int) -> str:
        nonlocal ended
        text = writer.push(answer.push(delta.text), delta.logprobs)
        if delta.finish_reason is not None and delta.usage is not None:
            text += writer.push(answer.flush())
            ended = writer.end(delta.finish_reason, delta.usage)
        return text

    async def last() -> str:
        await _keep(serving, call, job)  # before the client hears that it may ask for it
        return ended

    def fail(error: Exception) -> str:
        told = generation.failure(error)
        return writer.push(held_back(answer)) + writer.fail(told.code or "server_error", told.message)

    return TokenEvents(generation, render, fail, first=writer.begin(), last=last)


async def _keep(serving: Serving, call: Call, job: _Job) -> None:
    if job.body.store is False:
        return
    response = job.writer.response
    messages = (*job.messages, *answer_messages(response["output"]))
    kept = StoredResponse(response, messages, tuple(input_items(job.body.input)))
    await serving.responses.put(call.owner, response["id"], kept)
