"""Which waits a trace of decode steps may hold, on traces made by hand.

A step of 100 us: the host launches at 10 and waits from 20 on; the GPU starts a step's work 30 us
after its launch, or when the previous step's is done.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import check_trace

STEP_US = 100.0


def event(name: str, category: str, start: float, duration: float, correlation: int | None = None) -> dict[str, Any]:
    args = {} if correlation is None else {"correlation": correlation}
    return {"ph": "X", "name": name, "cat": category, "ts": start, "dur": duration, "args": args}


def step_events(number: int, *, waits_for_newest: bool = False) -> list[dict[str, Any]]:
    """One pipelined step: launch, then wait until the previous step's work is done, or this one's."""
    start = 1000.0 + number * STEP_US
    work_start, work_us = start + 40.0, 90.0
    wait_us = work_start + work_us - (start + 20.0) if waits_for_newest else 15.0
    return [
        event("engine step", "user_annotation", start, 95.0),
        event("cudaGraphLaunch", "cuda_runtime", start + 10.0, 5.0, number),
        event("cudaEventSynchronize", "cuda_runtime", start + 20.0, wait_us, 1000 + number),
        event("decode_attention", "kernel", work_start, 60.0, number),
        event("linear", "kernel", work_start + 60.0, 30.0, number),
    ]


def write(path: Path, events: list[dict[str, Any]]) -> Path:
    text = json.dumps({"schemaVersion": 1, "traceEvents": [{"ph": "M", "name": "process_name"}, *events]}).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def run(tmp_path: Path, events: list[dict[str, Any]], name: str = "trace.json") -> int:
    return check_trace.main([str(write(tmp_path / name, events)), "--skip-steps", "1"])


def steady(num_steps: int = 5) -> list[dict[str, Any]]:
    return [one for number in range(num_steps) for one in step_events(number)]


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_one_wait_for_the_oldest_step_is_allowed(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert run(tmp_path, steady(), name) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (summary["steps"], summary["violations"]) == (4, [])
    # 10 us before each step's work are idle.
    assert summary["gpu_busy_share"] == pytest.approx(0.9, abs=0.03)


def test_a_wait_that_leaves_nothing_running_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = [one for number in range(5) for one in step_events(number, waits_for_newest=number == 3)]
    assert run(tmp_path, events) == 1
    assert "it was for the newest step (1 times)" in capsys.readouterr().out


@pytest.mark.parametrize(
    "culprit", ["cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaMemcpy", "cudaFree", "cudaEventSynchronize"]
)
def test_any_other_wait_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str], culprit: str) -> None:
    inside = event(culprit, "cuda_runtime", 1000.0 + 2 * STEP_US + 17.0, 2.0, 77)
    assert run(tmp_path, [*steady(), inside]) == 1
    assert "WAITS" in capsys.readouterr().out


def test_a_copy_to_pageable_memory_is_found(tmp_path: Path) -> None:
    at = 1000.0 + 2 * STEP_US
    copy = [
        event("cudaMemcpyAsync", "cuda_runtime", at + 16.0, 2.0, 88),
        event("Memcpy DtoH (Device -> Pageable)", "gpu_memcpy", at + 39.0, 1.0, 88),
    ]
    pinned = [
        event("cudaMemcpyAsync", "cuda_runtime", at + 16.0, 2.0, 88),
        event("Memcpy DtoH (Device -> Pinned)", "gpu_memcpy", at + 39.0, 1.0, 88),
    ]
    assert run(tmp_path, [*steady(), *copy]) == 1
    assert run(tmp_path, [*steady(), *pinned]) == 0


def test_waits_before_the_steady_state_do_not_count(tmp_path: Path) -> None:
    early = event("cudaDeviceSynchronize", "cuda_runtime", 1005.0, 2.0)
    late = event("cudaDeviceSynchronize", "cuda_runtime", 1000.0 + 5 * STEP_US, 2.0)
    assert run(tmp_path, [*steady(), early, late]) == 0


def test_kernels_and_gaps_are_ranked(tmp_path: Path) -> None:
    events = check_trace.read_events(write(tmp_path / "trace.json", steady()))
    report = check_trace.check(events, skip_steps=1)
    assert [name for name, _, _ in report.kernels] == ["decode_attention", "linear"]
    assert report.gaps[0] == (pytest.approx(10.0), "linear", "decode_attention")


def test_a_trace_without_marked_steps_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, [event("linear", "kernel", 0.0, 1.0)]) == 2
    assert "engine step" in capsys.readouterr().err
