"""Decode attention: microseconds and GB/s of keys and values read, against a copy on the same GPU.

    python benchmarks/kernels/decode_attention.py [--groups 2,4] [--sweep] [--tile 64 --num-warps 4 ...]

Every launch of a captured graph works on another layer's cache, so that none is found in the L2 cache; figures are
medians of replays and include the gaps between launches.  `--sweep` tries launch parameters on chosen shapes and
prints the best of each.  Launch parameters given as options replace those of the heuristic.  With `--reads-early`
each launch reads keys and values while the launch before it ends, as in a step of decodes alone.  The last line is
JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.kernels.decode_attention import decode_attention
from engine.kernels.decode_plan import DecodeTuning, allocate_workspace, default_tuning, plan_decode

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
SWEPT_TILES = ((32, 2, 4), (32, 4, 4), (32, 4, 6), (64, 4, 3), (64, 4, 4), (64, 8, 3), (128, 8, 3))
SWEPT_HELD_TILES = ((32, 4, 3), (32, 8, 3), (64, 4, 3), (64, 8, 3))
SWEPT_SPLITS = ((2, 1), (2, 2), (4, 2), (4, 4), (8, 2))


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


def copy_ceiling(pool: torch.Tensor) -> float:
    """Bytes read and written per second by a large copy."""
    half = min(pool.numel() // 2, 1 << 30)
    source, target = pool[:half], pool[half : 2 * half]
    return 2 * half * pool.element_size() / replay_us(lambda: target.copy_(source), 1) * 1e6


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
        return default_tuning(len(self.shape.contexts), HEAD_DIM, DTYPE)

    def attention_us(self, tuning: DecodeTuning) -> float:
        batch, device = len(self.shape.contexts), self.qkv.device
        workspace = allocate_workspace(batch, self.num_heads, NUM_KV_HEADS, HEAD_DIM, DTYPE, device, tuning)
        plan = plan_decode(self.rows, self.context_lens, workspace, tuning)
        rotation = (self.cos, self.sin)
        tables, slots, out = self.block_tables, self.slots, self.out

        def all_layers() -> None:
            for keys, values in self.caches:
                decode_attention(
                    self.qkv,
                    keys,
                    values,
                    tables,
                    plan,
                    slots,
                    *rotation,
                    None,
                    None,
                    0.0,
                    out,
                    reads_early=self.reads_early,
                )

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
    groups: list[int], pool: torch.Tensor, ceiling: float, overrides: dict[str, int], reads_early: bool
) -> list[dict]:
    """The table of all shapes."""
    results = []
    print(f"{'shape':28} {'us':>9} {'GB/s':>7} {'% copy':>7} {'plan us':>8}")
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
            results.append({"shape": shape.name, "us": round(us, 2), "share_of_copy": round(rate / ceiling, 3)})
    return results


def sweep(groups: list[int], pool: torch.Tensor, ceiling: float, reads_early: bool) -> list[dict]:
    """The best launch parameters of the shapes that matter most, and how the heuristic compares."""
    results = []
    for group in groups:
        uniforms = [(1, 512), (1, 32768), (4, 2048), (16, 1024), (64, 1024), (256, 512), (256, 1024)]
        for shape in [*(uniform(batch, context, group) for batch, context in uniforms), ragged(256, group)]:
            bench = Bench(shape, pool, reads_early)
            times: list[tuple[float, DecodeTuning]] = []
            tiles = [(*tile, False) for tile in SWEPT_TILES] + [(*tile, True) for tile in SWEPT_HELD_TILES]
            for (tile, warps, stages, held), (programs, items) in itertools.product(tiles, SWEPT_SPLITS):
                tuning = DecodeTuning(tile, warps, stages, programs, items, held)
                times.append((bench.attention_us(tuning), tuning))
            times.sort(key=lambda timed: timed[0])
            standard_us = bench.attention_us(bench.default_tuning())
            print(f"{shape.name}: heuristic {standard_us:.2f} us, {100 * floor_us(shape, ceiling) / standard_us:.1f} %")
            for us, tuning in times[:5]:
                share = 100 * floor_us(shape, ceiling) / us
                print(f"    {us:9.2f} us {share:5.1f} %  {dataclasses.astuple(tuning)}", flush=True)
            best_us, best = times[0]
            results.append({"shape": shape.name, "us": round(best_us, 2), "tuning": dataclasses.astuple(best)})
    return results


def floor_us(shape: Shape, ceiling: float) -> float:
    return shape.read_bytes / ceiling * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", default="2,4")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--reads-early", action="store_true")
    for field in dataclasses.fields(DecodeTuning):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=int)
    options = parser.parse_args()
    groups = [int(group) for group in options.groups.split(",")]
    overrides = {
        field.name: getattr(options, field.name)
        for field in dataclasses.fields(DecodeTuning)
        if getattr(options, field.name) is not None
    }
    pool = torch.empty(POOL_BYTES // DTYPE.itemsize, dtype=DTYPE, device="cuda").normal_()
    ceiling = copy_ceiling(pool)
    print(f"{torch.cuda.get_device_name()}, copy {ceiling / 1e9:.0f} GB/s; tile, warps, stages, programs, items, held")
    early = options.reads_early
    results = sweep(groups, pool, ceiling, early) if options.sweep else measure(groups, pool, ceiling, overrides, early)
    print(json.dumps({"copy_gb_s": round(ceiling / 1e9), "results": results}))


if __name__ == "__main__":
    main()
