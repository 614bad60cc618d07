"""Compiled attention on the CPU: microseconds of one layer, bytes of keys and values read and operations per second.

    python benchmarks/kernels/cpu_attention.py [--threads 1] [--shapes 9/3/64] [--dtype float16] [--filter prompt]

A program of many layers, each with a cache of its own, so that keys and values come from where they would in a step
of a whole model.  Figures are the fastest of several repeats, per layer, storing of keys and values included.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("QUIRE_CODE_CACHE", str(Path(tempfile.gettempdir()) / "quire-cpu-attention"))

import numpy as np
import torch

from engine.attention.backend import AttentionSpec, CacheSpec
from engine.attention.compiled_paged import CompiledPagedAttention
from engine.cpu.program import Capacity, Recorder, Rows
from engine.cpu.step import NUM_SEQUENCES, NUM_TOKENS, STEP_SIZE
from engine.cpu.team import Team
from engine.layers.rotary import Rotation

MAX_TOKENS = 2048
BLOCK_SIZE = 16
LAYERS_BYTES = 512 << 20
MAX_LAYERS = 30


@dataclass(frozen=True)
class Case:
    """Sequences as (context length, tokens computed)."""

    name: str
    sequences: tuple[tuple[int, int], ...]

    @property
    def tokens(self) -> int:
        return sum(count for _, count in self.sequences)

    @property
    def context(self) -> int:
        return sum(context for context, _ in self.sequences)

    @property
    def scores(self) -> int:
        """Pairs of a token and one that it sees."""
        return sum(count * (context - count) + count * (count + 1) // 2 for context, count in self.sequences)


CASES = (
    Case("decode 1 x 20", ((20, 1),)),
    Case("decode 1 x 500", ((500, 1),)),
    Case("decode 1 x 4000", ((4000, 1),)),
    Case("decode 16 x 500", ((500, 1),) * 16),
    Case("prompt 64", ((64, 64),)),
    Case("prompt 512", ((512, 512),)),
    Case("prompt 2048", ((2048, 2048),)),
    Case("prompt 256 after 4096", ((4352, 256),)),
)


class Layers:
    """As many layers of one shape as memory is given for."""

    def __init__(self, shape: tuple[int, int, int], dtype: torch.dtype, team: Team) -> None:
        self.num_heads, self.num_kv_heads, self.head_dim = shape
        rows = max(len(case.sequences) for case in CASES)
        blocks_per_row = -(-max(context for case in CASES for context, _ in case.sequences) // BLOCK_SIZE)
        bytes_per_layer = 2 * self.num_kv_heads * self.head_dim * dtype.itemsize * rows * blocks_per_row * BLOCK_SIZE
        self.count = min(MAX_LAYERS, max(1, LAYERS_BYTES // bytes_per_layer))
        self.token_bytes = 2 * self.num_kv_heads * self.head_dim * dtype.itemsize
        spec = AttentionSpec(CacheSpec(self.count, self.num_kv_heads, self.head_dim, BLOCK_SIZE, dtype), shape[0], rows)
        backend = CompiledPagedAttention(spec, torch.device("cpu"))
        backend.allocate(rows * blocks_per_row)
        self._tables = torch.randperm(rows * blocks_per_row).int().view(rows, blocks_per_row)
        row_table = Rows(0, 0, self._tables.data_ptr(), 4 * blocks_per_row)
        recorder = Recorder(Capacity(MAX_TOKENS, rows, 1), row_table, team.size)
        self._qkv = recorder.buffer((self.num_heads + 2 * self.num_kv_heads) * self.head_dim)
        cos, sin = recorder.buffer(self.head_dim // 2), recorder.buffer(self.head_dim // 2)
        backend.record_on(recorder)
        started = time.perf_counter()
        for layer in range(self.count):
            backend.attend(layer, self._qkv, Rotation(cos, sin), None)
        self._program = recorder.finish()
        self.compile_s = time.perf_counter() - started
        for handle, value in ((self._qkv, 0.1), (cos, 0.6), (sin, 0.8)):
            recorder.view(handle).fill_(value)
        slots = np.ctypeslib.as_array((ctypes.c_int64 * MAX_TOKENS).from_address(recorder.slots))
        self._slots, self._records = slots, recorder.sequence_records
        self._recorder, self._team = recorder, team

    def time_us(self, case: Case, seconds: float) -> float:
        """The fastest step, per layer."""
        first = 0
        for row, (context, count) in enumerate(case.sequences):
            self._records[row] = row, context - count, count, first
            positions = np.arange(context - count, context)
            blocks = self._tables[row].numpy()[positions // BLOCK_SIZE].astype(np.int64)
            self._slots[first : first + count] = blocks * BLOCK_SIZE + positions % BLOCK_SIZE
            first += count
        step = np.zeros(STEP_SIZE, dtype=np.int64)
        step[NUM_TOKENS], step[NUM_SEQUENCES] = first, len(case.sequences)
        inputs = self._recorder.view(self._qkv)
        best = float("inf")
        self._program.run(self._team, step)
        deadline = time.perf_counter() + seconds
        while time.perf_counter() < deadline:
            inputs[:first].normal_()
            started = time.perf_counter()
            self._program.run(self._team, step)
            best = min(best, time.perf_counter() - started)
        return best / self.count * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--shapes", default="9/3/64,32/8/64,16/8/128", help="heads/KV heads/head_dim, ...")
    parser.add_argument("--dtype", default="float16", choices=("float16", "float32"))
    parser.add_argument("--filter", default="", help="only cases with this in their name")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each figure")
    options = parser.parse_args()
    team = Team(options.threads)
    results = []
    print(f"{'shape':>10} {'case':<22} {'us':>9} {'GB/s':>7} {'GFLOP/s':>8}")
    for text in options.shapes.split(","):
        heads, kv_heads, head_dim = (int(part) for part in text.split("/"))
        layers = Layers((heads, kv_heads, head_dim), getattr(torch, options.dtype), team)
        print(f"{text:>10} {layers.count} layers, compiled or found in {layers.compile_s:.2f} s")
        for case in CASES:
            if options.filter not in case.name:
                continue
            us = layers.time_us(case, options.seconds)
            gb_per_s = case.context * layers.token_bytes / us / 1e3
            gflop_per_s = 4 * case.scores * heads * head_dim / us / 1e3
            print(f"{text:>10} {case.name:<22} {us:9.1f} {gb_per_s:7.1f} {gflop_per_s:8.1f}", flush=True)
            results.append(
                {"shape": text, "case": case.name, "us": us, "gb_per_s": gb_per_s, "gflop_per_s": gflop_per_s}
            )
    print(json.dumps({"threads": options.threads, "dtype": options.dtype, "results": results}))


if __name__ == "__main__":
    main()
