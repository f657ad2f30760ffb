"""/v1/models, and what else tells of the server."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel


class ModelCard(BaseModel):
    """One name of the model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None = None
    max_model_len: int


class ModelList(BaseModel):
    """All names."""

    object: Literal["list"]
    data: list[ModelCard]


class Health(BaseModel):
    """How the server is."""

    status: str


class Version(BaseModel):
    """What runs here."""

    version: str
