"""What the two processes say to each other. Objects of the host's travel inside, as bytes of their own: where one
cannot be read, its request fails and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from asyncllm.config import EngineConfig
from asyncllm.engine.isolation.travel import ErrorReport
from asyncllm.engine.mailbox import ChoiceEnd, Ending, Stage
from asyncllm.engine.plan import Int32Array, TokenScores
from asyncllm.metrics import EngineStatistics, ModelDescription

# --- to the child ---


@dataclass(frozen=True, slots=True)
class Begin:
    """The first message."""

    name: str  # of the model, as the engine was given it
    load: bytes  # its ModelLoader, packed
    config: EngineConfig
    log_level: int


@dataclass(frozen=True, slots=True)
class Open:
    """A request; see `CoreAccess.open`."""

    number: int  # the host's, never used again
    request_id: str
    choices: int
    aborted: bool  # before it was submitted
    submission: bytes  # a Submission, packed


@dataclass(frozen=True, slots=True)
class Abandon:
    """Nobody reads this request any more."""

    number: int


@dataclass(frozen=True, slots=True)
class Abort:
    """End the live request of this name."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Ask:
    """A question beside the requests."""

    number: int
    method: Literal["text", "embed", "inspect"]  # of `CoreAccess`
    argument: bytes  # packed


@dataclass(frozen=True, slots=True)
class Close:
    """See `EngineHome.stop`."""

    drain: float


@dataclass(frozen=True, slots=True)
class HookReturned:
    """What came of a call of the host's function."""

    call: int
    value: Any = None
    error: ErrorReport | None = None


# --- to the host ---


@dataclass(frozen=True, slots=True)
class Started:
    """The model is loaded."""

    description: ModelDescription
    statistics: EngineStatistics


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """It is not."""

    error: ErrorReport


@dataclass(frozen=True, slots=True)
class Opened:
    """What is known of a request once it is prepared."""

    prompt: Int32Array
    scored: bool  # its tokens come with log-probabilities
    prompt_scored: bool  # its prompt's do
    accepted: bool  # as in `Mailbox`


@dataclass(frozen=True, slots=True)
class NewOfChoice:
    """What a choice has come to since the last message."""

    index: int
    token_ids: Sequence[int]
    texts: Sequence[str]  # one for each of them; none without a tokenizer
    scores: Sequence[TokenScores] | None
    tail: str  # what was held back, once no more will come
    end: ChoiceEnd | None


@dataclass(frozen=True, slots=True)
class NewOfRequest:
    """What is new of a request, in the order in which it is to be put into its mailbox."""

    number: int
    opened: Opened | None
    prompt_scores: Sequence[TokenScores]
    choices: Sequence[NewOfChoice]
    ending: Ending | None
    failure: ErrorReport | None
    stage: Stage
    released: bool


@dataclass(slots=True)
class News:
    """All that a turn of the core has brought. The first three are of requests with one choice that have one new token,
    and nothing else: most of them, in most steps."""

    numbers: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    texts: list[str | None] = field(default_factory=list)
    requests: list[NewOfRequest] = field(default_factory=list)
    hooks_over: list[int] = field(default_factory=list)  # requests whose functions were called for the last time
    token_bytes: dict[int, bytes] = field(default_factory=dict)  # of ids with a log-probability, each told once
    statistics: EngineStatistics | None = None


@dataclass(frozen=True, slots=True)
class Refused:
    """A request could not be read."""

    number: int
    error: ErrorReport


@dataclass(frozen=True, slots=True)
class Answer:
    """To an `Ask`."""

    number: int
    value: Any = None
    error: ErrorReport | None = None


@dataclass(frozen=True, slots=True)
class CallHook:
    """Call a function of the request's."""

    call: int
    number: int
    place: int | None  # among its logits_processors; None: its on_token
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class CancelHook:
    """Nobody waits for that call any more."""

    call: int


@dataclass(frozen=True, slots=True)
class Logged:
    """A record of the package's logger."""

    logger: str
    level: int
    text: str


@dataclass(frozen=True, slots=True)
class Died:
    """The core cannot go on; the process ends."""

    error: ErrorReport


@dataclass(frozen=True, slots=True)
class Closed:
    """All is told and given back."""
