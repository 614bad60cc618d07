"""Is there a cliff?  Time of a decode step over batch sizes and context lengths, and the jumps between neighbours.

    python benchmarks/sweep.py --model DIR [--load-format dummy] [--budget-seconds 240]

For each context length as many sequences are prefilled as `--batches` asks for and the cache
holds, and the batch is then halved by dropping sequences.  A step may take longer than its
neighbour's by what its extra work explains: a roofline adds the bytes it reads (weights, and the
KV of all its tokens) at `--bandwidth` to its matrix products at `--tflops`.  A jump beyond
`--tolerance` times that is flagged, and the exit code is then 1.  The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # The checkout, not this folder, whose `profile.py` would hide the standard library's.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.steady_decode import DoesNotFit, SteadyDecode, rehearse
from engine import LLM
from engine.api.wire import WorkerFacts

Cells = dict[tuple[int, int], float]
"""Milliseconds of a step by (batch, context)."""


def roofline_s(facts: WorkerFacts, batch: int, context: int, bandwidth: float, tflops: float) -> float:
    """Seconds for the bytes and the matrix products of one decode step, one after the other.

    `bandwidth` in TB/s.  Only ratios of this are used, so what both neighbours share cancels out.
    """
    num_bytes = facts.weight_bytes + batch * context * facts.kv_bytes_per_token
    return num_bytes / (bandwidth * 1e12) + 2 * facts.num_parameters * batch / (tflops * 1e12)


def find_jumps(cells: Mapping[tuple[int, int], float], expected: Mapping[tuple[int, int], float], tolerance: float
) -> list[dict[str, Any]]:  # fmt: skip
    """Neighbours, along either axis, whose times differ by more than `tolerance` times what is expected."""
    batches = sorted({batch for batch, _ in cells})
    contexts = sorted({context for _, context in cells})
    pairs = [((b1, c), (b2, c)) for b1, b2 in pairwise(batches) for c in contexts]
    pairs += [((b, c1), (b, c2)) for c1, c2 in pairwise(contexts) for b in batches]
    jumps = []
    for smaller, larger in pairs:
        if smaller not in cells or larger not in cells:
            continue
        ratio = cells[larger] / cells[smaller]
        allowed = tolerance * max(1.0, expected[larger] / expected[smaller])
        if ratio > allowed:
            jumps.append({"from": smaller, "to": larger, "ratio": round(ratio, 2), "allowed": round(allowed, 2)})
    return jumps


def measure_context(
    llm: LLM, context: int, batches: list[int], arguments: argparse.Namespace, first_id: int, deadline_s: float
) -> Cells:
    """The column of one context length, from the largest batch that fits down to the smallest."""
    warmup, steps = arguments.warmup_steps, arguments.steps
    num_steps = (warmup + steps) * len(batches)
    per_sequence = context + num_steps + llm.facts.block_size
    fitting = [batch for batch in batches if batch * per_sequence <= llm.facts.num_kv_tokens]
    if context + num_steps >= llm.facts.max_model_len:
        return {}
    cells: Cells = {}
    decode = None
    while fitting and decode is None:
        try:
            decode = SteadyDecode(llm, fitting[-1], context, num_steps, first_id=first_id, seed=context)
        except DoesNotFit:
            fitting.pop()
            first_id += max(batches)
    if decode is None:
        return {}
    for batch in reversed(fitting):
        decode.shrink(batch)
        for _ in range(warmup):
            decode.step()
        times = []
        for _ in range(steps):
            started = time.perf_counter()
            decode.step()
            times.append(time.perf_counter() - started)
        cells[batch, context] = 1000 * statistics.median(times)
        if time.monotonic() > deadline_s:
            break
    decode.close()
    return cells


def sweep(llm: LLM, arguments: argparse.Namespace) -> tuple[Cells, list[int]]:
    """All cells that fit the memory and the time, and the contexts that were left out for lack of either."""
    deadline_s = time.monotonic() + arguments.budget_seconds
    cells: Cells = {}
    left_out = []
    batches = sorted(batch for batch in arguments.batches if batch <= llm.facts.max_num_seqs)
    rehearse(llm, batches, first_id=10**9)
    for number, context in enumerate(sorted(arguments.contexts), start=1):
        column: Cells = {}
        if time.monotonic() < deadline_s:
            column = measure_context(llm, context, batches, arguments, number * 10**6, deadline_s)
            for batch, _ in sorted(column):
                print(f"batch {batch:4} context {context:6,}: {column[batch, context]:9.3f} ms", flush=True)
        cells.update(column)
        if not column:
            left_out.append(context)
    return cells, left_out


def print_table(cells: Cells) -> None:
    contexts = sorted({context for _, context in cells})
    print(f"\n{'ms a step':>10}" + "".join(f"{context:>10,}" for context in contexts) + "   context")
    for batch in sorted({batch for batch, _ in cells}):
        row = (cells.get((batch, context)) for context in contexts)
        print(f"{batch:>10}" + "".join(f"{'' if ms is None else f'{ms:.3f}':>10}" for ms in row))


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time of a decode step over batch and context.")
    parser.add_argument("--model", required=True, help="directory or GGUF file")
    parser.add_argument("--load-format", default="auto", choices=("auto", "safetensors", "gguf", "dummy"))
    parser.add_argument("--batches", type=_numbers, default=[1, 2, 4, 8, 16, 32, 64, 128, 256])
    parser.add_argument("--contexts", type=_numbers, default=[1024 * 2**power for power in range(7)])
    parser.add_argument("--budget-seconds", type=float, default=240.0, help="no new context after this")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--warmup-steps", type=int, default=4, help="at each batch")
    parser.add_argument("--tolerance", type=float, default=1.4)
    parser.add_argument("--bandwidth", type=float, default=4.3, help="TB/s of the device's memory")
    parser.add_argument("--tflops", type=float, default=790.0, help="of the device's matrix products")
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.9)
    return parser.parse_args(argv)


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run the sweep and print it; returns the figures for the JSON line."""
    llm = LLM(
        arguments.model,
        load_format=arguments.load_format,
        dtype=arguments.dtype,
        device=arguments.device,
        max_model_len=arguments.max_model_len,
        max_num_seqs=max(arguments.batches),
        gpu_memory_utilization=arguments.gpu_memory_utilization,
        enable_prefix_caching=False,
    )
    cells, left_out = sweep(llm, arguments)
    expected = {
        (batch, context): roofline_s(llm.facts, batch, context, arguments.bandwidth, arguments.tflops)
        for batch, context in cells
    }
    jumps = find_jumps(cells, expected, arguments.tolerance)
    print_table(cells)
    for jump in jumps:
        print(f"JUMP: {jump['from']} to {jump['to']} (batch, context): {jump['ratio']} x, allowed {jump['allowed']} x")
    return {
        "benchmark": "sweep",
        "model": arguments.model,
        "device": llm.facts.device,
        "cells": [{"batch": b, "context": c, "ms": round(ms, 4)} for (b, c), ms in sorted(cells.items())],
        "left_out": left_out,
        "jumps": jumps,
    }


def main() -> int:
    result = measure(parse_arguments())
    print(json.dumps(result))
    return 1 if result["jumps"] else 0


if __name__ == "__main__":
    sys.exit(main())
