"""One block of memory for pieces that are alive at different times: where in it each of them lies.

Knows only numbers, and allocates nothing.  Called by `engine.cpu.program` when a step has been recorded.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

ALIGNMENT = 64
"""All offsets are multiples of it: a cache line, and the largest vector."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Memory of `num_bytes`, at least one, that is in use from instruction `first` to `last`, both included."""

    num_bytes: int
    first: int
    last: int


def place(pieces: Sequence[Piece]) -> tuple[list[int], int]:
    """An offset for each piece, such that no two in use at once overlap, and the bytes that all of them take.

    The largest piece first, each as low as it fits ("greedy by size", Pisarchyk and Lee 2020,
    https://arxiv.org/abs/2001.03288, section 5.2): small ones fill the gaps that large ones leave.
    """
    offsets, num_bytes = [0] * len(pieces), 0
    in_use: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for index in sorted(range(len(pieces)), key=lambda index: -pieces[index].num_bytes):
        piece, start = pieces[index], 0
        life = range(piece.first, piece.last + 1)
        for other_start, other_end in sorted({span for instruction in life for span in in_use[instruction]}):
            if other_start - start >= piece.num_bytes:
                break
            start = max(start, other_end)
        end = start + piece.num_bytes + -piece.num_bytes % ALIGNMENT
        for instruction in life:
            in_use[instruction].append((start, end))
        offsets[index] = start
        num_bytes = max(num_bytes, end)
    return offsets, num_bytes
