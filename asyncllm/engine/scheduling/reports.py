"""What the scheduler tells the core."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from asyncllm.engine.plan import Float32Array, TokenScores
from asyncllm.results import FinishReason


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Log-probabilities of a request's prompt tokens, at the positions `start` and on."""

    request: int
    start: int
    scores: TokenScores


@dataclass(frozen=True, slots=True)
class KeptLogits:
    """The logits that are kept for a late request, of the token after its first `position` ones."""

    request: int
    position: int
    values: Float32Array  # [vocabulary]


@dataclass(frozen=True, slots=True)
class StepTokens:
    """The tokens of an applied step, surplus ones dropped: `token_ids[i]` is the next token of `requests[i]`."""

    step: int
    requests: Sequence[int]  # the same object again while the same rows are steady
    token_ids: Sequence[int]
    scores: Sequence[tuple[int, TokenScores]] = ()  # (request, of its token) of those that ask
    prompts: Sequence[PromptScores] = ()
    logits: Sequence[KeptLogits] = ()  # of those that read them
    unsampled: Sequence[int] = ()  # they have ended, for there was no token to sample; `take_ended` does not tell of it


class Ended(NamedTuple):
    """How a request ended."""

    request: int
    reason: FinishReason
    stop_token_id: int | None  # the stop id that ended it
    cached_tokens: int  # of the prompt, taken from the prefix index when it was first scheduled
    preemptions: int
    first_scheduled: float | None  # the `now` of the plan that it first had a part in


@dataclass(frozen=True, slots=True)
class SchedulerCounts:
    """A snapshot. blocks_used + blocks_cached + blocks_free == blocks_total; idle means blocks_used == 0."""

    running: int  # admitted, live
    waiting: int
    rows_used: int
    blocks_total: int
    blocks_used: int
    blocks_cached: int
    blocks_free: int
    steps_in_flight: int
    prompt_tokens: int  # of requests that were scheduled, cached ones included
    prompt_tokens_cached: int
    tokens_generated: int
    tokens_computed: int  # positions planned
    preemptions: int
