"""Frozen snapshots of what the engine measured. Times are seconds of `time.monotonic()`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """When one request reached each stage; None for a stage it never reached."""

    arrival: float  # stream() was called
    queued: float | None = None  # tokenised, validated and handed to the scheduler
    scheduled: float | None = None  # first planned into a step
    first_token: float | None = None
    last_token: float | None = None  # the end of a request that has tokens, whichever way it ended
    preemptions: int = 0

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first token."""
        return None if self.first_token is None else self.first_token - self.arrival


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Totals over all steps since start; divide by `steps` for a mean."""

    steps: int = 0
    schedule_seconds: float = 0.0
    launch_seconds: float = 0.0
    wait_seconds: float = 0.0  # the engine thread had nothing to do until the device answered
    apply_seconds: float = 0.0
    deliver_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """`engine.statistics()`. Invariant: blocks_used + blocks_cached + blocks_free == blocks_total; idle means
    blocks_used == 0."""

    requests_running: int = 0
    requests_waiting: int = 0
    rows_used: int = 0
    blocks_total: int = 0
    blocks_used: int = 0  # held by requests
    blocks_cached: int = 0  # free, but reusable by a request with the same prefix
    blocks_free: int = 0
    prompt_tokens: int = 0  # of requests that were scheduled, cached ones included
    prompt_tokens_cached: int = 0
    tokens_generated: int = 0  # delivered to consumers
    tokens_computed: int = 0  # positions that went through the model
    requests_finished: int = 0
    requests_aborted: int = 0
    preemptions: int = 0
    restarts: int = 0  # processes of `isolation="process"` that took the place of one that had died
    memory_bytes: Mapping[str, int] = field(default_factory=dict)  # by kind: weights, cache, …
    step_times: StepTimes = field(default_factory=StepTimes)

    @property
    def prefix_hit_rate(self) -> float:
        """Share of prompt tokens that came from the prefix cache; 0 before the first request."""
        return self.prompt_tokens_cached / self.prompt_tokens if self.prompt_tokens else 0.0


class EngineState(StrEnum):
    """Where an engine stands in its life."""

    NEW = "new"  # not started yet, or its start has failed
    LOADING = "loading"
    RUNNING = "running"
    DEAD = "dead"  # a fault that it cannot survive
    CLOSED = "closed"  # it takes no more requests


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDescription:
    """`engine.describe()`: what an engine serves, and how much of it at once."""

    name: str  # as the engine was given it
    max_model_len: int  # tokens of a request, prompt and output together
    vocab_size: int
    max_num_seqs: int  # choices that run at once
    block_size: int  # tokens
    num_blocks: int
    dtype: str
    device: str
    has_tokenizer: bool
    chat_template: str | None  # its Jinja source
    tool_template: str | None  # of the one that serves requests with tools; mostly the same

    @property
    def cache_tokens(self) -> int:
        """Tokens that the KV cache holds."""
        return self.block_size * self.num_blocks


class BlockState(IntEnum):
    """What a block of the KV cache is."""

    FREE = 0
    CACHED = 1  # held by no request, but reusable by one with the same prefix
    USED = 2  # held by one request
    SHARED = 3  # held by several, which have the same prefix


@dataclass(frozen=True, slots=True)
class RequestView:
    """A live request, as `engine.inspect()` sees it."""

    number: int  # in order of arrival
    stage: str  # "preparing", "queued", "running" or "done": its blocks are about to be freed
    age: float  # seconds since it arrived
    prompt_tokens: int  # 0 until it is tokenised
    generated_tokens: int


@dataclass(frozen=True, slots=True)
class Inspection:
    """`engine.inspect()`: what the engine holds, one by one; put together only when somebody asks."""

    blocks: bytes  # the `BlockState` of each block
    requests: tuple[RequestView, ...]  # the oldest ones
