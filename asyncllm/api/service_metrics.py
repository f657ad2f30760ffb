"""ServiceMetrics: what `/metrics` shows, under the names that vLLM's dashboards use.

Gauges and counters are read from the engine's statistics when somebody asks. Times are observed per request: a
`RequestObservation` is told of each delta that leaves, which costs a look at the clock and two additions.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from prometheus_client import CollectorRegistry, exposition
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from asyncllm.metrics import EngineStatistics, RequestMetrics
from asyncllm.results import FinishReason, Usage

clock = time.monotonic

RECENT = 1024
"""Times that are kept one by one, for `ServiceMetrics.recent`."""

_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_BETWEEN_TOKENS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
_WHOLE_REQUEST = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
_TOKENS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))


class _Histogram:
    """Counts of values by bucket."""

    __slots__ = ("bounds", "counts", "description", "name", "total")

    def __init__(self, name: str, description: str, bounds: Sequence[float]) -> None:
        self.name, self.description, self.bounds = name, description, bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def observe_all(self, values: Sequence[float]) -> None:
        """The same for many values, at a small part of the price."""
        numbers = np.asarray(values)
        places = np.bincount(np.searchsorted(self.bounds, numbers), minlength=len(self.counts))
        self.counts = [count + more for count, more in zip(self.counts, places.tolist(), strict=True)]
        self.total += float(numbers.sum())

    def buckets(self) -> list[tuple[str, float]]:
        """Each bound with how many values were at most that."""
        found, below = [], 0
        for bound, count in zip([*map(str, map(float, self.bounds)), "+Inf"], self.counts, strict=True):
            below += count
            found.append((bound, float(below)))
        return found


@dataclass(frozen=True, slots=True)
class RecentTimes:
    """Medians and 95th percentiles, in seconds, of the last `RECENT` times; None where there are none."""

    first_token_p50: float | None
    first_token_p95: float | None
    between_tokens_p50: float | None
    between_tokens_p95: float | None


class ServiceMetrics:
    """The metrics of one app. Used on one event loop."""

    def __init__(self, model_name: str) -> None:
        self._labels = {"model_name": model_name, "engine": "0"}
        self._finished: Counter[str] = Counter()
        self.recent_first: deque[float] = deque(maxlen=RECENT)
        self.recent_between: deque[float] = deque(maxlen=RECENT)
        self.unsettled: list[float] = []  # times between tokens, not yet among those below
        self.first_token = _Histogram("time_to_first_token_seconds", "From arrival to the first token.", _FIRST_TOKEN)
        self.between_tokens = _Histogram(
            "inter_token_latency_seconds", "Between one token of a request and the next.", _BETWEEN_TOKENS
        )
        self._mean_between = _Histogram(
            "request_time_per_output_token_seconds", "Mean time between a request's tokens.", _BETWEEN_TOKENS
        )
        self._whole = _Histogram("e2e_request_latency_seconds", "From arrival to the end.", _WHOLE_REQUEST)
        self._queued = _Histogram("request_queue_time_seconds", "From the queue to the first step.", _WHOLE_REQUEST)
        self._prefill = _Histogram("request_prefill_time_seconds", "From first step to first token.", _WHOLE_REQUEST)
        self._decode = _Histogram("request_decode_time_seconds", "From first token to last token.", _WHOLE_REQUEST)
        self._prompt = _Histogram("request_prompt_tokens", "Tokens of a prompt.", _TOKENS)
        self._generated = _Histogram("request_generation_tokens", "Tokens of an answer.", _TOKENS)

    def request(self) -> RequestObservation:
        """A request has arrived."""
        return RequestObservation(self)

    def settle(self) -> None:
        """Count what was only noted down: a token that leaves has no time for it."""
        self.between_tokens.observe_all(self.unsettled)
        self.recent_between.extend(self.unsettled)
        self.unsettled.clear()

    def recent(self) -> RecentTimes:
        """How it went lately."""
        self.settle()
        return RecentTimes(
            _percentile(self.recent_first, 0.5),
            _percentile(self.recent_first, 0.95),
            _percentile(self.recent_between, 0.5),
            _percentile(self.recent_between, 0.95),
        )

    def render(self, statistics: EngineStatistics, accept: str = "") -> tuple[bytes, str]:
        """The answer to a scrape, and its content type: OpenMetrics for who accepts that, else Prometheus' text."""
        self.settle()
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Snapshot(lambda: self._families(statistics)))
        encode, content_type = exposition.choose_encoder(accept)
        return encode(registry), content_type

    def finish(
        self, started: float, metrics: RequestMetrics | None, usage: Usage | None, reason: FinishReason | str
    ) -> None:
        """See `RequestObservation.end`."""
        self._finished[str(reason)] += 1
        now = clock()
        self._whole.observe(now - started)
        if usage is not None:
            self._prompt.observe(usage.prompt_tokens)
            self._generated.observe(usage.completion_tokens)
        if metrics is None or metrics.queued is None or metrics.scheduled is None:
            return
        self._queued.observe(metrics.scheduled - metrics.queued)
        if metrics.first_token is None:
            return
        self._prefill.observe(metrics.first_token - metrics.scheduled)
        if metrics.last_token is not None:
            self._decode.observe(metrics.last_token - metrics.first_token)
            if usage is not None and usage.completion_tokens > 1:
                mean = (metrics.last_token - metrics.first_token) / (usage.completion_tokens - 1)
                self._mean_between.observe(mean)

    def _families(self, statistics: EngineStatistics) -> Iterator[Metric]:
        s = statistics
        used = s.blocks_used / s.blocks_total if s.blocks_total else 0.0
        yield self._gauge("num_requests_running", "Requests that have a row in the steps.", s.requests_running)
        yield self._gauge("num_requests_waiting", "Requests that wait for a row or blocks.", s.requests_waiting)
        yield self._gauge("kv_cache_usage_perc", "Share of the KV cache's blocks that requests hold, 0 to 1.", used)
        yield self._counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", s.prompt_tokens)
        yield self._counter("prefix_cache_hits", "Prompt tokens found there.", s.prompt_tokens_cached)
        yield self._counter("num_preemptions", "Requests put back into the queue.", s.preemptions)
        yield self._counter("engine_restarts", "Engine processes that took the place of one that died.", s.restarts)
        yield self._counter("prompt_tokens", "Prompt tokens of scheduled requests.", s.prompt_tokens)
        yield self._counter("generation_tokens", "Tokens delivered.", s.tokens_generated)
        yield self._counter("aborted_requests", "Requests that were aborted.", s.requests_aborted)
        memory = GaugeMetricFamily("vllm:memory_bytes", "Device memory by kind.", labels=[*self._labels, "kind"])
        for kind, size in sorted(s.memory_bytes.items()):
            memory.add_metric([*self._labels.values(), kind], size)
        yield memory
        ended = CounterMetricFamily(
            "vllm:request_success", "Requests that ended.", labels=[*self._labels, "finished_reason"]
        )
        for reason, count in sorted(self._finished.items()):
            ended.add_metric([*self._labels.values(), reason], count)
        yield ended
        for histogram in (
            self.first_token, self.between_tokens, self._mean_between, self._whole, self._queued, self._prefill,
            self._decode, self._prompt, self._generated,
        ):  # fmt: skip
            family = HistogramMetricFamily(f"vllm:{histogram.name}", histogram.description, labels=[*self._labels])
            family.add_metric([*self._labels.values()], histogram.buckets(), histogram.total)
            yield family

    def _gauge(self, name: str, description: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"vllm:{name}", description, labels=[*self._labels])
        family.add_metric([*self._labels.values()], value)
        return family

    def _counter(self, name: str, description: str, value: float) -> Metric:
        family = CounterMetricFamily(f"vllm:{name}", description, labels=[*self._labels])
        family.add_metric([*self._labels.values()], value)
        return family


