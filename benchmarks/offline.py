"""How fast is the engine by itself?  Time to first token, time per output token and tokens/s, without HTTP.

    python benchmarks/offline.py --model DIR [--load-format dummy] [--workload single_512_256,burst64_512_256]

DIR needs only a config.json with `--load-format dummy`.  Each workload runs `--warmup` times and
then `--repeats` times with other token ids each time, so that the prefix cache cannot help; the
table shows medians of the repeats.  Tokens are counted, not turned into text.  On a GPU the peak
memory is reported against the budget.  The last line is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # The checkout, not this folder, whose `profile.py` would hide the standard library's.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch

from benchmarks.device_memory import MemorySampler
from benchmarks.workloads import NAMES, Request, is_workload, repeated, shrunk, workload
from engine import LLM
from engine.api.request import Prompt
from engine.api.sampling import SamplingParams

FIRST_SEQUENCE_ID = 10**9
"""Far above what `LLM` itself hands out."""
_KNOWN = f"{', '.join(NAMES)}, or any burstN_IN_OUT"


@dataclass(frozen=True)
class Run:
    """One pass through a workload; per-request times are medians."""

    total_s: float
    first_token_s: float
    ms_per_token: float
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int


class Driver:
    """Feeds requests to the engine and notes when each step's tokens arrive."""

    def __init__(self, llm: LLM, temperature: float) -> None:
        self._engine = llm.engine
        self._vocab_size = llm.facts.vocab_size
        self._temperature = temperature
        self._sequence_ids = itertools.count(FIRST_SEQUENCE_ID)
        self._repeat = 0

    def run(self, requests: list[Request]) -> Run:
        """Submit all requests at once and step until the last has ended; the ids are new in every run."""
        requests = repeated(requests, self._repeat, self._vocab_size)
        self._repeat += 1
        prompts = [self._prompt(request) for request in requests]
        first_s: dict[int, float] = {}
        last_s: dict[int, float] = {}
        num_output, num_cached = 0, 0
        started = time.perf_counter()
        for prompt in prompts:
            self._engine.submit(prompt)
        while self._engine.has_work:
            outputs = self._engine.step()
            now = time.perf_counter() - started
            for output in outputs:
                if output.finish_reason in ("error", "abort"):
                    raise RuntimeError(output.error_message or "the engine dropped a sequence")
                num_output += len(output.token_ids)
                num_cached += output.num_cached_tokens if output.sequence_id not in first_s else 0
                first_s.setdefault(output.sequence_id, now)
                last_s[output.sequence_id] = now
        gaps = [
            1000 * (last_s[prompt.sequence_id] - first_s[prompt.sequence_id]) / (prompt.max_tokens - 1)
            for prompt in prompts
            if prompt.max_tokens > 1
        ]
        expected = sum(prompt.max_tokens for prompt in prompts)
        assert num_output == expected, f"{num_output} tokens instead of {expected}: the context is too short"
        return Run(
            total_s=max(last_s.values()),
            first_token_s=statistics.median(first_s.values()),
            ms_per_token=statistics.median(gaps) if gaps else 0.0,
            num_prompt_tokens=sum(len(prompt.token_ids) for prompt in prompts),
            num_output_tokens=num_output,
            num_cached_tokens=num_cached,
        )

    def prepare(self) -> None:
        """Let the engine capture the graphs that it has found it needs, as a worker does between requests."""
        while self._engine.has_spare_work:
            self._engine.spare_step()

    def _prompt(self, request: Request) -> Prompt:
        sampling = SamplingParams(temperature=self._temperature, max_tokens=request.max_tokens, ignore_eos=True)
        return Prompt(next(self._sequence_ids), request.token_ids, request.max_tokens, sampling)


