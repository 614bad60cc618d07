"""Sizes the KV cache: pure arithmetic from a byte budget to a number of blocks.

Called by `engine.loop` after the weights are loaded.  The rule: what the budget leaves after
weights and workspace becomes blocks, never more than all sequences could use at full length.
When the budget cannot hold one full context, the context shrinks and a note says so; only a
budget without room for a single block is an error.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.api.errors import InsufficientMemory
from engine.attention.backend import CacheSpec

GIB = 2**30


@dataclass(frozen=True, slots=True)
class CachePlan:
    """`num_blocks` of KV cache for contexts of up to `max_model_len` tokens; `notes` are sentences for people."""

    num_blocks: int
    max_model_len: int
    notes: tuple[str, ...]


def plan_cache(
    spec: CacheSpec,
    *,
    budget_bytes: int,
    used_bytes: int,
    max_num_seqs: int,
    max_model_len: int,
    num_blocks: int | None = None,
    max_cache_bytes: int | None = None,
) -> CachePlan:
    """Plan the KV cache.

    `used_bytes` is what weights and workspace take of the budget.  `num_blocks` overrides the
    computed number; `max_cache_bytes` bounds it.  Raises `InsufficientMemory`.
    """
    notes: list[str] = []
    if num_blocks is None:
        num_blocks = (budget_bytes - used_bytes) // spec.bytes_per_block
        if num_blocks < 1:
            raise InsufficientMemory(
                f"The memory budget of {budget_bytes / GIB:.2f} GiB is used up by weights and workspace "
                f"({used_bytes / GIB:.2f} GiB), which leaves no KV cache; raise gpu_memory_utilization "
                "or choose a smaller model."
            )
        if max_cache_bytes is not None and num_blocks * spec.bytes_per_block > max_cache_bytes:
            num_blocks = max(1, max_cache_bytes // spec.bytes_per_block)
        blocks_per_sequence = -(-max_model_len // spec.block_size)
        num_blocks = min(num_blocks, max_num_seqs * blocks_per_sequence)
    if num_blocks * spec.block_size < max_model_len:
        shrunk_len = num_blocks * spec.block_size
        notes.append(
            f"The KV cache holds {shrunk_len:,} tokens, so the context is limited to that instead of {max_model_len:,}."
        )
        max_model_len = shrunk_len
    return CachePlan(num_blocks, max_model_len, tuple(notes))
