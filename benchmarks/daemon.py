"""What does the daemon itself cost, whatever the engine?  Its CPU time per streamed token.

    python benchmarks/daemon.py [--streams 1,64,256] [--step-ms 2.5]

Runs the real daemon over the tests' fake worker, which gives every sequence one token each
`--step-ms`, and a load generator beside it.  CPU time per token is what a busy machine disturbs
least; its inverse is what one core could pass on.  The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # The checkout, not this folder, whose `profile.py` would hide the standard library's.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import psutil

from benchmarks.http_load import Target, closed_loop
from benchmarks.serve import summarise
from tests.fakes.daemon import FakeDaemon, running_daemon
from tests.fakes.tiny_model import write_tiny_model

INPUT_LEN, MAX_ID = 128, 250
"""The fake worker's context is 512 tokens, its vocabulary 257."""


def measure_level(daemon: FakeDaemon, model: Path, num_streams: int, arguments: argparse.Namespace) -> dict[str, Any]:
    target = Target(daemon.base_url, str(model), INPUT_LEN, arguments.output_len, max_id=MAX_ID)
    closed_loop(target, num_streams, 1, 1, seed=0)
    process = psutil.Process(daemon.process.pid)
    before_s = sum(process.cpu_times()[:2])
    timings = closed_loop(target, num_streams, arguments.rounds, 1, seed=1)
    cpu_s = sum(process.cpu_times()[:2]) - before_s
    num_tokens = sum(timing.num_tokens for timing in timings)
    summary = summarise(timings)
    return {
        "streams": num_streams,
        "tokens": num_tokens,
        "cpu_us_per_token": round(1e6 * cpu_s / num_tokens, 1),
        "tokens_per_cpu_s": round(num_tokens / max(cpu_s, 1e-3)),
        "output_tokens_per_s": summary["output_tokens_per_s"],
        "ttft_p50_ms": summary["ttft_p50_ms"],
    }


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    results = []
    with tempfile.TemporaryDirectory() as directory:
        model = write_tiny_model(Path(directory) / "echo", behaviour={"step_delay_s": arguments.step_ms / 1000})
        with running_daemon(Path(directory) / "daemon", QUIRE_MAX_QUEUE="1024") as daemon:
            for num_streams in arguments.streams:
                results.append(measure_level(daemon, model, num_streams, arguments))
                if len(results) == 1:
                    print("".join(f"{name:>21}" for name in results[0]))
                print("".join(f"{value:>21,}" for value in results[-1].values()), flush=True)
    return results


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="CPU time of the daemon per streamed token.")
    parser.add_argument("--streams", type=lambda text: [int(part) for part in text.split(",")], default=[1, 64, 256])
    parser.add_argument("--step-ms", type=float, default=2.5)
    parser.add_argument("--output-len", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args(argv)


def main() -> None:
    arguments = parse_arguments()
    print(json.dumps({"benchmark": "daemon", "step_ms": arguments.step_ms, "levels": measure(arguments)}))


if __name__ == "__main__":
    main()
