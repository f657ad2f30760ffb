"""/v1/embeddings."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from asyncllm.api.protocol.fields import Body, Usage


class EmbeddingRequest(Body):
    """Texts, or token ids, to embed."""

    model: str | None = None
    input: str | list[str] | list[int] | list[list[int]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    user: str | None = None


class EmbeddingItem(BaseModel):
    """The vector of one text."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingList(BaseModel):
    """The vectors of all of them."""

    object: Literal["list"]
    data: list[EmbeddingItem]
    model: str
    usage: Usage
