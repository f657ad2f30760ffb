"""What an engine tells of itself, put together from its parts."""

from __future__ import annotations

from collections.abc import Mapping

from asyncllm.engine.live_requests import LiveRequests
from asyncllm.engine.scheduling.reports import SchedulerCounts
from asyncllm.metrics import EngineStatistics, StepTimes


def engine_statistics(
    counts: SchedulerCounts,
    live: LiveRequests,
    *,
    tokens_generated: int,
    memory_bytes: Mapping[str, int],
    step_times: StepTimes,
) -> EngineStatistics:
    """A snapshot."""
    return EngineStatistics(
        requests_running=counts.running,
        requests_waiting=counts.waiting,
        rows_used=counts.rows_used,
        blocks_total=counts.blocks_total,
        blocks_used=counts.blocks_used,
        blocks_cached=counts.blocks_cached,
        blocks_free=counts.blocks_free,
        prompt_tokens=counts.prompt_tokens,
        prompt_tokens_cached=counts.prompt_tokens_cached,
        tokens_generated=tokens_generated,
        tokens_computed=counts.tokens_computed,
        requests_finished=live.finished,
        requests_aborted=live.aborted,
        preemptions=counts.preemptions,
        memory_bytes=dict(memory_bytes),
        step_times=step_times,
    )
