"""Which process this is, without a system call: asked once for every token that a consumer waits for."""

from __future__ import annotations

import os

from asyncllm.errors import EngineForked

pid = os.getpid()


def check(owner: int) -> None:
    """Raise `EngineForked` in any process but the one whose pid is `owner`."""
    if pid != owner:
        raise EngineForked(
            f"this engine belongs to process {owner} and its thread was not copied by the fork to process {pid}; "
            "start an engine in the child"
        )


def _note_fork() -> None:
    global pid  # noqa: PLW0603  # one value a process is the point
    pid = os.getpid()


if hasattr(os, "register_at_fork"):  # not on Windows, where nothing forks
    os.register_at_fork(after_in_child=_note_fork)
