"""`WaitingQueue`: sequences without a row, in the order they arrived, and who may start next.

A preempted sequence returns to its place by arrival, ahead of everyone younger.  When the head does
not fit, a younger sequence that does may pass it, but only `MAX_BYPASSES` times, so a large prompt
waits longer but never forever.  Called by `engine.core.scheduler`, which decides what fits.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from operator import attrgetter

from engine.core.sequence import Sequence

MAX_BYPASSES = 8
MAX_CANDIDATES_BEHIND_HEAD = 8
"""How many blocked sequences one step looks past; bounds the work of a step while the queue is long."""

by_arrival = attrgetter("arrival")


class WaitingQueue:
    """Sorted by arrival; a list, because even ten thousand pointers move in microseconds."""

    __slots__ = ("_sequences",)

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def push(self, sequence: Sequence) -> None:
        insort(self._sequences, sequence, key=by_arrival)

    def remove(self, sequence: Sequence) -> None:
        del self._sequences[bisect_left(self._sequences, sequence.arrival, key=by_arrival)]

    def admit(self, limit: int, try_start: Callable[[Sequence], bool]) -> list[Sequence]:
        """Remove and return up to `limit` sequences for which `try_start` succeeded, in order of arrival."""
        started: list[Sequence] = []
        waiting = self._sequences
        num_blocked = 0
        while len(started) < limit and num_blocked < min(len(waiting), MAX_CANDIDATES_BEHIND_HEAD + 1):
            if num_blocked and waiting[0].num_bypasses >= MAX_BYPASSES:
                break
            sequence = waiting[num_blocked]
            if not try_start(sequence):
                num_blocked += 1
                continue
            if num_blocked:
                waiting[0].num_bypasses += 1
            sequence.num_bypasses = 0
            started.append(sequence)
            del waiting[num_blocked]
        return started
