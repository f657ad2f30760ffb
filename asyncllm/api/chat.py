"""/v1/chat/completions."""

from __future__ import annotations

import time
from typing import Any

from asyncllm.api.answers import Answer, Collected, MakeAnswer, collect
from asyncllm.api.chat_chunks import ChatChunks, error_event, finish_reason, stop_reason, usage_body
from asyncllm.api.chat_job import ChatJob, chat_job, chat_tools, template_messages
from asyncllm.api.errors import InvalidRequest, openai_body
from asyncllm.api.exchange import Reply, json_reply
from asyncllm.api.identifiers import identifier
from asyncllm.api.logprobs import chat_logprobs, prompt_logprobs
from asyncllm.api.parameters import structured_output
from asyncllm.api.protocol.chat import ChatRequest
from asyncllm.api.serving import Call, Serving
from asyncllm.api.token_events import TokenEvents
from asyncllm.engine.async_engine import TokenStream
from asyncllm.results import Choice, Completion


async def create_chat_completion(serving: Serving, call: Call) -> Reply:
    """Answer a chat, at once or as a stream."""
    body: ChatRequest = call.body
    model = serving.name(body.model)
    job = await _job(serving, call, body)
    head = {
        "id": identifier("chatcmpl-"),
        "object": "chat.completion.chunk" if body.stream else "chat.completion",
        "created": int(time.time()),
        "model": model,
    }
    generation = job.generation(serving, call)
    if not body.stream:
        (done,) = await generation.completions()
        make_answer = await job.answer_maker(serving, done.prompt_token_ids)
        return json_reply(_collected(head, body, done, make_answer))
    make_answer = await job.start(serving, generation)
    chunks = _chunks(head, job, body, generation.streams[0], make_answer)

    def fail(error: Exception) -> str:
        return chunks.rest() + error_event(openai_body(generation.failure(error)))

    return generation.reply(TokenEvents(generation, chunks.render, fail, n=job.params.n, frame=chunks.frame))


async def _job(serving: Serving, call: Call, body: ChatRequest) -> ChatJob:
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
    variables: dict[str, Any] = {}
    if body.reasoning_effort is not None:
        variables["reasoning_effort"] = body.reasoning_effort
        if body.reasoning_effort == "none":
            variables["enable_thinking"] = False
    if body.documents is not None:
        variables["documents"] = body.documents
    if body.add_generation_prompt is not None:
        if body.add_generation_prompt and body.continue_final_message:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt exclude each other", param="continue_final_message"
            )
        variables["add_generation_prompt"] = body.add_generation_prompt
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return await chat_job(
        serving,
        call,
        template_messages(body.messages),
        sampling=body,
        request=body,
        n=body.n,
        max_tokens=max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
        tools=chat_tools(body.tools, body.tool_choice, body.parallel_tool_calls),
        structured=structured_output(body.response_format, body.structured_outputs),
        template_variables=variables | (body.chat_template_kwargs or {}),
        chat_template=body.chat_template,
        continue_final_message=bool(body.continue_final_message),
    )


def _collected(head: dict[str, Any], body: ChatRequest, done: Completion, make_answer: MakeAnswer) -> dict[str, Any]:
    answer = head | {
        "choices": [_choice(make_answer(), body, each) for each in done.choices],
        "usage": usage_body(done.usage),
        "system_fingerprint": None,
    }
    if body.prompt_logprobs is not None:
        answer["prompt_logprobs"] = prompt_logprobs(done.prompt_logprobs)
    if body.return_token_ids:
        answer["prompt_token_ids"] = list(done.prompt_token_ids)
    return answer


def _choice(parser: Answer, body: ChatRequest, choice: Choice) -> dict[str, Any]:
    collected = collect(parser, choice.text)
    answer: dict[str, Any] = {
        "index": choice.index,
        "message": answer_message(collected, show_reasoning=body.include_reasoning is not False),
        "logprobs": None if choice.logprobs is None else chat_logprobs(choice.logprobs),
        "finish_reason": finish_reason(choice.finish_reason, called=bool(collected.calls)),
        "stop_reason": stop_reason(choice.finish_reason, choice.stop_reason),
    }
    if body.return_token_ids:
        answer["token_ids"] = list(choice.token_ids)
    return answer


def answer_message(collected: Collected, *, show_reasoning: bool) -> dict[str, Any]:
    """The message of a collected answer."""
    message: dict[str, Any] = {"role": "assistant", "content": collected.content or (None if collected.calls else "")}
    if collected.reasoning and show_reasoning:
        message["reasoning_content"] = collected.reasoning
    if collected.calls:
        message["tool_calls"] = [
            {"id": each.id, "type": "function", "function": {"name": each.name, "arguments": each.arguments}}
            for each in collected.calls
        ]
    return message


def _chunks(
    head: dict[str, Any], job: ChatJob, body: ChatRequest, stream: TokenStream, make_answer: MakeAnswer
) -> ChatChunks:
    options = body.stream_options
    return ChatChunks(
        head=head,
        n=job.params.n,
        make_answer=make_answer,
        plain=job.format.plain,
        logprobs=bool(body.logprobs),
        token_ids=bool(body.return_token_ids),
        include_usage=bool(options and options.include_usage),
        continuous_usage=bool(options and options.continuous_usage_stats),
        show_reasoning=body.include_reasoning is not False,
        prompt_token_ids=stream.prompt_token_ids,
    )
