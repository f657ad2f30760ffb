"""/v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from asyncllm.api.protocol.fields import (
    INT32,
    Body,
    Count,
    Open,
    RequestFields,
    ResponseFormat,
    SamplingFields,
    StreamOptions,
    StructuredFields,
    Tool,
    Usage,
)

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ContentPart(Open):
    """A part of a message's content; text is the only kind that a language model takes."""

    type: str
    text: str | None = None
    refusal: str | None = None


class CalledFunction(Open):
    """What an earlier answer called."""

    name: str
    arguments: str | dict[str, Any] | None = None


class CalledTool(Open):
    """A call in an earlier answer."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(Open):
    """One message."""

    role: Literal["developer", "system", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[CalledTool] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class NamedFunction(Body):
    """Names a function."""

    name: str


class NamedTool(Body):
    """The one tool that must be called."""

    type: Literal["function"] = "function"
    function: NamedFunction


class ChatRequest(SamplingFields, RequestFields):
    """A chat to go on with."""

    model: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    n: Annotated[int, Field(ge=1, le=INT32)] | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredFields | None = None
    reasoning_effort: Effort | None = None
    include_reasoning: bool | None = None
    modalities: list[Literal["text"]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: list[dict[str, Any]] | None = None


class FunctionCall(BaseModel):
    """A function and its arguments, as JSON text."""

    name: str
    arguments: str


class ToolCall(BaseModel):
    """A call that the model makes."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class AnswerMessage(BaseModel):
    """The model's message."""

    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(BaseModel):
    """One of the n answers."""

    index: int
    message: AnswerMessage
    finish_reason: str
    logprobs: dict[str, Any] | None = None
    stop_reason: str | int | None = None


class ChatCompletion(BaseModel):
    """The answers to a chat."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
