"""From errors to what clients get: one place for the whole tree of `asyncllm.errors`.

OpenAI's clients choose an exception by the status and show `error.message`; Anthropic's read `error.type`. Nothing of
an error that nobody raised on purpose is told to a client, not even where one of ours wraps it: the log has that, under
the request's id.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from pydantic import ValidationError

from asyncllm.errors import (
    AsyncLLMError,
    ChatTemplateError,
    ConfigError,
    ContextLengthError,
    DependencyError,
    DuplicateRequestError,
    EngineClosed,
    EngineCrashed,
    EngineDead,
    EngineError,
    EngineForked,
    EngineNotStarted,
    InvalidParamsError,
    InvalidPromptError,
    ModelLoadError,
    RequestError,
    RequestFailed,
    SamplingFailed,
)
from asyncllm.params import SamplingParams
from asyncllm.structured import StructuredOutput

logger = logging.getLogger("asyncllm.api")


class ApiError(Exception):
    """An answer that is an error."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})


class InvalidRequest(ApiError):
    """400."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(400, message, param=param, code=code)


@dataclass(frozen=True, slots=True)
class _Answer:
    status: int
    code: str | None = None
    retry_after: int | None = None
    text: str | None = None  # in place of the error's own, which may hold what is the server's


ANSWERS: Mapping[type[AsyncLLMError], _Answer] = {
    InvalidParamsError: _Answer(400),
    InvalidPromptError: _Answer(400),
    ChatTemplateError: _Answer(400, "chat_template"),
    ContextLengthError: _Answer(400, "context_length_exceeded"),
    DuplicateRequestError: _Answer(409, "duplicate_request_id"),
    RequestFailed: _Answer(500, "request_failed", text="The request failed."),
    SamplingFailed: _Answer(500, "sampling_failed"),
    RequestError: _Answer(400),
    EngineNotStarted: _Answer(503, "engine_not_started", retry_after=1),
    EngineClosed: _Answer(503, "engine_closed", retry_after=1),
    EngineCrashed: _Answer(503, "engine_crashed", retry_after=1, text="The engine's process has died; another starts."),
    EngineDead: _Answer(503, "engine_dead", text="The engine has died."),
    EngineForked: _Answer(503, "engine_forked"),
    EngineError: _Answer(503, "engine"),
    DependencyError: _Answer(501, "not_installed"),
    ConfigError: _Answer(500, "configuration", text="A setting of the server cannot work."),
    ModelLoadError: _Answer(503, "model_load", text="The model cannot be loaded."),
    AsyncLLMError: _Answer(500),
}
"""An error without a line of its own has its nearest ancestor's."""

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    409: "conflict_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    501: "not_implemented_error",
    503: "overloaded_error",
    504: "timeout_error",
}

_ANTHROPIC_TYPES = {**_TYPES, 404: "not_found_error", 409: "invalid_request_error", 501: "invalid_request_error"}


_INTERNAL = _Answer(500, "internal_error", text="The server had an error of its own.")


def api_error(error: BaseException, request_id: str) -> ApiError:
    """What a client is told of an error. What it is not told goes to the log."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ValidationError):
        return _validation(error)
    answer, text = _INTERNAL, str(error)
    if isinstance(error, AsyncLLMError):
        answer = next(ANSWERS[kind] for kind in type(error).__mro__ if kind in ANSWERS)
    if answer.text is not None:
        text = f"{answer.text} The server's log has the details, under request {request_id}."
        told_already = isinstance(error, EngineError)  # by the engine, with all that led to it
        logger.error("request %s failed: %r", request_id, error, exc_info=None if told_already else error)
    param = _named_field(text) if isinstance(error, InvalidParamsError) else None
    retry = {} if answer.retry_after is None else {"retry-after": str(answer.retry_after)}
    return ApiError(answer.status, text, param=param, code=answer.code, headers=retry)


def openai_body(error: ApiError) -> dict[str, Any]:
    """The layout of OpenAI's API."""
    kind = _TYPES.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def anthropic_body(error: ApiError) -> dict[str, Any]:
    """The layout of Anthropic's API."""
    kind = _ANTHROPIC_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def _validation(error: ValidationError) -> ApiError:
    """The first thing that is wrong, in the words of the schema. Never the value: a prompt stays out of logs."""
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    problem = min(problems, key=lambda each: len(each["loc"]))  # of a union, the branch that is told is any
    path = [part for part in problem["loc"] if not _is_union_branch(part)]
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")
    return InvalidRequest(f"{where}: {problem['msg']}" if where else problem["msg"], param=where or None)


def _is_union_branch(part: str | int) -> bool:
    """Whether pydantic names a member of a union here rather than a field."""
    return isinstance(part, str) and (part in _BRANCHES or re.fullmatch(r"[a-z][a-z0-9_]*", part) is None)


_BRANCHES = frozenset(("str", "int", "float", "bool", "list", "dict", "none"))


_FIELDS = frozenset(field.name for kind in (SamplingParams, StructuredOutput) for field in fields(kind)).union(
    ("tools", "tool_choice", "request_id", "priority", "cache_salt", "chat_template_kwargs")
)


def _named_field(message: str) -> str | None:
    """Messages of `InvalidParamsError` begin with the field's name, where one field is at fault."""
    found = re.match(r"\w+", message)
    return found[0] if found and found[0] in _FIELDS else None
