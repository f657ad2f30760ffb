"""Every error that asyncllm raises on purpose.

```
AsyncLLMError
├── ConfigError (ValueError)            an EngineConfig, or a combination in it, that cannot work
├── DependencyError (ImportError)       an optional package is missing; the message names the extra
├── ModelLoadError                      the model cannot be brought up
│   ├── ModelNotFoundError              no such folder, file or Hub repository
│   ├── CheckpointError                 a shard is missing, short or does not hold what the model needs
│   ├── UnsupportedModelError           an architecture, rope type, tensor type or feature we do not run
│   ├── TokenizerError                  the tokenizer's files are missing or broken
│   └── InsufficientMemoryError         weights or cache do not fit; the message says what would
├── RequestError (ValueError)           one request is refused or fails; the engine goes on
│   ├── InvalidParamsError              a SamplingParams, or a request option, with impossible values
│   │   └── GrammarError                a structured output that cannot be compiled, or not be enforced
│   ├── InvalidPromptError              empty, ids outside the vocabulary, an unknown shape
│   ├── ChatTemplateError               no chat template, or the template refused the messages
│   ├── ContextLengthError              longer than the context, or than the whole KV pool
│   ├── DuplicateRequestError           the request_id belongs to a live request
│   └── RequestFailed                   the step that carried it failed
│       ├── SamplingFailed              there was no token that it could go on with
│       └── HookFailed                  a function of the host's, called for it, raised or took too long
└── EngineError (RuntimeError)          the engine as a whole
    ├── EngineNotStarted                used before `async with` / `start()`
    ├── EngineClosed                    used after, or ended by, `aclose()`
    ├── EngineCrashed                   its process has died, and another one takes its place
    ├── EngineDead                      a fault that the engine cannot survive
    └── EngineForked                    used in a child made by `os.fork()`
```
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Self


def shown(thing: object, show: Callable[[object], str] = repr) -> str:
    """A caller's object, such as an exception of a function of its own, as text. Never raises, as `show` itself may."""
    try:
        return show(thing)
    except Exception:
        return object.__repr__(thing)


class AsyncLLMError(Exception):
    """Root of every error this package raises on purpose."""


class ConfigError(AsyncLLMError, ValueError):
    """An engine setting, or a combination of settings, that cannot work."""


class DependencyError(AsyncLLMError, ImportError):
    """An optional package is missing; the message names the extra that brings it."""


class ModelLoadError(AsyncLLMError):
    """The model cannot be brought up."""


class ModelNotFoundError(ModelLoadError):
    """There is no such folder, file or Hub repository."""


class CheckpointError(ModelLoadError):
    """A checkpoint is incomplete, damaged, or holds tensors that the model has no place for."""


class UnsupportedModelError(ModelLoadError):
    """An architecture, rope type, tensor type or feature that asyncllm does not run."""


class TokenizerError(ModelLoadError):
    """The tokenizer's files are missing or cannot be read."""


class InsufficientMemoryError(ModelLoadError):
    """Weights or cache do not fit; the message says what would."""


class RequestError(AsyncLLMError, ValueError):
    """One request is refused or fails; the engine goes on serving."""


class InvalidParamsError(RequestError):
    """Sampling parameters or request options with impossible values."""


class GrammarError(InvalidParamsError):
    """A structured output that cannot be compiled, that cannot be enforced, or that grew too complex on the way."""


class InvalidPromptError(RequestError):
    """A prompt that is empty, holds ids outside the vocabulary, or has an unknown shape."""


class ChatTemplateError(RequestError):
    """The model has no chat template, or its template refused the messages."""


class ContextLengthError(RequestError):
    """A request that can never fit the context or the KV pool."""


class DuplicateRequestError(RequestError):
    """The request_id belongs to a live request."""


class RequestFailed(RequestError):
    """The step that carried this request failed; the cause is chained."""

    @classmethod
    def caused(cls, what: str, by: BaseException) -> Self:
        """`what` went wrong, because of an error that is no one's of ours."""
        failure = cls(f"{what}: {shown(by)}")
        failure.__cause__ = by
        return failure


class SamplingFailed(RequestFailed):
    """No logit of the request's next token is above -infinity, which not-a-number counts as."""

    def __init__(
        self,
        message: str = "no token can be sampled, for no logit is above -infinity: the request's bans leave nothing, or "
        "the model has computed no numbers (those of float16 end at 65,504; bfloat16 and float32 go further)",
    ) -> None:
        super().__init__(message)


class HookFailed(RequestFailed):
    """A function of the host's, one of `logits_processors` or `on_token`, raised or took too long."""


class EngineError(AsyncLLMError, RuntimeError):
    """The engine as a whole cannot serve."""


class EngineNotStarted(EngineError):
    """The engine was used before `async with` or `start()`."""


class EngineClosed(EngineError):
    """The engine was used after `aclose()`, or `aclose()` ended this stream."""


class EngineDead(EngineError):
    """A fault that the engine cannot survive; the cause is chained."""


class EngineCrashed(EngineError):
    """The engine's process has died and taken this request along; with `isolation="process"`, which starts another."""


class EngineForked(EngineError):
    """The engine was used in a child process made by `os.fork()`."""
