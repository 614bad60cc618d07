"""Zeroed bytes of the CPU's memory at addresses that stay, of which only what is used takes memory.

What a KV cache that grows and shrinks lies in: recorded programs hold its addresses.  The system maps a page when it
is first touched, and takes pages back that are given up.  Used by the attention backends of the CPU.
"""

from __future__ import annotations

import mmap
import sys

import torch

from engine.attention.backend import CacheSpec, no_room_for_cache

CAN_RESERVE = hasattr(mmap, "MAP_ANONYMOUS")
"""Whether addresses cost nothing until they are used; on Windows they count as memory at once."""

_LARGE_PAGE_BYTES = 2 << 20
# Python names it from 3.13 on.
_NO_RESERVE: int = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)


class ReservedMemory:
    """`bytes`, uint8 [num_bytes], all zero at first.  Raises `OSError` or `OverflowError` where there is no room.

    They begin where a large page may, so that what is used first fills one instead of touching two.  The addresses
    live as long as any view of them.
    """

    def __init__(self, num_bytes: int) -> None:
        size = num_bytes + _LARGE_PAGE_BYTES
        if CAN_RESERVE:
            self._map = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
        else:
            self._map = mmap.mmap(-1, size)
        whole = torch.frombuffer(self._map, dtype=torch.uint8)
        self._start = -whole.data_ptr() % _LARGE_PAGE_BYTES
        self.bytes = whole[self._start : self._start + num_bytes]

    def release(self, first: int, end: int) -> None:
        """Give whole pages within bytes [first, end) back to the system; they read as zeros again.

        Where the system takes nothing back, they stay as they are.
        """
        start = -(-(self._start + first) // mmap.PAGESIZE) * mmap.PAGESIZE
        stop = (self._start + end) // mmap.PAGESIZE * mmap.PAGESIZE
        if start < stop and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED, start, stop - start)


def reserve_cache(spec: CacheSpec, num_blocks: int, max_blocks: int | None) -> ReservedMemory:
    """Addresses for `max_blocks` of KV cache, or for `num_blocks` where the system has no more to give.

    Raises `InsufficientMemory`.
    """
    if max_blocks is not None and max_blocks > num_blocks and CAN_RESERVE:
        try:
            return ReservedMemory(max_blocks * spec.bytes_per_block)
        except OSError:
            # The system counts addresses as memory (vm.overcommit_memory=2).
            pass
    try:
        return ReservedMemory(num_blocks * spec.bytes_per_block)
    except (OSError, OverflowError) as error:
        raise no_room_for_cache(spec, num_blocks) from error
