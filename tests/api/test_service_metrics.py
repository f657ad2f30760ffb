from __future__ import annotations

from time import perf_counter

import pytest
from prometheus_client.parser import text_string_to_metric_families

from asyncllm.api import service_metrics
from asyncllm.api.service_metrics import ServiceMetrics
from asyncllm.metrics import EngineStatistics, RequestMetrics
from asyncllm.results import FinishReason, Usage

STATISTICS = EngineStatistics(
    requests_running=3, requests_waiting=2, blocks_total=40, blocks_used=10, blocks_cached=5, blocks_free=25,
    prompt_tokens=100, prompt_tokens_cached=25, tokens_generated=77, preemptions=4, restarts=2,
    memory_bytes={"cache": 9, "weights": 8},
)  # fmt: skip


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(service_metrics, "clock", made)
    return made


def samples(metrics: ServiceMetrics) -> dict[tuple[str, str], float]:
    """By name and the last label that is not the model's."""
    body, content_type = metrics.render(STATISTICS)
    assert content_type.startswith("text/plain")
    found = {}
    for family in text_string_to_metric_families(body.decode()):
        assert family.documentation
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name") == "m"
            assert labels.pop("engine") == "0"
            found[(sample.name.removeprefix("vllm:"), *labels.values(), "")[:2]] = sample.value
    return found


def test_the_engines_statistics() -> None:
    found = samples(ServiceMetrics("m"))
    expected = {
        "num_requests_running": 3, "num_requests_waiting": 2, "kv_cache_usage_perc": 0.25,
        "prefix_cache_queries_total": 100, "prefix_cache_hits_total": 25, "num_preemptions_total": 4,
        "prompt_tokens_total": 100, "generation_tokens_total": 77, "engine_restarts_total": 2,
    }  # fmt: skip
    assert {name: found[name, ""] for name in expected} == expected
    assert (found["memory_bytes", "cache"], found["memory_bytes", "weights"]) == (9, 8)
    assert found["time_to_first_token_seconds_count", ""] == 0


def test_the_times_of_requests(clock: Clock) -> None:
    metrics = ServiceMetrics("m")
    request = metrics.request()
    clock.now += 0.07
    request.tokens(0)
    request.tokens(1)
    clock.now += 0.012
    request.tokens(1)
    clock.now += 0.06
    request.tokens(3)  # came together: 20 ms each
    request.end(RequestMetrics(100.0, 100.01, 100.03, 100.06, 100.16), Usage(7, 5), FinishReason.STOP)
    metrics.request().end(None, None, "error")
    metrics.request().end(RequestMetrics(100.0), Usage(7, 0), FinishReason.ABORT)  # before it was scheduled
    found = samples(metrics)
    assert found["time_to_first_token_seconds_bucket", "0.06"] == 0
    assert found["time_to_first_token_seconds_bucket", "0.08"] == 1
    assert found["time_to_first_token_seconds_sum", ""] == pytest.approx(0.07)
    assert found["inter_token_latency_seconds_bucket", "0.01"] == 0
    assert found["inter_token_latency_seconds_bucket", "0.025"] == 4
    assert found["inter_token_latency_seconds_bucket", "+Inf"] == found["inter_token_latency_seconds_count", ""] == 4
    assert found["inter_token_latency_seconds_sum", ""] == pytest.approx(0.072)
    assert found["request_queue_time_seconds_sum", ""] == pytest.approx(0.02)
    assert found["request_prefill_time_seconds_sum", ""] == pytest.approx(0.03)
    assert found["request_decode_time_seconds_sum", ""] == pytest.approx(0.1)
    assert found["request_time_per_output_token_seconds_sum", ""] == pytest.approx(0.025)
    assert found["e2e_request_latency_seconds_count", ""] == 3
    assert (found["request_prompt_tokens_sum", ""], found["request_generation_tokens_sum", ""]) == (14, 5)
    assert {reason: found["request_success_total", reason] for reason in ("stop", "error", "abort")} == {
        "stop": 1, "error": 1, "abort": 1,
    }  # fmt: skip
    recent = metrics.recent()
    assert (recent.first_token_p50, recent.first_token_p95) == (pytest.approx(0.07), pytest.approx(0.07))
    assert (recent.between_tokens_p50, recent.between_tokens_p95) == (pytest.approx(0.02), pytest.approx(0.02))


def test_open_metrics_for_who_accepts_them() -> None:
    body, content_type = ServiceMetrics("m").render(STATISTICS, "application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    assert body.endswith(b"# EOF\n")


def test_nothing_recent() -> None:
    recent = ServiceMetrics("m").recent()
    assert (recent.first_token_p50, recent.between_tokens_p95) == (None, None)


def test_a_token_costs_little() -> None:
    """Under 2 µs where it was measured (0.8 µs), here with room for a busy machine: many times an addition."""
    request = ServiceMetrics("m").request()
    request.tokens(1)

    def seconds(of: int) -> float:
        start = perf_counter()
        for _ in range(of):
            request.tokens(1)
        return perf_counter() - start

    assert min(seconds(2000) for _ in range(5)) / 2000 < 20e-6
