"""What a caller gets back: deltas while a request runs, a completion when it is done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from asyncllm.metrics import RequestMetrics


class FinishReason(StrEnum):
    """Why a choice ended. A plain string too: `delta.finish_reason == "stop"`."""

    STOP = "stop"  # an end-of-sequence id, a stop id or a stop string
    LENGTH = "length"  # max_tokens, the context or the KV pool is used up
    ABORT = "abort"  # `engine.abort()`
    DEADLINE = "deadline"  # the request's deadline passed


REPETITION = "repetition"
"""The stop reason of a choice that `repetition_detection` has ended."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a request. `completion_tokens` sums over its choices and counts a final end-of-sequence id."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0  # prompt tokens that came from the prefix cache

    @property
    def total_tokens(self) -> int:
        """Prompt and completion together."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """How likely a token was at its position."""

    token_id: int
    logprob: float  # natural logarithm of its probability; -inf for a token that may not be there
    rank: int  # among all tokens there; 1 is the most likely, and equally likely ones share a rank
    bytes: bytes  # what the token adds to the output; maybe not a whole character
    text: str
    """The bytes as text; where they are no UTF-8 by themselves, "bytes:" and each byte as \\x..."""


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """How likely the token of one position was, and what else might have been there."""

    chosen: TokenLogprob
    top: Sequence[TokenLogprob]
    """The most likely tokens, the first first, then those of `logprob_token_ids`. A tuple, except where the whole
    vocabulary was asked for: then a sequence that makes its items when they are looked at."""


@dataclass(slots=True)
class TokenDelta:
    """What is new for one choice since its delta before. Not frozen, because one is made per token and a frozen
    dataclass takes three times as long to make; treat it as read-only.

    `text` may be empty while bytes or a possible stop string are held back; `token_ids` then still has the ids.
    The joined texts are the tokenizer's decode of the joined ids, up to a stop string.
    """

    text: str
    token_ids: tuple[int, ...]
    index: int = 0
    finish_reason: FinishReason | None = None  # set on the choice's last delta
    stop_reason: str | int | None = None  # the stop string, or the stop id, that ended the choice
    usage: Usage | None = None  # on the request's last delta
    logprobs: tuple[PositionLogprobs, ...] | None = None  # one for each of `token_ids`, where they were asked for


@dataclass(frozen=True, slots=True)
class Choice:
    """One of the n answers to a request."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    logprobs: tuple[PositionLogprobs, ...] | None = None  # one for each of `token_ids`, where they were asked for
    outcome: Any = field(default=None, repr=False, compare=False)  # see `parsed`; a ValueError where there is none

    @property
    def parsed(self) -> Any:
        """What a structured output came to: the Pydantic model, the JSON value, the text of a choice or a regex.

        None where none was asked for, or where it is not complete (it did not end by itself). Raises `ValueError`,
        Pydantic's own, where the model refuses what its schema allows.
        """
        if isinstance(self.outcome, ValueError):
            raise self.outcome
        return self.outcome


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole request, collected. The unindexed fields are those of choice 0."""

    request_id: str
    choices: tuple[Choice, ...]
    usage: Usage
    prompt_token_ids: tuple[int, ...]
    metrics: RequestMetrics
    prompt_logprobs: tuple[PositionLogprobs | None, ...] | None = None
    """One for each prompt token, None for the first, where they were asked for. Of a request that ended before its
    prompt was computed (an abort, a deadline): of the tokens that were."""

    @property
    def text(self) -> str:
        """The text of choice 0."""
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The ids of choice 0."""
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        """Why choice 0 ended."""
        return self.choices[0].finish_reason

    @property
    def stop_reason(self) -> str | int | None:
        """What ended choice 0, where a stop string or a stop id did."""
        return self.choices[0].stop_reason

    @property
    def logprobs(self) -> tuple[PositionLogprobs, ...] | None:
        """Those of choice 0."""
        return self.choices[0].logprobs

    @property
    def parsed(self) -> Any:
        """What the structured output of choice 0 came to, see `Choice.parsed`."""
        return self.choices[0].parsed


@dataclass(frozen=True, slots=True)
class Embedding:
    """The vector of one text, of length 1."""

    embedding: list[float]
    prompt_tokens: int
