"""What of the host's objects, and of errors, crosses from one process to the other."""

from __future__ import annotations

import io
import pickle
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from asyncllm import errors
from asyncllm.errors import AsyncLLMError, shown

_CHAIN = 5
"""Causes of causes that are told."""


class _HostPickler(pickle.Pickler):
    """Refuses what the other process could not find."""

    def reducer_override(self, thing: Any) -> Any:
        """As pickle has it."""
        if isinstance(thing, type | FunctionType) and thing.__module__ == "__main__":
            raise pickle.PicklingError(
                f"{thing.__qualname__} is defined in the script that was started (__main__), which another process "
                "does not import; it can be in any other module"
            )
        return NotImplemented


class _PlainPickler(_HostPickler):
    """Sends mappings and texts of the host's own types as plain ones, which is how templates see them anyway."""

    def reducer_override(self, thing: Any) -> Any:
        """As pickle has it."""
        if isinstance(thing, Mapping):
            return dict, (list(thing.items()),)
        if isinstance(thing, str):
            return str, (str.__str__(thing),)
        return super().reducer_override(thing)


def pack(thing: object) -> bytes:
    """An object of the host's. Raises whatever says why it cannot cross."""
    return _packed_by(_HostPickler, thing)


def pack_plain(thing: object) -> bytes:
    """The same of a request, or a text."""
    return _packed_by(_PlainPickler, thing)


def _packed_by(kind: type[pickle.Pickler], thing: object) -> bytes:
    buffer = io.BytesIO()
    kind(buffer, pickle.HIGHEST_PROTOCOL).dump(thing)
    return buffer.getvalue()


def unpack(data: bytes) -> Any:
    """The other process's copy. Raises whatever says why there cannot be one."""
    return pickle.loads(data)


class ForeignError(Exception):
    """Stands for an exception of the other process that cannot cross; shows itself as that one did."""

    def __init__(self, text: str, shown: str) -> None:
        super().__init__(text)
        self._shown = shown

    def __repr__(self) -> str:
        return self._shown

    def __reduce__(self) -> tuple[Any, ...]:
        return ForeignError, (self.args[0], self._shown)


@dataclass(frozen=True, slots=True)
class ErrorReport:
    """An exception and its causes, so that they can be raised again elsewhere."""

    name: str | None  # of the class in `asyncllm.errors`; None: of another
    text: str
    shown: str  # its repr
    packed: bytes | None  # of another class: itself, where it can cross
    stack: str
    cause: ErrorReport | None = None

    @classmethod
    def of(cls, error: BaseException, chain: int = _CHAIN) -> ErrorReport:
        """What is told of an exception."""
        name = next((kind.__name__ for kind in type(error).__mro__ if _is_ours(kind)), None)
        cause = error.__cause__
        return cls(
            name=name,
            text=shown(error, str),
            shown=shown(error),
            packed=None if name is not None else _packed(error),
            stack="".join(traceback.format_tb(error.__traceback__)),
            cause=None if cause is None or chain == 0 else cls.of(cause, chain - 1),
        )

    def restore(self) -> BaseException:
        """The same in this process: its class and message, what caused it, and where it was raised as a note."""
        error = self._restored()
        if self.cause is not None:
            error.__cause__ = self.cause.restore()
        if self.stack and self.name is None:
            error.add_note(f"in the engine's process:\n{self.stack.rstrip()}")
        return error

    def _restored(self) -> BaseException:
        if self.name is not None:
            ours: AsyncLLMError = getattr(errors, self.name)(self.text)
            return ours
        if self.packed is not None:
            try:
                found = unpack(self.packed)
            except Exception:  # its class is not to be found here, or wants other arguments
                found = None
            if isinstance(found, BaseException) and shown(found) == self.shown:
                return found
        return ForeignError(self.text, self.shown)


def _is_ours(kind: type) -> bool:
    return issubclass(kind, AsyncLLMError) and getattr(errors, kind.__name__, None) is kind


def _packed(error: BaseException) -> bytes | None:
    try:
        return pack(error)
    except Exception:  # it holds what cannot cross
        return None
