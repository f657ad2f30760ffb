"""/v1/messages, in the shape of Anthropic's API."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from asyncllm.api.protocol.fields import Body, Count, Open, RequestFields, SamplingFields


class MessageBlock(Open):
    """A part of a message."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[MessageBlock] | None = None


class MessageParam(Open):
    """One message."""

    role: Literal["user", "assistant", "system"]
    content: str | list[MessageBlock]


class MessageTool(Open):
    """A tool that the client runs."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class MessageToolChoice(Body):
    """What the answer may do with the tools."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    """How much the model thinks first."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = None


class OutputFormat(Body):
    """What the text must look like."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    """How the answer is written."""

    format: OutputFormat | None = None


class CountRequest(Body):
    """Messages whose tokens are counted."""

    model: str | None = None
    messages: Annotated[list[MessageParam], Field(min_length=1)]
    system: str | list[MessageBlock] | None = None
    tools: list[MessageTool] | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: Thinking | None = None


class MessagesRequest(CountRequest, SamplingFields, RequestFields):
    """A chat to go on with."""

    max_tokens: Count
    stop_sequences: Annotated[list[str], Field(max_length=64)] | None = None
    stream: bool | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class MessageAnswer(BaseModel):
    """The model's message."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: str | None
    stop_sequence: str | None
    usage: dict[str, Any]


class TokenCount(BaseModel):
    """Tokens of messages."""

    input_tokens: int
