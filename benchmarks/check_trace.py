"""Does the host ever wait for the GPU where it should not?  Reads a trace of `benchmarks/profile.py`.

    python benchmarks/check_trace.py trace.json

Exits with 1 if the marked steps, save the first `--skip-steps`, hold a host synchronisation other
than one wait per step for the tokens of the OLDEST step in flight.  A wait is for the oldest step
if work that was launched before it is still unfinished when it returns; one that leaves nothing
running was for the newest, and the GPU then idles until the host has launched again.  Copies from
or to pageable memory and allocations of device memory count as waits too.  Prints the share of
time that the GPU is busy, the kernels that take most of it, and the longest gaps.  The last line
is JSON.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STEP_NAME = "engine step"
RUNTIME_CATEGORIES = ("cuda_runtime", "cuda_driver")
GPU_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
EVENT_WAITS = ("cudaEventSynchronize", "cuEventSynchronize")
ALWAYS_WAIT = (
    *("cudaDeviceSynchronize", "cudaStreamSynchronize", "cuCtxSynchronize", "cuStreamSynchronize"),
    *("cudaMemcpy", "cudaMemcpy2D", "cudaMemset", "cuMemcpyDtoH_v2", "cuMemcpyHtoD_v2"),
    *("cudaMalloc", "cudaFree", "cudaHostAlloc", "cudaFreeHost", "cudaMallocHost"),
)
_PAGEABLE = "Pageable"
_NUM_LISTED = 12
_GAP_US = 5.0


@dataclass(frozen=True, slots=True)
class Event:
    """One complete event; times in microseconds.  `correlation` ties a launch to what it ran on the GPU."""

    name: str
    category: str
    start: float
    end: float
    correlation: int | None


@dataclass(frozen=True, slots=True)
class Report:
    """What was found between the first and the last marked step that counts."""

    num_steps: int
    step_us: float
    busy_share: float | None
    violations: tuple[str, ...]
    kernels: tuple[tuple[str, int, float], ...]
    gaps: tuple[tuple[float, str, str], ...]
    num_gaps: int


def read_events(path: Path) -> list[Event]:
    """All complete events of a chrome trace, by start time."""
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    trace = json.loads(raw)
    entries = trace["traceEvents"] if isinstance(trace, dict) else trace
    events = [
        Event(
            name=str(entry["name"]),
            category=str(entry.get("cat", "")),
            start=float(entry["ts"]),
            end=float(entry["ts"]) + float(entry.get("dur", 0.0)),
            correlation=entry.get("args", {}).get("correlation"),
        )
        for entry in entries
        if entry.get("ph") == "X"
    ]
    return sorted(events, key=lambda event: event.start)


def check(events: Sequence[Event], skip_steps: int) -> Report:
    """Raises `ValueError` if too few steps are marked."""
    steps = [event for event in events if event.name == STEP_NAME and event.category == "user_annotation"][skip_steps:]
    if not steps:
        raise ValueError(f"the trace holds no more than {skip_steps} steps marked {STEP_NAME!r}")
    start, end = steps[0].start, steps[-1].end
    runtime = [event for event in events if event.category in RUNTIME_CATEGORIES]
    on_gpu = [event for event in events if event.category in GPU_CATEGORIES]
    gpu_in_window = [event for event in on_gpu if event.end > start and event.start < end]
    merged = _merge(gpu_in_window, start, end)
    return Report(
        num_steps=len(steps),
        step_us=(end - start) / len(steps),
        busy_share=sum(stop - begin for begin, stop in merged) / (end - start) if on_gpu else None,
        violations=(*_wrong_waits(steps, runtime, on_gpu), *_pageable_copies(runtime, gpu_in_window, start, end)),
        kernels=_by_time(gpu_in_window),
        gaps=_gaps(gpu_in_window)[:_NUM_LISTED],
        num_gaps=len(_gaps(gpu_in_window)),
    )


def _wrong_waits(steps: Sequence[Event], runtime: Sequence[Event], on_gpu: Sequence[Event]) -> list[str]:
    """One sentence per kind of wait that the steady state must not hold."""
    found: Counter[str] = Counter()
    ends_by_launch: dict[int, float] = {}
    for event in on_gpu:
        if event.correlation is not None:
            ends_by_launch[event.correlation] = max(event.end, ends_by_launch.get(event.correlation, 0.0))
    for step in steps:
        calls = [call for call in runtime if step.start <= call.start < step.end]
        waits = [call for call in calls if call.name in EVENT_WAITS]
        found.update(f"{call.name} in a step" for call in calls if call.name in ALWAYS_WAIT)
        if len(waits) > 1:
            found["more than one event wait in a step"] += 1
        for wait in waits:
            launched = (call for call in runtime if call.end <= wait.start and call.correlation in ends_by_launch)
            if not any(ends_by_launch[call.correlation or 0] > wait.end for call in launched):
                found["an event wait that left nothing running: it was for the newest step"] += 1
    return [f"{text} ({count} times)" for text, count in found.items()]


def _pageable_copies(runtime: Sequence[Event], on_gpu: Sequence[Event], start: float, end: float) -> list[str]:
    """Copies that the host must wait for, as they are not from or to pinned memory."""
    launched_inside = {call.correlation for call in runtime if start <= call.start < end}
    found = Counter(event.name for event in on_gpu if _PAGEABLE in event.name and event.correlation in launched_inside)
    return [f"{name} ({count} times)" for name, count in found.items()]


def _merge(events: Iterable[Event], start: float, end: float) -> list[tuple[float, float]]:
    """The times within [start, end] at which any of the events was running."""
    merged: list[tuple[float, float]] = []
    for event in events:
        begin, stop = max(start, event.start), min(end, event.end)
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        else:
            merged.append((begin, stop))
    return merged


def _by_time(events: Iterable[Event]) -> tuple[tuple[str, int, float], ...]:
    """(name, how often, microseconds in all) of what ran on the GPU, longest first."""
    totals: defaultdict[str, list[float]] = defaultdict(list)
    for event in events:
        totals[event.name].append(event.end - event.start)
    ranked = sorted(totals.items(), key=lambda item: -sum(item[1]))
    return tuple((name, len(times), sum(times)) for name, times in ranked)


def _gaps(events: Sequence[Event]) -> tuple[tuple[float, str, str], ...]:
    """(microseconds, what ran before, what ran after) of idle times on the GPU, longest first."""
    gaps = []
    last: Event | None = None
    for event in events:
        if last is not None and event.start - last.end > _GAP_US:
            gaps.append((event.start - last.end, last.name, event.name))
        if last is None or event.end > last.end:
            last = event
    return tuple(sorted(gaps, reverse=True))


def print_report(report: Report) -> None:
    print(f"{report.num_steps} steps of {report.step_us / 1000:.3f} ms")
    if report.busy_share is None:
        print("no GPU activity in this trace")
    else:
        print(f"GPU busy {100 * report.busy_share:.1f} % of the time")
        print(f"\n{'us a step':>10}{'calls a step':>14}{'us a call':>11}  kernel")
        for name, count, total in report.kernels[:_NUM_LISTED]:
            per_step, calls = total / report.num_steps, count / report.num_steps
            print(f"{per_step:10.1f}{calls:14.1f}{total / count:11.2f}  {name[:80]}")
        print(f"\n{report.num_gaps} gaps above {_GAP_US:.0f} us; the longest:")
        for gap, before, after in report.gaps[:5]:
            print(f"{gap:10.1f} us between {before[:40]} and {after[:40]}")
    for violation in report.violations:
        print(f"WAITS: {violation}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Fails if the host waits for the GPU within steady decode steps.")
    parser.add_argument("trace", type=Path)
    parser.add_argument("--skip-steps", type=int, default=2, help="first steps that do not count")
    arguments = parser.parse_args(argv)
    try:
        report = check(read_events(arguments.trace), arguments.skip_steps)
    except ValueError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    print_report(report)
    summary: dict[str, Any] = {
        "benchmark": "check_trace",
        "steps": report.num_steps,
        "step_ms": round(report.step_us / 1000, 4),
        "gpu_busy_share": None if report.busy_share is None else round(report.busy_share, 4),
        "violations": list(report.violations),
    }
    print(json.dumps(summary))
    return 1 if report.violations else 0


if __name__ == "__main__":
    sys.exit(main())
