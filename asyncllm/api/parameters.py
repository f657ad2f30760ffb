"""From a request's fields to `SamplingParams` and the options of `engine.stream`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from asyncllm.api.errors import InvalidRequest
from asyncllm.api.identifiers import identifier
from asyncllm.api.protocol.fields import RequestFields, ResponseFormat, SamplingFields, StructuredFields
from asyncllm.api.settings import ApiSettings
from asyncllm.engine.async_engine import RequestOptions
from asyncllm.params import RepetitionDetection, SamplingParams
from asyncllm.structured import StructuredOutput

_CONVERTED = ("logit_bias", "top_k", "repetition_detection")
_SAME_NAME = tuple(name for name in SamplingFields.model_fields if name not in _CONVERTED)


def sampling_params(
    body: SamplingFields, settings: ApiSettings, *, n: int | None, max_tokens: int | None, **others: Any
) -> SamplingParams:
    """Fields that are left out keep the engine's defaults. Raises `InvalidRequest` and `InvalidParamsError`."""
    given: dict[str, Any] = {name: getattr(body, name) for name in _SAME_NAME}
    if body.top_k is not None:
        given["top_k"] = max(body.top_k, 0)
    if body.logit_bias:
        given["logit_bias"] = _logit_bias(body.logit_bias)
    if body.repetition_detection is not None:
        given["repetition_detection"] = RepetitionDetection(**body.repetition_detection.model_dump())
    if body.logprob_token_ids and others.get("logprobs") is None:
        raise InvalidRequest("logprob_token_ids needs logprobs", param="logprob_token_ids")
    if n is not None and n > settings.max_choices:
        raise InvalidRequest(f"n may be at most {settings.max_choices} here, got {n}", param="n")
    limit = settings.max_tokens
    if limit is not None and max_tokens is not None and max_tokens > limit:
        raise InvalidRequest(f"max_tokens may be at most {limit} here, got {max_tokens}", param="max_tokens")
    given |= {"n": n, "max_tokens": limit if max_tokens is None else max_tokens} | others
    chosen = {name: value for name, value in given.items() if value is not None}
    try:
        return _plain_params(tuple(chosen.items()))
    except TypeError:  # lists and mappings have no hash
        return SamplingParams(**chosen)


@lru_cache(maxsize=256)
def _plain_params(chosen: tuple[tuple[str, Any], ...]) -> SamplingParams:
    """Checking forty fields takes longer than all else that a request is asked for, and clients repeat themselves."""
    return SamplingParams(**dict(chosen))


def request_options(body: RequestFields, settings: ApiSettings, salt: str | None) -> RequestOptions:
    """`salt` is that of the API key; the request's own only divides further."""
    own = body.cache_salt
    options = RequestOptions(
        request_id=body.request_id or identifier("request-"),
        priority=body.priority or 0,
        cache_salt=own if salt is None else f"{salt}:{own or ''}",
    )
    deadlines = [each for each in (settings.request_timeout, _seconds(body.deadline_ms)) if each is not None]
    if deadlines:
        options["deadline"] = min(deadlines)
    return options


def server_limits(body: RequestFields, settings: ApiSettings) -> bool:
    """Whether it is the server's timeout, and not the request's own deadline, that would end this request."""
    own = _seconds(body.deadline_ms)
    return settings.request_timeout is not None and (own is None or settings.request_timeout < own)


def structured_output(
    response_format: ResponseFormat | None, structured: StructuredFields | None
) -> StructuredOutput | None:
    """What the answer is bound to. Raises `InvalidRequest`, and what `StructuredOutput` raises."""
    formatted = None if response_format is None else _formatted(response_format)
    if structured is None:
        return formatted
    if formatted is not None:
        raise InvalidRequest("give response_format or structured_outputs, not both", param="structured_outputs")
    given = {name: value for name, value in structured if value is not None and value is not False}
    if len(given) != 1:
        raise InvalidRequest("structured_outputs takes exactly one kind of output", param="structured_outputs")
    return StructuredOutput(**given)


def _formatted(chosen: ResponseFormat) -> StructuredOutput | None:
    match chosen.type:
        case "json_object":
            return StructuredOutput(json_object=True)
        case "json_schema":
            schema = None if chosen.json_schema is None else chosen.json_schema.schema_
            if schema is None:
                raise InvalidRequest("json_schema needs a schema", param="response_format.json_schema")
            return StructuredOutput(json_schema=schema)
        case "structural_tag":
            return StructuredOutput(structural_tag=_needed(chosen.structural_tag, "structural_tag"))
        case "regex":
            return StructuredOutput(regex=_needed(chosen.pattern, "pattern"))
        case "grammar":
            return StructuredOutput(grammar=_needed(chosen.grammar, "grammar"))
        case "text":
            return None


def _needed(value: Any, name: str) -> Any:
    if value is None:
        raise InvalidRequest(f"this response_format needs {name}", param=f"response_format.{name}")
    return value


def _logit_bias(given: Mapping[str, float]) -> dict[int, float]:
    biases = {}
    for key, value in given.items():
        if not (key.isascii() and key.isdigit() and len(key) < 11):
            raise InvalidRequest(f"logit_bias: {key!r:.40} is not a token id", param="logit_bias")
        biases[int(key)] = value
    return biases


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000
