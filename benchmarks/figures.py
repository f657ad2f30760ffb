"""What a comparison found, as plain data that goes to JSON and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from asyncllm.workloads import Measurement, percentile

PERCENTS = (0, 1, 5, 10, 25, 50, 75, 90, 95, 99, 100)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One workload on one engine. Times in seconds; percentiles are those of `PERCENTS`, in order."""

    workload: str
    seconds: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    first_token: list[float]
    gap: list[float]

    @classmethod
    def of(cls, measurement: Measurement) -> Figures:
        """What is kept of a measurement."""
        return cls(
            workload=measurement.workload,
            seconds=measurement.seconds,
            prompt_tokens=measurement.prompt_tokens,
            cached_tokens=measurement.cached_tokens,
            output_tokens=measurement.output_tokens,
            first_token=_percentiles(measurement.first_token_seconds),
            gap=_percentiles(measurement.gap_seconds),
        )

    @property
    def output_rate(self) -> float:
        """Output tokens a second."""
        return self.output_tokens / self.seconds

    @property
    def input_rate(self) -> float:
        """Prompt tokens a second, cached ones included."""
        return self.prompt_tokens / self.seconds


def _percentiles(values: Sequence[float]) -> list[float]:
    return [percentile(values, percent) for percent in PERCENTS]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A greedy request and what came of it, for the check against the float32 reference."""

    prompt: list[int]
    output: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRun:
    """One engine on all workloads. Of several passes, `figures` has the one with the median rate."""

    engine: str
    description: str
    start_seconds: float  # from exec to the first token
    figures: list[Figures]
    samples: list[Sample]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """An engine's tokens, teacher-forced through the float32 reference."""

    engine: str
    tokens: int
    equal: int  # tokens that are the reference's argmax
    worst: float  # the most by which a token's logit lies under the reference's largest
    bound: float

    @property
    def passed(self) -> bool:
        """Every token lies within the bound."""
        return self.worst <= self.bound


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductRate:
    """The matrix products of a model by themselves: those of all layers, in bfloat16."""

    rows: int
    seconds: float  # through `torch.nn.functional.linear`
    blocked_seconds: float | None = None  # through oneDNN's own order of weights, where it has one
    own_seconds: float | None = None  # of layers and head, in the forms that asyncllm chose for the model's own weights

    @property
    def rate(self) -> float:
        """Rows a second: what a prompt's tokens could be computed at, if products were all."""
        return self.rows / self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A whole run of the harness."""

    command: str
    date: str
    environment: dict[str, str]
    model: str
    profile: str
    passes: int
    runs: list[PeerRun]
    checks: list[Check] = field(default_factory=list)
    products: list[ProductRate] = field(default_factory=list)  # measured on a CPU, by rising number of rows
