"""/v1/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from asyncllm.api.protocol.fields import (
    INT32,
    Count,
    RequestFields,
    ResponseFormat,
    SamplingFields,
    StreamOptions,
    StructuredFields,
    Usage,
)


class CompletionRequest(SamplingFields, RequestFields):
    """Prompts to go on with: a text, token ids, or a list of either."""

    model: str | None = None
    prompt: str | list[str] | list[int] | list[list[int]]
    n: Annotated[int, Field(ge=1, le=INT32)] | None = None
    best_of: Annotated[int, Field(ge=1, le=INT32)] | None = None
    max_tokens: Count | None = None
    echo: bool | None = None
    suffix: str | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredFields | None = None


class CompletionChoice(BaseModel):
    """One of the n answers to one of the prompts."""

    index: int
    text: str
    finish_reason: str
    logprobs: dict[str, Any] | None = None
    stop_reason: str | int | None = None


class TextCompletion(BaseModel):
    """The answers."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