def measure(driver: Driver, requests: list[Request], warmup: int, repeats: int) -> dict[str, Any]:
    """Medians over the repeats, and the spread of the total time."""
    for _ in range(warmup):
        driver.run(requests)
        driver.prepare()
    runs = [driver.run(requests) for _ in range(repeats)]
    totals = [run.total_s for run in runs]
    total_s = statistics.median(totals)
    return {
        "requests": len(requests),
        "prompt_tokens": runs[0].num_prompt_tokens,
        "output_tokens": runs[0].num_output_tokens,
        "total_s": round(total_s, 6),
        "spread_percent": round(100 * (max(totals) - min(totals)) / total_s, 1),
        "first_token_ms": round(1000 * statistics.median(run.first_token_s for run in runs), 3),
        "ms_per_output_token": round(statistics.median(run.ms_per_token for run in runs), 4),
        "output_tokens_per_s": round(runs[0].num_output_tokens / total_s, 1),
        "prompt_tokens_per_s": round(runs[0].num_prompt_tokens / total_s, 1),
        "cached_tokens": max(run.num_cached_tokens for run in runs),
    }


def print_table(results: dict[str, dict[str, Any]]) -> None:
    columns = {
        "requests": "requests",
        "first_token_ms": "first token ms",
        "ms_per_output_token": "ms/token",
        "output_tokens_per_s": "output tok/s",
        "prompt_tokens_per_s": "prompt tok/s",
        "total_s": "total s",
        "spread_percent": "spread %",
    }
    print(f"{'workload':18}" + "".join(f"{title:>15}" for title in columns.values()))
    for name, result in results.items():
        print(f"{name:18}" + "".join(f"{result[key]:>15,}" for key in columns))


def print_memory(memory: dict[str, Any]) -> None:
    def gib(name: str) -> str:
        return f"{memory[name] / 2**30:.2f} GiB"

    verdict = "within" if memory["is_within_budget"] else "ABOVE"
    print(
        f"device memory: peak of this run {gib('peak_of_this_run_bytes')}, {verdict} the budget of "
        f"{gib('budget_bytes')}; torch reserved {gib('peak_reserved_bytes')}, allocated {gib('peak_allocated_bytes')}; "
        f"in use before: {gib('before_bytes')}"
    )


def measure_all(arguments: argparse.Namespace) -> dict[str, Any]:
    on_gpu = arguments.device != "cpu" and torch.cuda.is_available()
    with contextlib.ExitStack() as stack:
        sampler = stack.enter_context(MemorySampler(torch.device("cuda", 0))) if on_gpu else None
        started = time.perf_counter()
        llm = LLM(
            arguments.model,
            load_format=arguments.load_format,
            dtype=arguments.dtype,
            device=arguments.device,
            max_model_len=arguments.max_model_len,
            max_num_seqs=arguments.max_num_seqs,
            max_num_batched_tokens=arguments.max_num_batched_tokens,
            block_size=arguments.block_size,
            gpu_memory_utilization=arguments.gpu_memory_utilization,
        )
        load_s = time.perf_counter() - started
        print(f"loaded in {load_s:.1f} s: {llm.facts.num_kv_tokens:,} tokens of KV cache", flush=True)
        driver = Driver(llm, arguments.temperature)
        results = {}
        for name in arguments.workload:
            requests = shrunk(workload(name), arguments.shrink)
            results[name] = measure(driver, requests, arguments.warmup, arguments.repeats)
        memory = sampler.report(arguments.gpu_memory_utilization) if sampler else None
    print_table(results)
    if memory is not None:
        print_memory(memory)
    return {
        "benchmark": "offline",
        "model": arguments.model,
        "device": torch.cuda.get_device_name(0) if on_gpu else "cpu",
        "dtype": llm.facts.dtype,
        "load_s": round(load_s, 2),
        "repeats": arguments.repeats,
        "shrink": arguments.shrink,
        "workloads": results,
        "memory": memory,
    }


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time to first token, time per output token and tokens/s, offline.")
    parser.add_argument("--model", required=True, help="directory or GGUF file")
    parser.add_argument("--load-format", default="auto", choices=("auto", "safetensors", "gguf", "dummy"))
    parser.add_argument("--workload", type=_names, default=list(NAMES), help=f"comma-separated: {_KNOWN}")
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-num-batched-tokens", type=int)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.9)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--shrink", type=int, default=1, help="divide counts and lengths by this, to try the script")
    return parser.parse_args(argv)


def _names(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if not is_workload(name)]:
        raise argparse.ArgumentTypeError(f"unknown workload {unknown[0]}; there are {_KNOWN}")
    return names


def main() -> None:
    print(json.dumps(measure_all(parse_arguments())))


if __name__ == "__main__":
    main()
