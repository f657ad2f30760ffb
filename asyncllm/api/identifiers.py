"""Identifiers of requests and answers: unique, cheap, and no secret."""

from __future__ import annotations

import uuid
from itertools import count

_PROCESS = uuid.uuid4().hex[:20]
_COUNTER = count(int(uuid.uuid4()) % 2**20)


def identifier(prefix: str) -> str:
    """A new one. Not random: that takes a system call, which lets go of the interpreter lock."""
    return f"{prefix}{_PROCESS}{next(_COUNTER):012x}"
