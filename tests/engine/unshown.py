"""An exception of a caller's that cannot be shown."""

from __future__ import annotations

from typing import Any


class Unshown(Exception):
    """Raises when it is to become text."""

    def __repr__(self) -> str:
        raise ZeroDivisionError

    __str__ = __repr__


def fail_unshown(*_: Any) -> None:
    """As a hook."""
    raise Unshown
