"""A JSON file of a checkpoint, read with errors that name it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from asyncllm.errors import CheckpointError


def read_json(path: Path) -> dict[str, Any]:
    """The object that the file holds. Raises `CheckpointError`."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value
