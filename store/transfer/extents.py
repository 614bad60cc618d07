"""`Extents`: which stretches of a file are there, as sorted, disjoint, half-open ranges.

Pure arithmetic with no lock; used by the journal, the partial file and the schedule.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator


class Extents:
    """Byte ranges `[start, end)`; neighbours are joined, so a file received in order is one range."""

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self.total_bytes = 0
        for start, end in ranges:
            self.add(start, end)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self._starts, self._ends, strict=True)

    def add(self, start: int, end: int) -> None:
        """Take in a range, whatever of it is there already."""
        if start >= end:
            return
        first = bisect_left(self._ends, start)
        last = bisect_right(self._starts, end)
        if first < last:
            start = min(start, self._starts[first])
            end = max(end, self._ends[last - 1])
            self.total_bytes -= sum(self._ends[first:last]) - sum(self._starts[first:last])
        self._starts[first:last] = [start]
        self._ends[first:last] = [end]
        self.total_bytes += end - start

    def copy(self) -> Extents:
        return Extents(self)

    def clipped(self, size_bytes: int) -> Extents:
        """What of it lies before `size_bytes`."""
        return Extents((start, min(end, size_bytes)) for start, end in self if start < size_bytes)

    @property
    def frontier(self) -> int:
        """How far the file is there without a hole."""
        return self._ends[0] if self._starts and self._starts[0] == 0 else 0

    def gaps(self, size_bytes: int) -> Iterator[tuple[int, int]]:
        """The ranges of a file of `size_bytes` that are missing, in order."""
        position = 0
        for start, end in self:
            if start >= size_bytes:
                break
            if position < start:
                yield position, start
            position = end
        if position < size_bytes:
            yield position, size_bytes
