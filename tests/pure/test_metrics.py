"""Metrics and the throughput line."""

from __future__ import annotations

import pytest

from app.metrics import Metrics
from app.throughput_log import throughput_line
from engine.api.wire import EngineStats


def sample(metrics: Metrics, start: str) -> list[str]:
    return [line for line in metrics.render().decode().splitlines() if line.startswith(start)]


def test_counters_go_on_when_a_worker_starts_over() -> None:
    metrics = Metrics()

    metrics.observe_engine("m", EngineStats(), EngineStats(generation_tokens_total=5))
    metrics.observe_engine("m", EngineStats(), EngineStats(generation_tokens_total=3))

    assert sample(metrics, "quire_generation_tokens_total") == ['quire_generation_tokens_total{model="m"} 8.0']


def test_gauges_vanish_with_the_model() -> None:
    metrics = Metrics()
    metrics.observe_engine("m", EngineStats(), EngineStats(num_running=2, num_free_blocks=1, num_blocks=4))
    assert sample(metrics, "quire_kv_cache_usage_perc") == ['quire_kv_cache_usage_perc{model="m"} 0.75']

    metrics.forget_engine("m")

    assert sample(metrics, "quire_num_requests_running{") == []


def test_a_request_has_one_first_token_and_gaps_within_each_sequence() -> None:
    metrics = Metrics()
    clock = metrics.start_request("m")

    for sequence_id in (1, 2, 1, 1, 2):
        clock.tokens(sequence_id)
    clock.choice_finished("stop")
    clock.finished()

    assert sample(metrics, "quire_time_to_first_token_seconds_count")[0].endswith(" 1.0")
    assert sample(metrics, "quire_inter_token_latency_seconds_count")[0].endswith(" 3.0")
    assert sample(metrics, "quire_e2e_request_latency_seconds_count")[0].endswith(" 1.0")
    assert sample(metrics, "quire_request_success_total")[0].endswith('{finished_reason="stop",model="m"} 1.0')


def test_tokens_taken_together_share_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = Metrics()
    times = iter([10.0, 10.5, 10.7])
    monkeypatch.setattr("app.metrics.time.perf_counter", lambda: next(times))
    clock = metrics.start_request("m")

    clock.tokens(1)
    clock.tokens(1, 4)

    buckets = sample(metrics, "quire_inter_token_latency_seconds_bucket")
    assert [line.rsplit(" ", 1)[1] for line in buckets if 'le="0.025"' in line or 'le="0.05"' in line] == ["0.0", "4.0"]
    total_s = float(sample(metrics, "quire_inter_token_latency_seconds_sum")[0].rsplit(" ", 1)[1])
    assert total_s == pytest.approx(0.2)


def test_the_throughput_line_shows_rates_of_the_interval() -> None:
    before = EngineStats(prompt_tokens_total=100, generation_tokens_total=10)
    after = EngineStats(
        num_running=3,
        num_waiting=1,
        num_free_blocks=3,
        num_blocks=4,
        prompt_tokens_total=300,
        generation_tokens_total=60,
        prefix_query_tokens_total=200,
        prefix_hit_tokens_total=50,
    )

    assert throughput_line("m", before, after, 10.0) == (
        "m: prompt throughput 20.0 tokens/s, generation throughput 5.0 tokens/s, running 3, waiting 1, "
        "KV cache usage 25.0 %, prefix cache hit rate 25.0 %"
    )


@pytest.mark.parametrize("stats", [EngineStats(), EngineStats(generation_tokens_total=9, num_blocks=4)])
def test_an_idle_model_has_no_line(stats: EngineStats) -> None:
    assert throughput_line("m", stats, stats, 10.0) is None
