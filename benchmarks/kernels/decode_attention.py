"""Decode attention: microseconds, and how near that is to reading keys and values as fast as the GPU can read.

    python benchmarks/kernels/decode_attention.py [--groups 2,4] [--sweep] [--tile 64 --num-warps 4 ...]

Every launch of a captured graph works on another layer's cache, so that none is found in the L2 cache; figures are
medians of replays and include the gaps between launches.  Each launch reads keys and values while the launch before
it ends, as in a step of decodes alone; not so with `--no-reads-early`, as in other steps.  `--sweep` tries launch
parameters on chosen shapes and prints the best of each, and where the defaults rank.  Launch parameters given as
options replace the defaults.  The last line is JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import torch

from engine.kernels.decode_attention import decode_attention
from engine.kernels.decode_plan import DecodePlan, DecodeTuning, allocate_workspace, default_tuning, plan_decode

NUM_KV_HEADS = 8
HEAD_DIM = 128
BLOCK_SIZE = 16
DTYPE = torch.bfloat16
TOKEN_BYTES = 2 * NUM_KV_HEADS * HEAD_DIM * DTYPE.itemsize
LAYER_LIMIT_BYTES = 8 << 30
POOL_BYTES = 12 << 30
ROTATED_BYTES = 512 << 20  # ten times the L2 cache
MAX_LAYERS = 64
BATCHES = (1, 4, 16, 64, 256)
CONTEXTS = (512, 1024, 2048, 8192, 32768, 65536)
SWEPT_TILES = ((16, 2), (32, 2), (32, 4), (64, 2), (64, 4), (64, 8), (128, 4), (128, 8))  # and warps
SWEPT_STAGES = (2, 3, 4)
SWEPT_REGISTERS = (96, 128, 168)
SWEPT_START_US = (1.5, 3.0, 6.0)
SWEPT_SHAPES = ((1, 512), (1, 2048), (1, 8192), (1, 32768), (4, 512), (4, 2048), (16, 512), (16, 2048))
SWEPT_LARGE_SHAPES = ((64, 512), (64, 2048), (64, 8192), (70, 1024), (256, 512), (256, 2048))
SHARED_BYTES = 227 << 10  # of a multiprocessor
LAUNCH_PARAMETERS = "tile, warps, stages, programs, held, busy, spare, start, combine"


@dataclass(frozen=True)
class Shape:
    """A batch of decodes; `contexts` holds the context length of each."""

    name: str
    group: int
    contexts: tuple[int, ...]

    @property
    def read_bytes(self) -> int:
        return sum(self.contexts) * TOKEN_BYTES


def uniform(batch: int, context: int, group: int) -> Shape:
    return Shape(f"G={group} batch {batch:3} x {context}", group, (context,) * batch)


def ragged(batch: int, group: int) -> Shape:
    generator = torch.Generator().manual_seed(0)
    contexts = torch.randint(100, 2001, (batch,), generator=generator).tolist()
    return Shape(f"G={group} batch {batch:3} x 100-2000", group, tuple(contexts))


def replay_us(launches: Callable[[], None], num_launches: int) -> float:
    """Median microseconds of one launch, over replays of a graph that holds `num_launches`."""
    launches()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launches()
    graph.replay()
    times = []
    for _ in range(7):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / num_launches)
    return statistics.median(times)


def read_ceiling(pool: torch.Tensor) -> float:
    """Bytes per second that a sum over a large buffer reads."""
    buffer = pool[: 2 << 30].view(torch.float32)
    return buffer.numel() * buffer.element_size() / replay_us(lambda: buffer.sum(), 1) * 1e6


class Bench:
    """Inputs of one shape in `pool`, timed under any launch parameters."""

    def __init__(self, shape: Shape, pool: torch.Tensor, reads_early: bool) -> None:
        self.shape = shape
        self.reads_early = reads_early
        device, batch = pool.device, len(shape.contexts)
        counts = [-(-context // BLOCK_SIZE) for context in shape.contexts]
        num_blocks = sum(counts)
        block_elements = NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM
        layer_elements = num_blocks * block_elements
        self.num_layers = max(1, min(MAX_LAYERS, pool.numel() // (2 * layer_elements)))
        self.num_layers = min(self.num_layers, max(4, -(-ROTATED_BYTES // shape.read_bytes)))
        caches = pool[: self.num_layers * 2 * layer_elements].view(
            self.num_layers, 2, num_blocks, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM
        )
        self.caches = [(layer[0], layer[1]) for layer in caches]
        blocks = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(1)).to(torch.int32)
        self.block_tables = torch.zeros((batch, max(counts)), dtype=torch.int32)
        slots = []
        for row, (start, count, context) in enumerate(
            zip(itertools.accumulate([0, *counts[:-1]]), counts, shape.contexts, strict=True)
        ):
            self.block_tables[row, :count] = blocks[start : start + count]
            newest = context - 1
            slots.append(int(blocks[start + newest // BLOCK_SIZE]) * BLOCK_SIZE + newest % BLOCK_SIZE)
        self.block_tables = self.block_tables.to(device)
        self.slots = torch.tensor(slots, device=device)
        self.rows = torch.arange(batch, dtype=torch.int32, device=device)
        self.context_lens = torch.tensor(shape.contexts, dtype=torch.int32, device=device)
        self.num_heads = NUM_KV_HEADS * shape.group
        width = (self.num_heads + 2 * NUM_KV_HEADS) * HEAD_DIM
        self.qkv = torch.randn((batch, width), dtype=DTYPE, device=device)
        self.cos, self.sin = torch.randn((2, batch, HEAD_DIM // 2), device=device).unbind()
        self.out = torch.empty((batch, self.num_heads * HEAD_DIM), dtype=DTYPE, device=device)

    def default_tuning(self) -> DecodeTuning:
        return default_tuning(len(self.shape.contexts), HEAD_DIM, DTYPE, torch.device("cuda"))

    def plan(self, tuning: DecodeTuning) -> DecodePlan:
        batch, device = len(self.shape.contexts), self.qkv.device
        workspace = allocate_workspace(batch, self.num_heads, NUM_KV_HEADS, HEAD_DIM, DTYPE, device, tuning)
        plan = plan_decode(self.rows, self.context_lens, workspace, tuning)
        torch.cuda.synchronize()
        return plan

    def attention_us(self, tuning: DecodeTuning) -> float:
        return self.planned_attention_us(self.plan(tuning))

    def planned_attention_us(self, plan: DecodePlan) -> float:
        def all_layers() -> None:
            for keys, values in self.caches:
                decode_attention(
                    self.qkv, keys, values, self.block_tables, plan, self.slots, self.cos, self.sin,
                    None, None, 0.0, self.out, reads_early=self.reads_early,
                )  # fmt: skip

        return replay_us(all_layers, self.num_layers)

    def plan_us(self, tuning: DecodeTuning) -> float:
        workspace = allocate_workspace(
            len(self.shape.contexts), self.num_heads, NUM_KV_HEADS, HEAD_DIM, DTYPE, self.qkv.device, tuning
        )

        def plans() -> None:
            for _ in range(16):
                plan_decode(self.rows, self.context_lens, workspace, tuning)

        return replay_us(plans, 16)


def measure(
    groups: list[int], pool: torch.Tensor, ceiling: float, overrides: dict[str, float], reads_early: bool
) -> list[dict]:
    """The table of all shapes."""
    results = []
    print(f"{'shape':28} {'us':>9} {'GB/s':>7} {'% read':>7} {'plan us':>8}")
    for group in groups:
        shapes = [uniform(batch, context, group) for batch in BATCHES for context in CONTEXTS]
        shapes.append(ragged(256, group))
        for shape in shapes:
            if shape.read_bytes >= LAYER_LIMIT_BYTES:
                continue
            bench = Bench(shape, pool, reads_early)
            tuning = dataclasses.replace(bench.default_tuning(), **overrides)
            us, plan_us = bench.attention_us(tuning), bench.plan_us(tuning)
            rate = shape.read_bytes / us * 1e6
            print(f"{shape.name:28} {us:9.2f} {rate / 1e9:7.0f} {100 * rate / ceiling:7.1f} {plan_us:8.2f}", flush=True)
            results.append({"shape": shape.name, "us": round(us, 2), "share": round(rate / ceiling, 3)})
    return results


def swept_tunings(few: bool) -> list[DecodeTuning]:
    """Launch parameters of which as many programs fit as they say; first tiles are held in small batches only."""
    tunings = {}
    for (tile, warps), stages, held, registers in itertools.product(
        SWEPT_TILES, SWEPT_STAGES, (False, True), SWEPT_REGISTERS
    ):
        row_bytes = 2 * HEAD_DIM * DTYPE.itemsize
        shared_bytes = (stages - 1) * tile * row_bytes + (tile // 2 * row_bytes if held else 0) + 4096
        programs = min(SHARED_BYTES // shared_bytes, 65536 // (registers * warps * 32))
        held_registers = tile * row_bytes // (4 * 32 * warps)
        if programs == 0 or (held and (not few or held_registers > 64)):
            continue
        tuning = DecodeTuning(tile, warps, stages, programs, held, spare_programs=4 if few else 2)
        tunings[dataclasses.astuple(tuning)] = tuning
    return list(tunings.values())


def compile_variants(group: int, tunings: list[DecodeTuning], reads_early: bool) -> None:
    """Launch each once, so that another process finds it compiled."""
    bench = Bench(uniform(1, 64, group), torch.zeros(1 << 22, dtype=DTYPE, device="cuda"), reads_early)
    for tuning in tunings:
        bench.attention_us(tuning)


def compile_all(groups: list[int], tunings: list[DecodeTuning], reads_early: bool) -> None:
    start, workers = time.monotonic(), min(12, os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        for group in groups:
            shares = [tunings[first::workers] for first in range(workers)]
            list(pool.map(compile_variants, itertools.repeat(group), shares, itertools.repeat(reads_early)))
    print(f"{len(tunings)} variants compiled in {time.monotonic() - start:.0f} s", flush=True)


def timed(bench: Bench, tunings: list[DecodeTuning]) -> list[tuple[float, DecodeTuning]]:
    """Each of `tunings` with several estimates of a program's start, fastest first; equal plans are timed once."""
    times = []
    for tuning in tunings:
        known: dict[bytes, float] = {}
        for start_us in SWEPT_START_US:
            variant = dataclasses.replace(tuning, start_us=start_us)
            plan = bench.plan(variant)
            cut = plan.workspace.items[: plan.max_items, :3].cpu().numpy().tobytes()
            if cut not in known:
                known[cut] = bench.planned_attention_us(plan)
                times.append((known[cut], variant))
    return sorted(times, key=lambda entry: entry[0])


