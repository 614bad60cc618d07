"""How fast is the running daemon over HTTP?  Time to first token, time per token and tokens/s by number of streams.

    python benchmarks/serve.py --model NAME [--base-url http://127.0.0.1:11435] [--streams 1,16,64,256]
    python benchmarks/serve.py --model NAME --request-rate 20 --num-requests 200

The first form is a closed loop: so many streams at all times, each with `--rounds` requests one
after the other, after one round that is not counted.  The second is an open loop: requests
arrive at random at the given rate, and times count from the moment they were due.  Prompts are
random token ids, no two alike, and end-of-sequence is ignored.  `--offline-rate` (tokens/s of
`benchmarks/offline.py --workload burst64_512_128`, say) adds the share of it that HTTP leaves.  The
last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # The checkout, not this folder, whose `profile.py` would hide the standard library's.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.http_load import RequestFailed, Target, Timing, closed_loop, open_loop

PAUSE_S = 3.0
"""Between the warm-up of a level and its measurement: a quiet moment, in which a worker prepares what it lacked."""
MAX_PROCESSES = 8


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that `percent` of all values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


def summarise(timings: Sequence[Timing], offline_rate: float | None = None) -> dict[str, Any]:
    """Rates over the time from the first request due to the last token."""
    began_s = min(timing.due_s for timing in timings)
    elapsed_s = max(timing.last_token_s for timing in timings) - began_s
    ttft_ms = [1000 * timing.ttft_s for timing in timings]
    per_token_ms = [1000 * timing.per_token_s for timing in timings]
    output_rate = sum(timing.num_tokens for timing in timings) / elapsed_s
    share = {"share_of_offline": round(output_rate / offline_rate, 4)} if offline_rate else {}
    return {
        "requests": len(timings),
        "elapsed_s": round(elapsed_s, 3),
        "ttft_p50_ms": round(statistics.median(ttft_ms), 2),
        "ttft_p99_ms": round(percentile(ttft_ms, 99), 2),
        "per_token_p50_ms": round(statistics.median(per_token_ms), 3),
        "per_token_p99_ms": round(percentile(per_token_ms, 99), 3),
        "output_tokens_per_s": round(output_rate, 1),
        "prompt_tokens_per_s": round(sum(timing.num_prompt_tokens for timing in timings) / elapsed_s, 1),
        **share,
    }


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One summary per number of streams, or one for the open loop."""
    target = Target(
        base_url=arguments.base_url,
        model=arguments.model,
        input_len=arguments.input_len,
        output_len=arguments.output_len,
        max_id=arguments.max_id,
        api_key=os.environ.get("QUIRE_API_KEY"),
        timeout_s=arguments.timeout,
    )
    processes = arguments.processes or max(1, min(MAX_PROCESSES, (os.cpu_count() or 2) // 2))
    if arguments.request_rate:
        closed_loop(target, min(8, arguments.num_requests), 1, processes, seed=-1)
        timings = open_loop(target, arguments.request_rate, arguments.num_requests, processes, arguments.seed)
        return [{"request_rate": arguments.request_rate, **summarise(timings, arguments.offline_rate)}]
    results = []
    for num_streams in arguments.streams:
        closed_loop(target, num_streams, 1, processes, seed=-num_streams)
        time.sleep(PAUSE_S)
        timings = closed_loop(target, num_streams, arguments.rounds, processes, arguments.seed + num_streams)
        results.append({"streams": num_streams, **summarise(timings, arguments.offline_rate)})
        print_row(results[-1], with_head=len(results) == 1)
    return results


def print_row(result: dict[str, Any], *, with_head: bool) -> None:
    if with_head:
        print("".join(f"{name:>21}" for name in result), flush=True)
    print("".join(f"{value:>21,}" for value in result.values()), flush=True)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time to first token, time per token and tokens/s over HTTP.")
    parser.add_argument("--model", required=True)
    parser.add_argument("--base-url", default="http://127.0.0.1:11435")
    parser.add_argument("--streams", type=_counts, default=[1, 16, 64, 256], help="comma-separated; closed loop")
    parser.add_argument("--rounds", type=int, default=3, help="requests of each stream that count")
    parser.add_argument("--request-rate", type=float, help="requests a second; makes it an open loop")
    parser.add_argument("--num-requests", type=int, default=200, help="of the open loop")
    parser.add_argument("--input-len", type=int, default=512)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--max-id", type=int, default=10_000, help="largest token id of the prompts")
    parser.add_argument("--processes", type=int, help="of the load generator; half of the cores, at most 8, unless set")
    parser.add_argument("--offline-rate", type=float, help="tokens/s to show the share of")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one level")
    parser.add_argument("--seed", type=int, default=0, help="another seed, other prompts")
    return parser.parse_args(argv)


def _counts(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    arguments = parse_arguments()
    try:
        results = measure(arguments)
    except RequestFailed as error:
        sys.exit(f"Error: {error}")
    if arguments.request_rate:
        print_row(results[0], with_head=True)
    summary = {
        "benchmark": "serve",
        "model": arguments.model,
        "input_len": arguments.input_len,
        "output_len": arguments.output_len,
        "levels": results,
        "offline_rate": arguments.offline_rate,
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
