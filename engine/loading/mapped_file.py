"""A file's bytes as one tensor over a private memory map: nothing is read until it is touched."""

from __future__ import annotations

import mmap
from pathlib import Path

import torch


class MappedFile:
    """Typed views into the map of one file, which is not empty; the map lives as long as any view of it."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            # Private: a write, which nobody makes, would not reach the file.  torch warns of read-only maps.
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)

    @property
    def num_bytes(self) -> int:
        return len(self._bytes)

    def view(self, offset: int, num_bytes: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        """`num_bytes` from `offset` as a flat tensor of `dtype`; copied only if not aligned to it."""
        if offset % dtype.itemsize or num_bytes == 0:
            return self._bytes.narrow(0, offset, num_bytes).clone().view(dtype)
        return torch.frombuffer(self._map, dtype=dtype, count=num_bytes // dtype.itemsize, offset=offset)

    def release(self, offset: int, num_bytes: int) -> None:
        """Let go of the pages within these bytes, where the system can; views read them anew if they must."""
        start = offset + -offset % mmap.PAGESIZE
        end = (offset + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if end > start and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED, start, end - start)
