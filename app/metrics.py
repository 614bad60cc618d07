"""What `/metrics` shows: Prometheus counters, gauges and histograms, each with the label `model`.

`Metrics` owns its registry, so several daemons in one process (tests) stay apart.  Engine
counters start at 0 with every worker; `observe_engine` adds only what is new, so the
exported ones never fall.  `RequestClock` times one request for the histograms.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

from engine.api.wire import EngineStats

_TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_INTER_TOKEN_BUCKETS_S = (0.002, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_LATENCY_BUCKETS_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)

_ENGINE_COUNTERS = {
    "prompt_tokens": ("Prompt tokens computed or found in the prefix cache.", "prompt_tokens_total"),
    "generation_tokens": ("Tokens generated.", "generation_tokens_total"),
    "prefix_cache_queries": ("Prompt tokens looked up in the prefix cache.", "prefix_query_tokens_total"),
    "prefix_cache_hits": ("Prompt tokens found in the prefix cache.", "prefix_hit_tokens_total"),
    "num_preemptions": ("Sequences preempted for lack of blocks.", "preemptions_total"),
}
_ENGINE_GAUGES: dict[str, tuple[str, Callable[[EngineStats], float]]] = {
    "num_requests_running": ("Sequences that hold blocks.", lambda stats: stats.num_running),
    "num_requests_waiting": ("Sequences waiting for blocks.", lambda stats: stats.num_waiting),
    "kv_cache_usage_perc": ("Share of KV blocks in use, 0 to 1.", lambda stats: kv_usage(stats)),
}


def kv_usage(stats: EngineStats) -> float:
    """The share of KV blocks in use, 0 to 1."""
    return 1.0 - stats.num_free_blocks / stats.num_blocks if stats.num_blocks else 0.0


class Metrics:
    """All instruments of one daemon."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._counters = {
            name: Counter(f"quire_{name}", text, ["model"], registry=self._registry)
            for name, (text, _) in _ENGINE_COUNTERS.items()
        }
        self._gauges = {
            name: Gauge(f"quire_{name}", text, ["model"], registry=self._registry)
            for name, (text, _) in _ENGINE_GAUGES.items()
        }
        self._finished = Counter(
            "quire_request_success",
            "Choices finished, by reason.",
            ["model", "finished_reason"],
            registry=self._registry,
        )
        self._failed = Counter(
            "quire_request_failure", "Requests ended by an error or a client that left.", ["model", "reason"],
            registry=self._registry,
        )  # fmt: skip
        self._ttft = self._histogram("time_to_first_token_seconds", "Arrival to first token.", _TTFT_BUCKETS_S)
        self._inter_token = InterTokenLatency()
        self._registry.register(self._inter_token)
        self._latency = self._histogram("e2e_request_latency_seconds", "Arrival to last token.", _LATENCY_BUCKETS_S)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"quire_{name}", text, ["model"], buckets=buckets, registry=self._registry)

    def observe_engine(self, model: str, previous: EngineStats, current: EngineStats) -> None:
        """Add what a worker did between two of its reports, and show its gauges."""
        for name, (_, field) in _ENGINE_COUNTERS.items():
            self._counters[name].labels(model).inc(getattr(current, field) - getattr(previous, field))
        for name, (_, read) in _ENGINE_GAUGES.items():
            self._gauges[name].labels(model).set(read(current))

    def forget_engine(self, model: str) -> None:
        """Drop the gauges of a model that is no longer resident; its counters stay."""
        for gauge in self._gauges.values():
            gauge.remove(model)

    def start_request(self, model: str) -> RequestClock:
        return RequestClock(
            observe_first=self._ttft.labels(model).observe,
            observe_next=self._inter_token.of_model(model).observe,
            observe_end=self._latency.labels(model).observe,
            count_finished=lambda reason: self._finished.labels(model, reason).inc(),
            count_failed=lambda reason: self._failed.labels(model, reason).inc(),
        )

    def render(self) -> bytes:
        """The Prometheus text format."""
        return generate_latest(self._registry)


class GapCounts:
    """The times between tokens of one model, in seconds."""

    def __init__(self) -> None:
        self.counts = [0] * (len(_INTER_TOKEN_BUCKETS_S) + 1)
        self.sum_s = 0.0

    def observe(self, gap_s: float, count: int) -> None:
        self.counts[bisect_left(_INTER_TOKEN_BUCKETS_S, gap_s)] += count
        self.sum_s += gap_s * count


class InterTokenLatency(Collector):
    """A histogram that takes many tokens at once and costs a third of the library's: every token passes here."""

    def __init__(self) -> None:
        self._gaps: dict[str, GapCounts] = {}

    def of_model(self, model: str) -> GapCounts:
        return self._gaps.setdefault(model, GapCounts())

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(
            "quire_inter_token_latency_seconds", "Time between tokens of one choice.", labels=["model"]
        )
        bounds = [*map(str, _INTER_TOKEN_BUCKETS_S), "+Inf"]
        for model, gaps in self._gaps.items():
            family.add_metric([model], list(zip(bounds, accumulate(gaps.counts), strict=True)), gaps.sum_s)
        yield family


class RequestClock:
    """Times of one request: first token, gaps between tokens per sequence, end."""

    def __init__(
        self,
        *,
        observe_first: Callable[[float], None],
        observe_next: Callable[[float, int], None],
        observe_end: Callable[[float], None],
        count_finished: Callable[[str], None],
        count_failed: Callable[[str], None],
    ) -> None:
        self._observe_first = observe_first
        self._observe_next = observe_next
        self._observe_end = observe_end
        self._count_finished = count_finished
        self._count_failed = count_failed
        self._arrived_at = time.perf_counter()
        self._last_token_at: dict[int, float] = {}

    def tokens(self, sequence_id: int, count: int = 1) -> None:
        """So many tokens of this sequence have come, from one engine step or from several taken together."""
        now = time.perf_counter()
        last = self._last_token_at.get(sequence_id)
        if last is not None:
            self._observe_next((now - last) / count, count)
        elif not self._last_token_at:
            self._observe_first(now - self._arrived_at)
        self._last_token_at[sequence_id] = now

    def choice_finished(self, reason: str) -> None:
        self._count_finished(reason)

    def finished(self) -> None:
        self._observe_end(time.perf_counter() - self._arrived_at)

    def failed(self, reason: str) -> None:
        self._count_failed(reason)
