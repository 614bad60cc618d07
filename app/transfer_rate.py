"""`RateMeter`: bytes per second over the last seconds, and how long the rest takes.

Used for jobs by the daemon and for plain lines by `app.cli`; knows neither.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

_MIN_INTERVAL_S = 0.25


class RateMeter:
    """Counts that only grow, looked at over a window of `window_s` seconds."""

    def __init__(self, window_s: float = 10.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._window_s = window_s
        self._clock = clock
        self._counts: deque[tuple[float, int]] = deque()

    def add(self, done_bytes: int) -> None:
        """Take note of how many bytes there are now; those of the first call cost no time."""
        now_s = self._clock()
        if len(self._counts) > 1 and now_s - self._counts[-2][0] < _MIN_INTERVAL_S:
            self._counts.pop()
        self._counts.append((now_s, done_bytes))
        while len(self._counts) > 2 and now_s - self._counts[1][0] > self._window_s:
            self._counts.popleft()

    @property
    def bytes_per_s(self) -> int:
        """0 while there is nothing to compare, or when nothing has come for a whole window."""
        if len(self._counts) < 2:
            return 0
        (first_s, first_bytes), (_, last_bytes) = self._counts[0], self._counts[-1]
        elapsed_s = self._clock() - first_s
        return int((last_bytes - first_bytes) / elapsed_s) if elapsed_s > 0 else 0

    def seconds_left(self, left_bytes: int) -> int | None:
        """None while nobody can tell."""
        rate = self.bytes_per_s
        return round(left_bytes / rate) if rate > 0 else None
