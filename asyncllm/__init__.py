"""asyncllm: the LLM inference engine that you import.

Importing this package loads neither torch nor triton; the names below load when first used.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncllm.config import EngineConfig as EngineConfig
    from asyncllm.engine.async_engine import AsyncEngine as AsyncEngine
    from asyncllm.engine.async_engine import TokenStream as TokenStream
    from asyncllm.errors import AsyncLLMError as AsyncLLMError
    from asyncllm.offline import LLM as LLM
    from asyncllm.params import RepetitionDetection as RepetitionDetection
    from asyncllm.params import SamplingParams as SamplingParams
    from asyncllm.results import Choice as Choice
    from asyncllm.results import Completion as Completion
    from asyncllm.results import Embedding as Embedding
    from asyncllm.results import FinishReason as FinishReason
    from asyncllm.results import PositionLogprobs as PositionLogprobs
    from asyncllm.results import TokenDelta as TokenDelta
    from asyncllm.results import TokenLogprob as TokenLogprob
    from asyncllm.results import Usage as Usage
    from asyncllm.structured import StructuredOutput as StructuredOutput

_HOMES = {
    "AsyncEngine": "asyncllm.engine.async_engine",
    "AsyncLLMError": "asyncllm.errors",
    "Choice": "asyncllm.results",
    "Completion": "asyncllm.results",
    "Embedding": "asyncllm.results",
    "EngineConfig": "asyncllm.config",
    "FinishReason": "asyncllm.results",
    "LLM": "asyncllm.offline",
    "PositionLogprobs": "asyncllm.results",
    "RepetitionDetection": "asyncllm.params",
    "SamplingParams": "asyncllm.params",
    "StructuredOutput": "asyncllm.structured",
    "TokenDelta": "asyncllm.results",
    "TokenLogprob": "asyncllm.results",
    "TokenStream": "asyncllm.engine.async_engine",
    "Usage": "asyncllm.results",
}
__all__ = [
    "LLM",
    "AsyncEngine",
    "AsyncLLMError",
    "Choice",
    "Completion",
    "Embedding",
    "EngineConfig",
    "FinishReason",
    "PositionLogprobs",
    "RepetitionDetection",
    "SamplingParams",
    "StructuredOutput",
    "TokenDelta",
    "TokenLogprob",
    "TokenStream",
    "Usage",
]
__version__ = "0.1.0"

logging.getLogger("asyncllm").addHandler(logging.NullHandler())


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'asyncllm' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
