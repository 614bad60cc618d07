"""How fast are the kernels of a prefill?  Times `prefill_attention` and `rotate_and_store` beside torch's attention.

    python benchmarks/kernels/prefill_attention.py [--block-size 16] [--sweep] [--heads 32]

Needs an NVIDIA GPU.  A time is the median of replays of a CUDA graph, per launch, so Python's launch cost is left
out.  TFLOP/s count 4 x H x D multiply-adds per visible pair of query and key, half of a triangle; GB/s count every
byte read or written once, to be held against a device-to-device copy timed in the same run.  `dense` is
`dense_prefill` as the engine calls it, its first call, which builds cuDNN's plan, in milliseconds beside it.
`--sweep` times launch parameters instead.  The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, product
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from triton.runtime.errors import OutOfResources

from engine.attention.backend import HeadNorms
from engine.kernels.prefill_attention import (
    PrefillTuning,
    choose_tuning,
    dense_prefill,
    plan_prefill,
    prefers_dense,
    prefill_attention,
)
from engine.kernels.rotate_store import rotate_and_store

DEVICE = torch.device("cuda")
DTYPE = torch.bfloat16
HEAD_DIM = 128
NUM_KV_HEADS = 8
RAGGED = (100, 1024, 333, 512, 777, 129, 640, 901, 256, 450, 580, 707, 833, 198)
CASES: dict[str, tuple[tuple[int, int], ...]] = {  # (context length, new tokens) of each sequence
    "1 x 512": ((512, 512),),
    "16 x 512": ((512, 512),) * 16,
    "1 x 2048": ((2048, 2048),),
    "1 x 8192": ((8192, 8192),),
    "1 x 16384": ((16384, 16384),),
    "4 x 2048 + 6144 cached": ((8192, 2048),) * 4,
    "14 x 100-1024": tuple((length, length) for length in RAGGED),
}
SWEEP_CASES = ("1 x 512", "16 x 512", "1 x 8192", "4 x 2048 + 6144 cached", "14 x 100-1024")
SWEEP_SHAPES = [  # block_m, block_n, warps, stages
    *((128, 128, 8, stages) for stages in (2, 3)),
    *((128, 64, 8, stages) for stages in (2, 3, 4)),
    *((128, 32, 8, stages) for stages in (3, 4)),
    *((64, 64, 4, stages) for stages in (2, 3, 4)),
    *((64, 32, 4, stages) for stages in (3, 4)),
    (64, 128, 4, 2),
    (128, 64, 4, 2),
]


@dataclass(frozen=True)
class Inputs:
    """A batch of random keys, values and queries in shuffled blocks."""

    sequences: tuple[tuple[int, int], ...]
    num_heads: int
    qkv: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    block_tables: torch.Tensor
    rows: torch.Tensor
    query_starts: tuple[int, ...]
    out: torch.Tensor

    @property
    def flops(self) -> float:
        pairs = sum(new * (context - new) + new * new / 2 for context, new in self.sequences)
        return 4 * self.num_heads * HEAD_DIM * pairs

    @property
    def length(self) -> int | None:
        """The length of all prompts, when they are equal and nothing is cached: torch can then compute the same."""
        lengths = set(self.sequences)
        context, new = next(iter(lengths))
        return new if len(lengths) == 1 and context == new else None


def make_inputs(sequences: tuple[tuple[int, int], ...], num_heads: int, block_size: int) -> Inputs:
    num_tokens = sum(new for _, new in sequences)
    counts = [-(-context // block_size) for context, _ in sequences]
    blocks = torch.randperm(sum(counts), dtype=torch.int32)
    block_tables = torch.zeros((len(sequences), max(counts)), dtype=torch.int32)
    for row, (first, count) in enumerate(zip(accumulate(counts, initial=0), counts, strict=False)):
        block_tables[row, :count] = blocks[first : first + count]
    cache_shape = (2, len(blocks), NUM_KV_HEADS, block_size, HEAD_DIM)
    keys, values = torch.randn(cache_shape, device=DEVICE, dtype=DTYPE)
    return Inputs(
        sequences,
        num_heads,
        torch.randn((num_tokens, (num_heads + 2 * NUM_KV_HEADS) * HEAD_DIM), device=DEVICE, dtype=DTYPE),
        keys,
        values,
        block_tables.to(DEVICE),
        torch.arange(len(sequences), dtype=torch.int32, device=DEVICE),
        tuple(accumulate((new for _, new in sequences), initial=0)),
        torch.empty((num_tokens, num_heads * HEAD_DIM), device=DEVICE, dtype=DTYPE),
    )


def microseconds(launch: Callable[[], object], per_graph: int = 4, samples: int = 9) -> float:
    """Median time of one launch, of `samples` replays of a graph that holds `per_graph`."""
    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(per_graph):
            launch()
    times = []
    for _ in range(samples + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / per_graph)
    return statistics.median(times[2:])


def paged(inputs: Inputs, tuning: PrefillTuning) -> Callable[[], object]:
    contexts = [context for context, _ in inputs.sequences]
    tiles = torch.from_numpy(plan_prefill(inputs.query_starts, contexts, 0, tuning)).to(DEVICE)
    return lambda: prefill_attention(
        inputs.qkv, inputs.keys, inputs.values, inputs.block_tables, inputs.rows, tiles, inputs.out, tuning
    )


def default_tuning(inputs: Inputs) -> PrefillTuning:
    longest = max(context for context, _ in inputs.sequences)
    return choose_tuning(inputs.num_heads, NUM_KV_HEADS, HEAD_DIM, DTYPE, len(inputs.qkv), longest, DEVICE)


def torch_attention(inputs: Inputs, length: int, backend: SDPBackend) -> Callable[[], object]:
    heads = inputs.qkv.view(-1, length, inputs.num_heads + 2 * NUM_KV_HEADS, HEAD_DIM).transpose(1, 2)
    query, key, value = heads.split((inputs.num_heads, NUM_KV_HEADS, NUM_KV_HEADS), dim=1)

    def launch() -> torch.Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

    return launch


def time_attention(case: str, num_heads: int, block_size: int) -> dict[str, object]:
    """One line: the paged kernel, torch's own kernels where they can compute the same, and the dense path."""
    inputs = make_inputs(CASES[case], num_heads, block_size)
    measured: dict[str, float] = {"paged": microseconds(paged(inputs, default_tuning(inputs)))}
    first_call_ms = None
    if (length := inputs.length) is not None:
        if len(inputs.sequences) == 1 and prefers_dense(length, length, DEVICE, DTYPE, HEAD_DIM):

            def dense() -> None:
                dense_prefill(inputs.qkv, 0, length, num_heads, NUM_KV_HEADS, HEAD_DIM, inputs.out)

            torch.cuda.synchronize()
            started = time.perf_counter()
            dense()
            torch.cuda.synchronize()
            first_call_ms = (time.perf_counter() - started) * 1e3
            measured["dense"] = microseconds(dense)
        for name, backend in (("cudnn", SDPBackend.CUDNN_ATTENTION), ("flash", SDPBackend.FLASH_ATTENTION)):
            measured[name] = microseconds(torch_attention(inputs, length, backend))
    columns = "  ".join(f"{name} {us:8.1f} us {inputs.flops / us / 1e6:5.0f} TFLOP/s" for name, us in measured.items())
    first_call = "" if first_call_ms is None else f"  dense first call {first_call_ms:.1f} ms"
    print(f"H={num_heads:2d}  {case:24s}{columns}{first_call}", flush=True)
    return {
        "case": case,
        "num_heads": num_heads,
        "us": {name: round(us, 1) for name, us in measured.items()},
        "tflops": {name: round(inputs.flops / us / 1e6, 1) for name, us in measured.items()},
        "dense_first_call_ms": first_call_ms,
    }


