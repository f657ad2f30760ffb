"""/v1/responses."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from asyncllm.api.protocol.chat import Effort
from asyncllm.api.protocol.fields import Body, Count, Open, RequestFields, SamplingFields, StreamOptions


class InputPart(Open):
    """A part of an item's content."""

    type: str
    text: str | None = None
    refusal: str | None = None


class InputItem(Open):
    """A message, a call of a function, its output, or reasoning."""

    type: str | None = None
    id: str | None = None
    role: Literal["developer", "system", "user", "assistant"] | None = None
    content: str | list[InputPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[InputPart] | None = None


class ResponseTool(Open):
    """A function that the model may call; the other kinds run on OpenAI's servers only."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedResponseTool(Body):
    """The one function that must be called."""

    type: Literal["function"] = "function"
    name: str


class TextFormat(Body):
    """What the text must look like."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextOptions(Body):
    """How the text is written."""

    format: TextFormat | None = None


class ReasoningOptions(Body):
    """How much the model thinks first."""

    effort: Effort | None = None


class ResponseRequest(SamplingFields, RequestFields):
    """A response to be made."""

    model: str | None = None
    input: str | Annotated[list[InputItem], Field(min_length=1)]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    max_output_tokens: Count | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    include: list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    tools: list[ResponseTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedResponseTool | None = None
    parallel_tool_calls: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: dict[str, str] | None = None
    background: bool | None = None
    conversation: str | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class ResponseAnswer(BaseModel):
    """A response."""

    id: str
    object: Literal["response"]
    created_at: int
    status: str
    model: str
    output: list[dict[str, Any]]
    usage: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    incomplete_details: dict[str, Any] | None = None
    previous_response_id: str | None = None


class DeletedResponse(BaseModel):
    """A response is gone."""

    id: str
    object: str
    deleted: bool
