"""What does the machine do during a decode step?  A torch profiler trace of some steady ones.

    python benchmarks/profile.py --model DIR [--load-format dummy] --batch 64 --context 512 --output trace.json

The trace opens in Perfetto or chrome://tracing; `benchmarks/check_trace.py` reads it and tells
whether the host ever waits where it should not.  Steps are marked "engine step".  The last line
is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # The checkout, not this folder: this very file would hide the standard library's `profile`.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
from torch.profiler import ProfilerActivity, record_function

from benchmarks.check_trace import STEP_NAME
from benchmarks.steady_decode import SteadyDecode, rehearse
from engine import LLM


def trace_steps(arguments: argparse.Namespace) -> dict[str, Any]:
    """Write the trace; returns the figures for the JSON line."""
    on_gpu = arguments.device != "cpu" and torch.cuda.is_available()
    num_steps = arguments.warmup_steps + arguments.steps
    llm = LLM(
        arguments.model,
        load_format=arguments.load_format,
        dtype=arguments.dtype,
        device=arguments.device,
        max_num_seqs=arguments.max_num_seqs,
        max_model_len=arguments.max_model_len,
        gpu_memory_utilization=arguments.gpu_memory_utilization,
        enable_prefix_caching=False,
    )
    rehearse(llm, [arguments.batch], first_id=10**8)
    decode = SteadyDecode(llm, arguments.batch, arguments.context, num_steps, first_id=10**9)
    for _ in range(arguments.warmup_steps):
        decode.step()
    started = time.perf_counter()
    for _ in range(arguments.steps):
        decode.step()
    step_ms = 1000 * (time.perf_counter() - started) / arguments.steps
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(arguments.steps):
            with record_function(STEP_NAME):
                decode.step()
    profiler.export_chrome_trace(arguments.output)
    decode.close()
    print(f"{arguments.steps} steps of {arguments.batch} sequences: {step_ms:.3f} ms a step without the profiler")
    print(f"trace: {arguments.output} ({Path(arguments.output).stat().st_size / 2**20:.1f} MiB)")
    return {
        "benchmark": "profile",
        "model": arguments.model,
        "batch": arguments.batch,
        "context": arguments.context,
        "steps": arguments.steps,
        "step_ms": round(step_ms, 4),
        "trace": arguments.output,
    }


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A torch profiler trace of some decode steps.")
    parser.add_argument("--model", required=True, help="directory or GGUF file")
    parser.add_argument("--load-format", default="auto", choices=("auto", "safetensors", "gguf", "dummy"))
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--warmup-steps", type=int, default=8, help="before the steps")
    parser.add_argument("--output", default="trace.json", help="ends in .json or .json.gz")
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.9)
    return parser.parse_args(argv)


def main() -> None:
    print(json.dumps(trace_steps(parse_arguments())))


if __name__ == "__main__":
    main()
