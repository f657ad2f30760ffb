"""/v1/completions: prompts that are texts or token ids, each with n answers."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

from asyncllm.api.chat_chunks import finish_reason, stop_reason, usage_body
from asyncllm.api.completion_chunks import CompletionChunks
from asyncllm.api.errors import InvalidRequest, openai_body
from asyncllm.api.exchange import Reply, event_reply, json_reply
from asyncllm.api.generation import Generation
from asyncllm.api.identifiers import identifier
from asyncllm.api.logprobs import CompletionLogprobs, joined, prompt_logprobs
from asyncllm.api.parameters import request_options, sampling_params, server_limits, structured_output
from asyncllm.api.protocol.completions import CompletionRequest
from asyncllm.api.serving import Call, Serving
from asyncllm.api.sse import DONE, data
from asyncllm.api.token_events import TokenEvents
from asyncllm.params import SamplingParams
from asyncllm.results import Completion, TokenDelta, Usage

Prompt = str | list[int]


@dataclass(frozen=True, slots=True)
class _Job:
    """A request, made ready."""

    body: CompletionRequest
    head: dict[str, Any]
    prompts: Sequence[Prompt]
    params: SamplingParams
    server_limits: bool


async def create_completion(serving: Serving, call: Call) -> Reply:
    """Go on with prompts, at once or as a stream."""
    body: CompletionRequest = call.body
    job = _job(serving, body)
    options = request_options(body, serving.settings, call.salt)
    ticket = serving.enter(len(job.prompts) * job.params.n)
    streams, base = [], options["request_id"]
    for index, prompt in enumerate(job.prompts):
        if index:
            options["request_id"] = f"{base}-{index}"
        streams.append(serving.engine.stream(prompt, job.params, **options))
    limits = job.server_limits
    generation = Generation(serving, streams, ticket, request_id=call.request_id, server_limits=limits)
    # An echo with its log probabilities is complete only when the prompt was computed: it goes out in one piece.
    if body.stream and not (body.echo and body.logprobs is not None):
        await generation.start()
        try:
            echoes = await _echoes(serving, job)
        except BaseException:
            await generation.abandon()
            raise
        return generation.reply(_events(job, generation, echoes))
    done = await generation.completions()
    choices = await _choices(serving, job, done)
    usage = _sum([completion.usage for completion in done])
    if body.stream:
        return event_reply(_late_events(job, choices, usage))
    return json_reply(job.head | {"choices": choices, "usage": usage_body(usage), "system_fingerprint": None})


def _job(serving: Serving, body: CompletionRequest) -> _Job:
    model = serving.name(body.model)
    if body.suffix:
        raise InvalidRequest("suffix is not supported: the model goes on from its prompt only", param="suffix")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise InvalidRequest("best_of is not supported: ask for n answers and choose", param="best_of")
    prompts = as_prompts(body.prompt)
    if len(prompts) > serving.settings.max_prompts:
        raise InvalidRequest(f"at most {serving.settings.max_prompts} prompts a request", param="prompt")
    # OpenAI's completions end after 16 tokens where the request names no number.
    max_tokens = 16 if body.max_tokens is None and "max_tokens" not in body.model_fields_set else body.max_tokens
    echoed = body.logprobs if body.echo else None
    params = sampling_params(
        body,
        serving.settings,
        n=body.n,
        max_tokens=max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=body.prompt_logprobs if body.prompt_logprobs is not None else echoed,
        structured_output=structured_output(body.response_format, body.structured_outputs),
    )
    head = {
        "id": identifier("cmpl-"),
        "object": "text_completion",
        "created": int(time.time()),
        "model": model,
    }
    return _Job(body, head, prompts, params, server_limits(body, serving.settings))


def as_prompts(prompt: str | list[str] | list[int] | list[list[int]], param: str = "prompt") -> list[Prompt]:
    """A text, ids, or a list of either, as a list."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InvalidRequest(f"{param} is empty", param=param)
    if isinstance(prompt[0], int):
        return [prompt]  # ids: the schema lets nothing else stand beside an int
    return list(prompt)


async def _echoes(serving: Serving, job: _Job) -> list[str]:
    """The text that each answer begins with."""
    if not job.body.echo:
        return [""] * len(job.prompts)
    return [
        prompt if isinstance(prompt, str) else await serving.engine.detokenize(prompt, skip_special_tokens=False)
        for prompt in job.prompts
    ]


async def _choices(serving: Serving, job: _Job, done: Sequence[Completion]) -> list[dict[str, Any]]:
    echoes = await _echoes(serving, job)
    choices = []
    for position, (completion, echo) in enumerate(zip(done, echoes, strict=True)):
        first = ""
        if job.body.echo and job.body.logprobs is not None and completion.prompt_token_ids:
            first = await serving.engine.detokenize(completion.prompt_token_ids[:1], skip_special_tokens=False)
        choices += _answers(job, position, completion, echo, first)
    return choices


def _answers(job: _Job, position: int, done: Completion, echo: str, first: str) -> list[dict[str, Any]]:
    body, answers = job.body, []
    for choice in done.choices:
        logprobs = None
        if body.logprobs is not None:
            layout = CompletionLogprobs()
            parts = [layout.prompt(first, done.prompt_logprobs)] if body.echo and done.prompt_logprobs else []
            logprobs = joined([*parts, layout.answer(choice.logprobs or ())])
        answer: dict[str, Any] = {
            "index": position * job.params.n + choice.index,
            "text": echo + choice.text,
            "logprobs": logprobs,
            "finish_reason": finish_reason(choice.finish_reason, called=False),
            "stop_reason": stop_reason(choice.finish_reason, choice.stop_reason),
        }
        if body.prompt_logprobs is not None:
            answer["prompt_logprobs"] = prompt_logprobs(done.prompt_logprobs)
        if body.return_token_ids:
            answer |= {"token_ids": list(choice.token_ids), "prompt_token_ids": list(done.prompt_token_ids)}
        answers.append(answer)
    return answers


def _sum(usages: Sequence[Usage]) -> Usage:
    return Usage(
        sum(usage.prompt_tokens for usage in usages),
        sum(usage.completion_tokens for usage in usages),
        sum(usage.cached_tokens for usage in usages),
    )


def _events(job: _Job, generation: Generation, echoes: Sequence[str]) -> TokenEvents:
    body, n, streams = job.body, job.params.n, generation.streams
    options = body.stream_options
    chunks = CompletionChunks(
        head=job.head,
        echoes=[echo for echo in echoes for _ in range(n)],
        prompt_token_ids=[stream.prompt_token_ids for stream in streams for _ in range(n)],
        logprobs=body.logprobs is not None,
        token_ids=bool(body.return_token_ids),
        include_usage=bool(options and options.include_usage),
    )
    usages: list[Usage] = []

    def render(delta: TokenDelta, position: int) -> str:
        text = chunks.render(position * n + delta.index, delta)
        if delta.usage is not None:
            usages.append(delta.usage)
            if len(usages) == len(streams):
                text += chunks.usage(_sum(usages)) + DONE
        return text

    def fail(error: Exception) -> str:
        return data(openai_body(generation.failure(error)))

    return TokenEvents(generation, render, fail, n=n, frame=chunks.frame)


async def _late_events(job: _Job, choices: list[dict[str, Any]], usage: Usage) -> AsyncGenerator[bytes, None]:
    text = "".join(data(job.head | {"choices": [choice]}) for choice in choices)
    if job.body.stream_options and job.body.stream_options.include_usage:
        text += data(job.head | {"choices": [], "usage": usage_body(usage)})
    yield (text + DONE).encode()
