"""ApiSettings: everything that the API lets through, and to whom."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from asyncllm.config import check_names
from asyncllm.errors import ConfigError
from asyncllm.outputs.reasoning import REASONING_FORMATS
from asyncllm.outputs.tool_calls import TOOL_FORMATS

KIB, MIB = 1024, 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiSettings:
    """Limits and trust of one app. Frozen; impossible values raise `ConfigError`, as unknown names do in `override`."""

    api_keys: Sequence[str] = ()
    """Keys that clients must send (`Authorization: Bearer KEY` or `x-api-key: KEY`); none: everybody may in."""
    model_names: Sequence[str] = ()
    """The names that requests call the model by, the first one being its own; none: the engine's name for it."""
    max_body_bytes: int = 16 * MIB
    """The largest request body."""
    max_prompts: int = 128
    """The most prompts, or texts to embed, of one request."""
    max_choices: int = 16
    """The largest `n`."""
    max_tokens: int | None = None
    """The most tokens a choice may come to; a request that names no number gets this one."""
    max_queue: int = 1024
    """So many choices may be in work beyond those that the engine runs at once; more get 429."""
    request_timeout: float | None = None
    """Seconds after which a request is ended with an error."""
    drain_timeout: float = 30.0
    """Seconds that running requests may go on once the app shuts down."""
    cors_origins: Sequence[str] = ()
    """Origins whose pages may call the API; "*" for all."""
    request_chat_templates: bool = False
    """Let requests bring a chat template of their own."""
    tool_format: str | None = None
    """How the model writes tool calls; None: guessed from its chat template, "none" leaves them in the text."""
    reasoning_format: str | None = None
    """How the model marks its reasoning; None: guessed from its chat template, "none" leaves it in the text."""
    max_stored_responses: int = 1000
    """Responses kept for `previous_response_id`; the oldest go first."""
    max_stored_bytes: int = 64 * MIB
    """The same, as bytes of their JSON text."""
    max_viewers: int = 16
    """The most clients that watch `/engine/events` at once, the page's live view among them; more get 429."""
    page: bool = True
    """Serve the playground and the live view at `/`."""

    def __post_init__(self) -> None:
        for name in ("api_keys", "model_names", "cors_origins"):
            object.__setattr__(self, name, _texts(name, getattr(self, name)))
        for name, low in (("max_body_bytes", 1), ("max_prompts", 1), ("max_choices", 1), ("max_queue", 0),
                          ("max_stored_responses", 0), ("max_stored_bytes", 0), ("max_viewers", 0)):  # fmt: skip
            _count(name, getattr(self, name), low)
        if self.max_tokens is not None:
            _count("max_tokens", self.max_tokens, 1)
        _seconds("drain_timeout", self.drain_timeout, may_be_zero=True)
        if self.request_timeout is not None:
            _seconds("request_timeout", self.request_timeout, may_be_zero=False)
        for name in ("request_chat_templates", "page"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be True or False, got {getattr(self, name)!r}")
        _format("tool_format", self.tool_format, TOOL_FORMATS)
        _format("reasoning_format", self.reasoning_format, REASONING_FORMATS)

    def override(self, **overrides: Any) -> ApiSettings:
        """New settings with these fields changed; raises `ConfigError` with the nearest name for an unknown one."""
        check_names(ApiSettings, "API setting", overrides)
        return replace(self, **overrides)


def _texts(name: str, value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ConfigError(f"{name} must be a list of texts")  # without the value: it may be a key
    if not all(isinstance(item, str) and item for item in value):
        raise ConfigError(f"{name} must hold texts that are not empty")
    try:
        "".join(value).encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{name} must hold valid Unicode") from None
    return tuple(value)


def _count(name: str, value: object, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ConfigError(f"{name} must be a whole number of at least {low}, got {value!r}")


def _format(name: str, value: object, known: Iterable[str]) -> None:
    names = ("none", *sorted(known))
    if value is not None and value not in names:
        raise ConfigError(f"{name} must be one of {', '.join(names)}, got {value!r}")


def _seconds(name: str, value: object, *, may_be_zero: bool) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not (0 <= value <= 1e9):
        raise ConfigError(f"{name} must be a number of seconds, got {value!r}")
    if value == 0 and not may_be_zero:
        raise ConfigError(f"{name} must be over 0")
