"""Statistics over the lives of several children."""

from __future__ import annotations

from dataclasses import fields, replace

from asyncllm.metrics import EngineStatistics, StepTimes

_TOTALS = (
    "prompt_tokens",
    "prompt_tokens_cached",
    "tokens_generated",
    "tokens_computed",
    "requests_finished",
    "requests_aborted",
    "preemptions",
    "restarts",
)


def continued(before: EngineStatistics, now: EngineStatistics) -> EngineStatistics:
    """What is `now`, with totals that go on from those `before`."""
    sums = {name: getattr(before, name) + getattr(now, name) for name in _TOTALS}
    times = [getattr(before.step_times, f.name) + getattr(now.step_times, f.name) for f in fields(StepTimes)]
    return replace(now, **sums, step_times=StepTimes(*times))


def without_requests(statistics: EngineStatistics) -> EngineStatistics:
    """The same of an engine that holds nothing any more."""
    return replace(
        statistics,
        requests_running=0,
        requests_waiting=0,
        rows_used=0,
        blocks_used=0,
        blocks_cached=0,
        blocks_free=statistics.blocks_total,
    )