def sweep(groups: list[int], pool: torch.Tensor, ceiling: float, reads_early: bool) -> list[dict]:
    """The best launch parameters of the shapes that matter most, and how the defaults compare."""
    results = []
    compile_all(groups, list({*swept_tunings(few=True), *swept_tunings(few=False)}), reads_early)
    for group in groups:
        shapes = [uniform(*size, group) for size in (*SWEPT_SHAPES, *SWEPT_LARGE_SHAPES)]
        for shape in [*shapes, ragged(64, group), ragged(256, group)]:
            bench = Bench(shape, pool, reads_early)
            times = timed(bench, swept_tunings(few=len(shape.contexts) <= 16))
            floor_us, default_us = shape.read_bytes / ceiling * 1e6, bench.attention_us(bench.default_tuning())
            rank = 1 + sum(us < default_us for us, _ in times)
            print(f"{shape.name}: floor {floor_us:.2f} us, default {default_us:.2f} us, rank {rank} of {len(times)}")
            for us, tuning in times[:3]:
                print(f"    {us:9.2f} us {100 * floor_us / us:5.1f} %  {dataclasses.astuple(tuning)}", flush=True)
            best = [[round(us, 2), *dataclasses.astuple(tuning)] for us, tuning in times[:10]]
            results.append({"shape": shape.name, "default_us": round(default_us, 2), "best": best})
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", default="2,4")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--reads-early", action=argparse.BooleanOptionalAction, default=True)
    for field in dataclasses.fields(DecodeTuning):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=float if field.name.endswith("_us") else int)
    options = parser.parse_args()
    groups = [int(group) for group in options.groups.split(",")]
    overrides = {
        field.name: getattr(options, field.name)
        for field in dataclasses.fields(DecodeTuning)
        if getattr(options, field.name) is not None
    }
    pool = torch.empty(POOL_BYTES // DTYPE.itemsize, dtype=DTYPE, device="cuda").normal_()
    ceiling = read_ceiling(pool)
    print(f"{torch.cuda.get_device_name()}, reads {ceiling / 1e9:.0f} GB/s; {LAUNCH_PARAMETERS}")
    early = options.reads_early
    results = sweep(groups, pool, ceiling, early) if options.sweep else measure(groups, pool, ceiling, overrides, early)
    print(json.dumps({"read_gb_s": round(ceiling / 1e9), "results": results}))


if __name__ == "__main__":
    main()
