"""Splits a device's memory: pure arithmetic from a byte budget to a number of KV cache blocks.

Called while an engine is built, after the weights are loaded; the figures come from
`engine.runner.device`.  The rule: what the budget leaves after weights, workspace, captured
graphs and the driver's own share becomes blocks, never more than is really free, and never more
than all sequences could use at full length.  When that cannot hold one full context, the context
shrinks; whatever shrinks, a note says so.  Only no room for a single block is an error.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine.api.errors import InsufficientMemory
from engine.attention.backend import CacheSpec

MIB = 2**20
GIB = 2**30

OUTSIDE_BYTES_GUESS = 600 * MIB
"""What the driver holds for a process where it cannot be measured: a CUDA context, cuBLAS and loaded kernels."""

_PLAUSIBLE_OUTSIDE_BYTES = range(64 * MIB, 4 * GIB)


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """What an engine holds besides its KV cache, in bytes.

    `workspace_peak`: activations of the largest step; `graphs_reserve`: kept for captured CUDA graphs;
    `outside`: what the driver and libraries hold beside; on a CPU, what the process holds itself; `rounding`: what the
    cache may take beyond its blocks.
    """

    weights: int
    workspace_peak: int = 0
    graphs_reserve: int = 0
    outside: int = 0
    rounding: int = 0

    @property
    def total_bytes(self) -> int:
        return self.weights + self.workspace_peak + self.graphs_reserve + self.outside + self.rounding

    def describe(self, *, budget_bytes: int, cache_bytes: int) -> str:
        """The whole split in one line for the log."""
        parts = (
            ("weights", self.weights),
            ("workspace", self.workspace_peak),
            ("graphs", self.graphs_reserve),
            ("driver and libraries", self.outside),
            ("KV cache", cache_bytes + self.rounding),
        )
        listed = ", ".join(f"{name} {size / GIB:.2f}" for name, size in parts)
        return f"Memory budget {budget_bytes / GIB:.2f} GiB: {listed} GiB"


@dataclass(frozen=True, slots=True)
class CachePlan:
    """`num_blocks` of KV cache for contexts of up to `max_model_len` tokens; `notes` are sentences for people.

    The cache may grow to `max_blocks` later, and contexts then to `longest_model_len`.  `fixed_bytes` is what the
    engine holds besides the cache.
    """

    num_blocks: int
    max_model_len: int
    max_blocks: int
    longest_model_len: int
    fixed_bytes: int
    notes: tuple[str, ...] = ()


def absolute_budget_bytes(total_bytes: int, utilization: float, given_bytes: int | None) -> int:
    """What an engine may use of a device: the absolute budget it was given, else its share of the total."""
    return given_bytes if given_bytes is not None else math.floor(total_bytes * utilization)


def choose_outside_bytes(known_bytes: int, process_bytes: int | None, growth_bytes: int | None) -> int:
    """What this process holds that nobody accounts for, from figures of which any may be missing or wrong.

    `known_bytes` is what torch's allocator and arenas hold, `process_bytes` what the driver books on this process,
    `growth_bytes` how much more of the device is in use than before this process touched it.  Containers
    hide processes or number them differently, and other programs come and go meanwhile: a figure that
    leaves an implausible rest is passed over, and `OUTSIDE_BYTES_GUESS` stands in for the last one.
    """
    for held_bytes in (process_bytes, growth_bytes):
        if held_bytes is not None and held_bytes - known_bytes in _PLAUSIBLE_OUTSIDE_BYTES:
            return held_bytes - known_bytes
    return OUTSIDE_BYTES_GUESS


def plan_cache(
    spec: CacheSpec,
    *,
    budget_bytes: int,
    used_bytes: int,
    max_num_seqs: int,
    max_model_len: int,
    num_blocks: int | None = None,
    max_cache_bytes: int | None = None,
    reachable_bytes: int | None = None,
    device_bytes: int = 0,
) -> CachePlan:
    """Plan the KV cache.

    `used_bytes` is what everything else takes of the budget (`MemoryUse.total_bytes`).  `num_blocks`
    overrides the computed number; `max_cache_bytes` bounds it.  Later the cache may grow as far as the whole device,
    `device_bytes`, allows; without that figure it may not.  `reachable_bytes` is what this process
    could hold in all at this moment (`device.reachable_memory_bytes`); where that is less than the
    budget, because others hold the rest, it takes the budget's place.  Raises `InsufficientMemory`.
    """
    notes: list[str] = []
    useful_blocks = max_num_seqs * -(-max_model_len // spec.block_size)
    if num_blocks is None:
        most_blocks = useful_blocks
        if max_cache_bytes is not None:
            most_blocks = min(most_blocks, max(1, max_cache_bytes // spec.bytes_per_block))
        num_blocks = wanted_blocks = min(most_blocks, _blocks_within_budget(spec, budget_bytes, used_bytes))
        if reachable_bytes is not None:
            num_blocks = min(wanted_blocks, _blocks_within_reach(spec, reachable_bytes, used_bytes))
        if num_blocks < wanted_blocks:
            notes.append(
                "The device has less free memory than the budget allows, so the KV cache gets "
                f"{num_blocks * spec.bytes_per_block / GIB:.2f} GiB instead of "
                f"{wanted_blocks * spec.bytes_per_block / GIB:.2f}."
            )
    max_blocks = max(num_blocks, min(useful_blocks, (device_bytes - used_bytes) // spec.bytes_per_block))
    longest_model_len = min(max_model_len, max_blocks * spec.block_size)
    if num_blocks * spec.block_size < max_model_len:
        shrunk_len = num_blocks * spec.block_size
        notes.append(
            f"The KV cache holds {shrunk_len:,} tokens, so the context is limited to that instead of {max_model_len:,}."
        )
        max_model_len = shrunk_len
    return CachePlan(num_blocks, max_model_len, max_blocks, longest_model_len, used_bytes, tuple(notes))


def _blocks_within_budget(spec: CacheSpec, budget_bytes: int, used_bytes: int) -> int:
    num_blocks = (budget_bytes - used_bytes) // spec.bytes_per_block
    if num_blocks < 1:
        raise InsufficientMemory(
            f"The memory budget of {budget_bytes / GIB:.2f} GiB is used up by weights and workspace "
            f"({used_bytes / GIB:.2f} GiB), which leaves no KV cache; raise gpu_memory_utilization "
            "or choose a smaller model."
        )
    return num_blocks


def _blocks_within_reach(spec: CacheSpec, reachable_bytes: int, used_bytes: int) -> int:
    num_blocks = (reachable_bytes - used_bytes) // spec.bytes_per_block
    if num_blocks < 1:
        raise InsufficientMemory(
            f"Other programs leave {reachable_bytes / GIB:.2f} GiB of the device's memory, which weights and workspace "
            f"({used_bytes / GIB:.2f} GiB) use up; stop some of them or choose a smaller model."
        )
    return num_blocks
