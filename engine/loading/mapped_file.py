"""A file's bytes as one tensor over a private memory map: nothing is read until it is touched."""

from __future__ import annotations

from pathlib import Path

import torch


class MappedFile:
    """Typed views into the map of one file; the map lives as long as any view of it."""

    def __init__(self, path: Path) -> None:
        self._bytes = torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)

    def view(self, offset: int, num_bytes: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        """`num_bytes` from `offset` as a flat tensor of `dtype`; copied only if not aligned to it."""
        part = self._bytes.narrow(0, offset, num_bytes)
        if offset % dtype.itemsize:
            part = part.clone()
        return part.view(dtype)
