"""Sampling: microseconds on the device and on the host, beside plain torch, on an NVIDIA GPU.

    python benchmarks/kernels/sampling.py [--vocab-size 151936] [--batches 1,64] [--spread 3]

Device figures are medians over replays of a graph that samples several sets of logits in turn, more than the L2
cache holds, gaps between launches included; torch's are medians of events around queued calls where a graph cannot
hold them.  Host figures are what one `sample()` call costs the thread that makes it.  The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from engine.api.sampling import SamplingParams
from engine.core.batch import RowStart
from engine.kernels.adjust import adjust
from engine.kernels.greedy import greedy_append, likeliest
from engine.kernels.sample import choose
from engine.sampling.sampler import SamplingRow, sample
from engine.sampling.settings import build_settings

DEVICE = torch.device("cuda")
CONTEXT = 1024
ROTATED_BYTES = 100 << 20  # twice the L2 cache
MAX_SETS = 64
REPLAYS = 15


@dataclass(frozen=True)
class Case:
    """`goals` are microseconds on an H200, by batch size."""

    name: str
    params: SamplingParams
    goals: dict[int, float]
    dtype: torch.dtype = torch.bfloat16
    rival: str = ""


FILTER_GOALS = {1: 120.0, 64: 300.0}
QWEN = SamplingParams(temperature=0.6, top_k=20, top_p=0.95)
LLAMA = SamplingParams(temperature=0.6, top_p=0.9)
CASES = (
    Case("greedy", SamplingParams(temperature=0.0), {1: 15.0, 64: 30.0}, rival="argmax"),
    Case("temperature", SamplingParams(temperature=0.8), {1: 20.0, 64: 60.0}, rival="multinomial"),
    Case("top-k, top-p", QWEN, FILTER_GOALS, rival="sort"),
    Case("top-k, top-p, float32", QWEN, FILTER_GOALS, torch.float32, rival="sort"),
    Case("top-p", LLAMA, FILTER_GOALS, rival="sort"),
    Case("top-p, flat", SamplingParams(temperature=3.0, top_p=0.95), FILTER_GOALS),
    Case("top-p, flat, float32", SamplingParams(temperature=3.0, top_p=0.95), FILTER_GOALS, torch.float32),
    Case("min-p", SamplingParams(min_p=0.05), {1: 20.0, 64: 60.0}),
    Case("penalties", SamplingParams(temperature=0.0, frequency_penalty=0.1, repetition_penalty=1.1), {}),
)


def torch_argmax(logits: torch.Tensor) -> torch.Tensor:
    return logits.argmax(-1)


def torch_multinomial(logits: torch.Tensor) -> torch.Tensor:
    return torch.multinomial((logits.float() / 0.8).softmax(-1), 1)


def torch_sort(logits: torch.Tensor) -> torch.Tensor:
    values, ids = (logits.float() / 0.6).sort(-1, descending=True)
    probabilities = values.softmax(-1)
    probabilities[probabilities.cumsum(-1) - probabilities > 0.95] = 0.0
    return ids.gather(1, torch.multinomial(probabilities, 1))


RIVALS = {"argmax": torch_argmax, "multinomial": torch_multinomial, "sort": torch_sort}


def make_rows(params: SamplingParams, num_rows: int) -> list[SamplingRow]:
    prompt = (0,) * (CONTEXT // 2)
    starts = [RowStart(row, row + 1, prompt, len(prompt), params, ()) for row in range(num_rows)]
    return [SamplingRow(start, CONTEXT, seed=start.row) for start in starts]


def make_logits(num_rows: int, vocab_size: int, dtype: torch.dtype, spread: float) -> list[torch.Tensor]:
    set_bytes = num_rows * vocab_size * dtype.itemsize
    num_sets = max(2, min(MAX_SETS, -(-ROTATED_BYTES // set_bytes)))
    return [(torch.randn(num_rows, vocab_size, device=DEVICE) * spread).to(dtype) for _ in range(num_sets)]


def replay_us(work: Callable[[torch.Tensor], object], inputs: Sequence[torch.Tensor]) -> float:
    """Median microseconds of `work` on one of the inputs, in a graph that goes through all of them."""
    for logits in inputs[:2]:
        work(logits)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for logits in inputs:
            work(logits)
    graph.replay()
    return _timed(graph.replay) / len(inputs)


def queued_us(work: Callable[[torch.Tensor], object], inputs: Sequence[torch.Tensor]) -> float:
    """The same from calls queued one after the other, for work that a graph cannot hold."""

    def all_inputs() -> None:
        for logits in inputs[:4]:
            work(logits)

    all_inputs()
    return _timed(all_inputs) / len(inputs[:4])


def _timed(work: Callable[[], object]) -> float:
    times = []
    for _ in range(REPLAYS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times)


def host_us(rows: Sequence[SamplingRow], inputs: Sequence[torch.Tensor], table: torch.Tensor) -> float:
    """Median microseconds until `sample()` returns, on an idle device."""
    times = []
    for index in range(2 * REPLAYS):
        logits = inputs[index % len(inputs)].clone()
        torch.cuda.synchronize()
        start = time.perf_counter()
        sample(logits, rows, table)
        times.append((time.perf_counter() - start) * 1e6)
    torch.cuda.synchronize()
    return statistics.median(times[REPLAYS:])


def device_work(
    case: Case, rows: Sequence[SamplingRow], vocab_size: int, table: torch.Tensor
) -> Callable[[torch.Tensor], object]:
    """What `sample()` launches for the case, its parameters already on the device."""
    if case.params.is_greedy and not case.params.has_penalties:
        return likeliest
    settings = build_settings(rows, vocab_size, DEVICE)

    def work(logits: torch.Tensor) -> None:
        if settings.adjusts:
            logits = logits.float()
            adjust(logits, settings, table)
        _ = choose(logits, settings) if settings.any_draws else likeliest(logits)

    return work


def measure_case(case: Case, num_rows: int, vocab_size: int, spread: float) -> dict[str, object]:
    inputs = make_logits(num_rows, vocab_size, case.dtype, spread)
    rows = make_rows(case.params, num_rows)
    table = torch.randint(vocab_size, (num_rows, CONTEXT), dtype=torch.int32, device=DEVICE)
    device_us = replay_us(device_work(case, rows, vocab_size, table), inputs)
    return {
        "case": case.name,
        "batch": num_rows,
        "device_us": round(device_us, 2),
        "goal_us": case.goals.get(num_rows),
        "host_us": round(host_us(rows, inputs, table), 1),
        "torch_us": round(queued_us(RIVALS[case.rival], inputs), 1) if case.rival else None,
    }


def measure_append(num_rows: int, vocab_size: int, spread: float) -> dict[str, object]:
    """`greedy_append`, which every decode step ends in."""
    inputs = make_logits(num_rows, vocab_size, torch.bfloat16, spread)
    index = torch.arange(num_rows, dtype=torch.int32, device=DEVICE)
    table = torch.zeros((num_rows, CONTEXT), dtype=torch.int32, device=DEVICE)
    out = torch.empty(num_rows, dtype=torch.int32, device=DEVICE)
    device_us = replay_us(lambda logits: greedy_append(logits, index, index, table, out), inputs)
    return {
        "case": "greedy_append",
        "batch": num_rows,
        "device_us": round(device_us, 2),
        "goal_us": {1: 6.0, 64: 30.0}.get(num_rows),
        "host_us": None,
        "torch_us": round(replay_us(torch_argmax, inputs), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab-size", type=int, default=151936)
    parser.add_argument("--batches", default="1,64")
    parser.add_argument("--spread", type=float, default=3.0, help="standard deviation of the random logits")
    options = parser.parse_args()
    torch.manual_seed(0)
    results = []
    print(f"{'case':24}{'batch':>6}{'device us':>11}{'goal':>8}{'host us':>9}{'torch us':>10}")
    for batch in map(int, options.batches.split(",")):
        measured = [measure_append(batch, options.vocab_size, options.spread)]
        for case in CASES:
            measured.append(measure_case(case, batch, options.vocab_size, options.spread))
        for result in measured:
            goal, host, rival = (result[name] or "-" for name in ("goal_us", "host_us", "torch_us"))
            print(f"{result['case']:24}{batch:6}{result['device_us']:11}{goal:>8}{host:>9}{rival:>10}")
        results += measured
    print(json.dumps({"vocab_size": options.vocab_size, "spread": options.spread, "results": results}))


if __name__ == "__main__":
    main()