class RequestObservation:
    """Watches one choice of a request leave."""

    __slots__ = ("_last", "_metrics", "_started", "_unsettled")

    def __init__(self, metrics: ServiceMetrics) -> None:
        self._metrics = metrics
        self._unsettled = metrics.unsettled
        self._started = clock()
        self._last: float | None = None

    def tokens(self, count: int) -> None:
        """So many tokens leave together."""
        last, now = self._last, clock()
        if count == 1 and last is not None:  # what nearly all are
            self._last = now
            self._unsettled.append(now - last)
            if len(self._unsettled) > RECENT:
                self._metrics.settle()
        elif count:
            self._last = now
            self._first_or_several(count, last, now)

    def _first_or_several(self, count: int, last: float | None, now: float) -> None:
        metrics = self._metrics
        if last is None:
            metrics.first_token.observe(now - self._started)
            metrics.recent_first.append(now - self._started)
            count -= 1
            last = now
        if count:
            between = (now - last) / count
            metrics.between_tokens.observe(between, count)
            metrics.recent_between.append(between)

    def end(self, metrics: RequestMetrics | None, usage: Usage | None, reason: FinishReason | str) -> None:
        """The request has ended, or failed (`reason` "error"), with what is known of it."""
        self._metrics.finish(self._started, metrics, usage, reason)


class _Snapshot(Collector):
    """What a registry collects from."""

    def __init__(self, families: Callable[[], Iterable[Metric]]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families()


def _percentile(times: Iterable[float], share: float) -> float | None:
    ordered = sorted(times)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else None
