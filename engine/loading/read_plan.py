"""How a list of stored tensors is read: large sequential pieces of files, each with the parts of tensors in it.

Pure arithmetic.  Checkpoints say where their tensors lie (`StoredTensor`); `engine.loading.weight_stream`
reads by the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor whose values lie in a file as they are: `num_bytes` of `dtype` from byte `offset`, row by row."""

    name: str
    path: Path
    offset: int
    num_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """`num_bytes` of `tensor`: from its byte `start`, at byte `position` of a piece."""

    tensor: StoredTensor
    start: int
    position: int
    num_bytes: int

    @property
    def is_first(self) -> bool:
        return self.start == 0

    @property
    def is_last(self) -> bool:
        return self.start + self.num_bytes == self.tensor.num_bytes


@dataclass(frozen=True, slots=True)
class Piece:
    """`num_bytes` of a file from `offset`, covered by `parts` in order."""

    path: Path
    offset: int
    num_bytes: int
    parts: tuple[Part, ...]


def plan_pieces(tensors: Sequence[StoredTensor], piece_bytes: int) -> list[Piece]:
    """Cut the tensors, in their order, into pieces of at most `piece_bytes`.

    Neighbours in a file share pieces, large tensors span several; nothing between tensors is read.
    """
    pieces: list[Piece] = []
    parts: list[Part] = []
    filled_bytes = 0

    def finish() -> None:
        nonlocal filled_bytes
        if parts:
            first = parts[0]
            pieces.append(Piece(first.tensor.path, first.tensor.offset + first.start, filled_bytes, tuple(parts)))
        parts.clear()
        filled_bytes = 0

    for tensor in tensors:
        if parts and not _follows(tensor, parts[-1].tensor):
            finish()
        start = 0
        while start < tensor.num_bytes or not tensor.num_bytes:
            if filled_bytes == piece_bytes:
                finish()
            num_bytes = min(tensor.num_bytes - start, piece_bytes - filled_bytes)
            parts.append(Part(tensor, start, filled_bytes, num_bytes))
            filled_bytes += num_bytes
            start += num_bytes
            if not tensor.num_bytes:
                break
    finish()
    return pieces


def _follows(tensor: StoredTensor, previous: StoredTensor) -> bool:
    return tensor.path == previous.path and tensor.offset == previous.offset + previous.num_bytes
