"""A request as the scheduler sees it: what was asked for, and how far it has come."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum, auto

import numpy as np

from asyncllm.engine.plan import Adjustment, Int32Array, RowJoin, RowSampling

Order = tuple[int, float, float, int]
"""Sorts requests, the most important first."""


@dataclass(slots=True)
class RequestSpec:
    """What the core hands to the scheduler; to be read only, and not frozen because one is made for each request. Times
    are seconds of the clock that `schedule(now)` is given.

    Raises ValueError for an empty or misshapen prompt, and where there is nothing to generate.
    """

    request: int  # internal id, never reused
    token_ids: Int32Array  # [n] the prompt, n >= 1
    sampling: RowSampling
    max_tokens: int  # >= 1; the context and the pool may end the request before
    min_tokens: int  # a stop id ends the request only after this many tokens that are not one
    stop_token_ids: frozenset[int]
    arrival: float
    priority: int = 0  # lower is more important
    deadline: float | None = None
    cache_salt: str | None = None  # requests share cached prefixes only with requests of the same salt
    fork_of: int | None = None  # a further choice of this request: its prompt, salt and order, and otherwise its own

    def __post_init__(self) -> None:
        if self.token_ids.dtype != np.int32 or self.token_ids.ndim != 1 or not len(self.token_ids):
            raise ValueError(f"token_ids must be an int32 array of at least one id, got {self.token_ids!r}")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")

    def order(self, ageing_seconds: float) -> Order:
        """The place among all requests: priority, then deadline, then arrival.

        Having waited `ageing_seconds` longer is worth one level of priority. The comparison of two requests is
        the same at any time (both wait equally long from now on), so this is a constant: a later arrival starts
        with a higher number instead of an earlier one's falling. Whole levels, so that a deadline still decides
        between requests that arrived at about the same time.
        """
        level = self.priority + math.floor(self.arrival / ageing_seconds)
        return (level, math.inf if self.deadline is None else self.deadline, self.arrival, self.request)


class Phase(Enum):
    """Where a request stands. Only RUNNING has a row; ENDED and PREEMPTED may still hold blocks."""

    FOLLOWING = auto()  # waits for the prompt of the request whose further choice it is; holds nothing
    WAITING = auto()  # in the queue, holds nothing
    RUNNING = auto()
    LAST = auto()  # its last step is planned: nothing to do but to await the token
    PREEMPTED = auto()  # goes back to the queue once its launched steps are applied
    ENDED = auto()


class Request:
    """The scheduler's state of one request.

    *Known* tokens are the prompt and the tokens whose ids have reached the host. How many positions are planned
    is kept in the row table while the request has a row.
    """

    __slots__ = (
        "adjustment",
        "cached_tokens",
        "caught_up",
        "coming",
        "computed",
        "first_scheduled",
        "followers",
        "forked_at",
        "given_back",
        "hashes",
        "id",
        "last_step",
        "late",
        "limit",
        "order",
        "output",
        "phase",
        "preemptions",
        "prompt_tokens",
        "remembered",
        "row",
        "spec",
        "tables",
    )

    def __init__(self, spec: RequestSpec, order: Order, limit: int, num_groups: int) -> None:
        self.spec = spec
        self.id = spec.request
        self.prompt_tokens = len(spec.token_ids)
        self.late = spec.sampling.late
        self.order = order
        self.limit = limit  # prompt and output together never pass this
        self.output: list[int] = []
        self.phase = Phase.WAITING
        self.row: int | None = None
        self.last_step = -1  # the last planned step it has a part in; not kept up while the row is steady
        self.computed = 0  # positions of applied chunks
        self.caught_up = False  # a step that sampled for it was applied since it joined its row; never of a late one
        self.adjustment: Adjustment | None = None  # late: the host's word about the next token
        self.forked_at = 0  # the position at which it took a row, where it was forked
        self.followers: list[Request] = []  # further choices, until its prompt is computed
        self.coming = False  # late: its next token is sampled in a launched step
        self.tables: list[list[int]] = [[] for _ in range(num_groups)]  # blocks; all of one length
        self.given_back = [0] * num_groups  # table entries before this index fell out of the group's window
        self.hashes: list[bytes] = []  # of its leading full blocks, as far as they were needed
        self.remembered = 0  # leading blocks that were offered to the prefix index
        self.cached_tokens = 0
        self.preemptions = 0
        self.first_scheduled: float | None = None

    @property
    def known(self) -> int:
        """How many tokens the host knows."""
        return self.prompt_tokens + len(self.output)

    @property
    def applied(self) -> int:
        """Positions that applied steps have computed: no launched or later step writes before this one."""
        return self.known - 1 if self.caught_up else self.computed

    @property
    def reuses_prefix(self) -> bool:
        """Whether cached positions may stand for computed ones: not where each position's logits are asked for."""
        return self.spec.sampling.prompt_logprobs is None

    def join(self, row: int) -> RowJoin:
        """How the request takes a row."""
        spec = self.spec
        history = self.tokens(0, self.known) if spec.sampling.needs_history else None
        return RowJoin(row, self.id, spec.sampling, len(spec.token_ids), history)

    def tokens(self, start: int, end: int) -> Int32Array:
        """A copy of the known token ids from position `start` to before `end`."""
        prompt = self.spec.token_ids
        if end <= len(prompt):
            return prompt[start:end].copy()
        output = np.array(self.output[max(start - len(prompt), 0) : end - len(prompt)], dtype=np.int32)
        return np.concatenate((prompt[start:], output)) if start < len(prompt) else output