def time_rotation(num_tokens: int, num_heads: int, block_size: int, tokens_per_program: int = 0) -> dict[str, object]:
    inputs = make_inputs(((num_tokens, num_tokens),), num_heads, block_size)
    angles = torch.rand((num_tokens, HEAD_DIM // 2), device=DEVICE)
    cos, sin = angles.cos(), angles.sin()
    weight = torch.ones(HEAD_DIM, device=DEVICE, dtype=DTYPE)
    norms = HeadNorms(weight, weight, 1e-6)
    slots = torch.randperm(len(inputs.keys) * block_size, device=DEVICE)[:num_tokens]
    slots = slots.sort().values
    us = microseconds(
        lambda: rotate_and_store(inputs.qkv, 0, cos, sin, slots, inputs.keys, inputs.values, norms, tokens_per_program),
        per_graph=20 if num_tokens < 4096 else 4,
    )
    # qkv read, its queries and keys written; keys and values written to the cache; cosines and sines, slots read.
    num_elements = (num_heads + 2 * NUM_KV_HEADS) + (num_heads + NUM_KV_HEADS) + 2 * NUM_KV_HEADS
    gigabytes = num_tokens * (num_elements * HEAD_DIM * DTYPE.itemsize + HEAD_DIM * 4 + 8) / 1e9
    result = {"tokens": num_tokens, "num_heads": num_heads, "us": round(us, 2), "gb_s": round(gigabytes / us * 1e6)}
    note = f"  {tokens_per_program} tokens a program" if tokens_per_program else ""
    print(f"H={num_heads:2d}  rotate_and_store {num_tokens:6d} tokens {us:8.2f} us {result['gb_s']:6d} GB/s{note}")
    return result


def copy_gb_s() -> int:
    """Bytes read plus bytes written per second by a device-to-device copy of 1 GiB."""
    source = torch.randint(0, 255, (1 << 30,), device=DEVICE, dtype=torch.uint8)
    target = torch.empty_like(source)
    return round(2 * source.numel() / microseconds(lambda: target.copy_(source)) / 1e3)


def sweep(num_heads: int, block_size: int) -> dict[str, object]:
    """TFLOP/s of every shape for every sweep case; shapes that do not fit the device are left out."""
    per_kv_head = num_heads // NUM_KV_HEADS
    batches = {case: make_inputs(CASES[case], num_heads, block_size) for case in SWEEP_CASES}
    results = []
    for (block_m, block_n, num_warps, num_stages), group in product(SWEEP_SHAPES, {per_kv_head, 1}):
        if group == 1 and (block_m, block_n) not in ((128, 128), (64, 64)):
            continue
        tuning = PrefillTuning(block_m, block_n, group, num_warps, num_stages)
        with suppress(OutOfResources):
            speeds = {
                case: round(inputs.flops / microseconds(paged(inputs, tuning), 2, 5) / 1e6)
                for case, inputs in batches.items()
            }
            print(tuning, "  ".join(f"{case}: {speed}" for case, speed in speeds.items()), flush=True)
            results.append({"tuning": [block_m, block_n, group, num_warps, num_stages], "tflops": speeds})
    rotations = [
        {"tokens_per_program": tokens, **time_rotation(num_tokens, num_heads, block_size, tokens)}
        for num_tokens, tokens in product((64, 512, 8192), (1, 2, 4, 8))
    ]
    return {"attention": results, "rotate_and_store": rotations}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--heads", type=int, default=32, help="query heads of the sweep")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("This benchmark needs an NVIDIA GPU.")
    torch.manual_seed(0)
    if arguments.sweep:
        print(json.dumps(sweep(arguments.heads, arguments.block_size)))
        return
    copy = copy_gb_s()
    print(f"device-to-device copy: {copy} GB/s")
    attention = [time_attention(case, heads, arguments.block_size) for heads in (16, 32) for case in CASES]
    rotations = [time_rotation(n, heads, arguments.block_size) for heads in (16, 32) for n in (64, 512, 2048, 8192)]
    print(json.dumps({"copy_gb_s": copy, "attention": attention, "rotate_and_store": rotations}))


if __name__ == "__main__":
    main()
