"""/tokenize and /detokenize."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, Field

from asyncllm.api.protocol.chat import ChatMessage
from asyncllm.api.protocol.fields import INT32, Body, Tool


class TokenizeRequest(Body):
    """A text, or messages, to count."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    tools: list[Tool] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class Tokens(BaseModel):
    """The ids of a text."""

    count: int
    max_model_len: int
    tokens: list[int]


class DetokenizeRequest(Body):
    """Ids to make text of."""

    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0, le=INT32)]]
    skip_special_tokens: bool | None = None


class DetokenizedText(BaseModel):
    """The text of ids."""

    prompt: str
