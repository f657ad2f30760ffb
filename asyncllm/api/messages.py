"""/v1/messages, in the shape of Anthropic's API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asyncllm.api.answers import Answer, held_back
from asyncllm.api.chat_job import ChatJob, Tools, chat_job, make_tools
from asyncllm.api.errors import InvalidRequest, anthropic_body
from asyncllm.api.exchange import Reply, json_reply
from asyncllm.api.generation import Generation
from asyncllm.api.identifiers import identifier
from asyncllm.api.message_writer import MessageWriter
from asyncllm.api.protocol.messages import CountRequest, MessageBlock, MessageParam, MessagesRequest
from asyncllm.api.serving import Call, Serving
from asyncllm.api.sse import compact, named
from asyncllm.api.token_events import TokenEvents
from asyncllm.results import Completion, TokenDelta
from asyncllm.structured import StructuredOutput


async def create_message(serving: Serving, call: Call) -> Reply:
    """Answer a chat, at once or as a stream."""
    body: MessagesRequest = call.body
    model = serving.name(body.model)
    job = await _job(serving, call, body)
    writer = MessageWriter(
        {
            "id": identifier("msg_"),
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {},
        }
    )
    generation = job.generation(serving, call)
    if not body.stream:
        (done,) = await generation.completions()
        make_answer = await job.answer_maker(serving, done.prompt_token_ids)
        return json_reply(_collected(writer, done, make_answer()))
    make_answer = await job.start(serving, generation)
    return generation.reply(_events(writer, generation, make_answer()))


async def count_tokens(serving: Serving, call: Call) -> Reply:
    """The tokens that messages come to."""
    body: CountRequest = call.body
    serving.name(body.model)
    tools = _tools(body)
    ids = await serving.engine.tokenize(
        _messages(body), tools=list(tools.tools) or None, chat_template_kwargs=_thinking(body)
    )
    return json_reply({"input_tokens": len(ids)})


async def _job(serving: Serving, call: Call, body: MessagesRequest) -> ChatJob:
    chosen = body.output_format or (None if body.output_config is None else body.output_config.format)
    stops = body.stop_sequences
    budget = None if body.thinking is None else body.thinking.budget_tokens
    sampling = body.model_copy(update={
        "stop": body.stop if stops is None else stops,
        "thinking_token_budget": body.thinking_token_budget if budget is None else budget,
    })  # fmt: skip
    return await chat_job(
        serving,
        call,
        _messages(body),
        sampling=sampling,
        request=body,
        max_tokens=body.max_tokens,
        tools=_tools(body),
        structured=None if chosen is None else StructuredOutput(json_schema=chosen.schema_),
        template_variables=_thinking(body) | (body.chat_template_kwargs or {}),
    )


def _thinking(body: CountRequest) -> dict[str, Any]:
    return {} if body.thinking is None else {"enable_thinking": body.thinking.type != "disabled"}


def _tools(body: CountRequest) -> Tools:
    given = []
    for tool in body.tools or ():
        function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema or {"type": "object"}}
        if tool.description is not None:
            function["description"] = tool.description
        given.append({"type": "function", "function": function})
    choice = body.tool_choice
    if choice is None:
        return make_tools(given, choice=None, name=None, parallel=True)
    kind = {"any": "required", "tool": None}.get(choice.type, choice.type)
    name = choice.name or "" if choice.type == "tool" else None
    return make_tools(given, choice=kind, name=name, parallel=choice.disable_parallel_tool_use is not True)


def _messages(body: CountRequest) -> list[dict[str, Any]]:
    messages = [] if not body.system else [{"role": "system", "content": _text(body.system, "system")}]
    for index, message in enumerate(body.messages):
        messages += _turn(message, f"messages[{index}]")
    return messages


def _turn(message: MessageParam, where: str) -> list[dict[str, Any]]:
    """A turn may hold the results of several tools, which are messages of their own here."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    results: list[dict[str, Any]] = []
    texts: list[MessageBlock] = []
    calls: list[dict[str, Any]] = []
    thought = ""
    for block in message.content:
        if block.type == "tool_result":
            content = _text(block.content or "", where)
            results.append({"role": "tool", "tool_call_id": block.tool_use_id or "", "content": content})
        elif block.type == "tool_use":
            function = {"name": block.name or "", "arguments": compact(block.input or {})}
            calls.append({"id": block.id or "", "type": "function", "function": function})
        elif block.type == "thinking":
            thought += block.thinking or ""
        elif block.type != "redacted_thinking":
            texts.append(block)
    turn: dict[str, Any] = {"role": message.role, "content": _text(texts, where)}
    if calls:
        turn["tool_calls"] = calls
    if thought:
        turn["reasoning_content"] = thought
    return results + ([turn] if texts or calls or thought or not results else [])


def _text(content: str | Sequence[MessageBlock], where: str) -> str:
    if isinstance(content, str):
        return content
    for block in content:
        if block.type != "text":
            raise InvalidRequest(f"{where}: this model takes text, not {block.type!r:.40}", param="messages")
    return "".join(block.text or "" for block in content)


def _collected(writer: MessageWriter, done: Completion, answer: Answer) -> dict[str, Any]:
    writer.push(answer.push(done.text))
    writer.push(answer.flush())
    writer.end(done.finish_reason, done.stop_reason, done.usage)
    return writer.message


def _events(writer: MessageWriter, generation: Generation, answer: Answer) -> TokenEvents:
    def render(delta: TokenDelta, position: int) -> str:
        text = writer.push(answer.push(delta.text))
        if delta.finish_reason is not None and delta.usage is not None:
            text += writer.push(answer.flush())
            text += writer.end(delta.finish_reason, delta.stop_reason, delta.usage)
        return text

    def fail(error: Exception) -> str:
        return writer.push(held_back(answer)) + named("error", anthropic_body(generation.failure(error)))

    return TokenEvents(generation, render, fail, first=writer.begin(len(generation.streams[0].prompt_token_ids)))
