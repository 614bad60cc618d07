"""The load generator against the real daemon: it counts what the server says, and fails loudly."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import daemon as daemon_benchmark
from benchmarks import serve
from benchmarks.http_load import RequestFailed, Target, closed_loop
from tests.fakes.daemon import FakeDaemon, running_daemon
from tests.fakes.tiny_model import write_tiny_model


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("load")


@pytest.fixture(scope="module")
def daemon(home: Path) -> Iterator[FakeDaemon]:
    with running_daemon(home / "daemon") as running:
        yield running


@pytest.fixture(scope="module")
def model(home: Path) -> Path:
    return write_tiny_model(home / "echo", behaviour={"step_delay_s": 0.002})


def arguments(daemon: FakeDaemon, model: Path, *options: str) -> list[str]:
    shape = ["--input-len", "20", "--output-len", "30", "--max-id", "250", "--processes", "2"]
    return ["--model", str(model), "--base-url", daemon.base_url, *shape, *options]


def test_closed_loop_counts_every_token(daemon: FakeDaemon, model: Path) -> None:
    options = ("--streams", "1,5", "--rounds", "2", "--offline-rate", "1000")
    levels = serve.measure(serve.parse_arguments(arguments(daemon, model, *options)))
    assert [(level["streams"], level["requests"]) for level in levels] == [(1, 2), (5, 10)]
    for level in json.loads(json.dumps(levels)):
        assert level["output_tokens_per_s"] * level["elapsed_s"] == pytest.approx(30 * level["requests"], rel=0.01)
        assert 0 < level["ttft_p50_ms"] <= level["ttft_p99_ms"]
        assert level["per_token_p50_ms"] >= 2.0
        assert level["share_of_offline"] == pytest.approx(level["output_tokens_per_s"] / 1000, abs=0.001)


def test_open_loop_sends_at_the_rate_it_is_given(daemon: FakeDaemon, model: Path) -> None:
    options = ("--request-rate", "40", "--num-requests", "20")
    (level,) = serve.measure(serve.parse_arguments(arguments(daemon, model, *options)))
    assert level["requests"] == 20
    assert 0.2 < level["elapsed_s"] < 2.0


def test_a_request_that_is_refused_is_told_with_its_reason(daemon: FakeDaemon, model: Path) -> None:
    with pytest.raises(RequestFailed, match="512"):
        closed_loop(Target(daemon.base_url, str(model), 600, 4, max_id=250), 2, 1, 1, seed=0)


def test_the_daemons_own_cost_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    levels = daemon_benchmark.measure(
        daemon_benchmark.parse_arguments(["--streams", "2", "--rounds", "1", "--output-len", "40"])
    )
    assert [(level["streams"], level["tokens"]) for level in levels] == [(2, 80)]
    assert "cpu_us_per_token" in capsys.readouterr().out


def test_percentiles_are_values_that_occurred() -> None:
    values = [float(value) for value in range(1, 101)]
    assert (serve.percentile(values, 99), serve.percentile(values, 50), serve.percentile([7.0], 99)) == (99, 50, 7)
