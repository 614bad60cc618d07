"""`RateLimit`: one token bucket for all connections of one pull, or of several.

Counts bytes after they arrived and says how long to wait before asking for more; waiting is the
caller's business, because only it knows how to be interrupted.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

_BURST_S = 0.25


class RateLimit:
    """At most `bytes_per_s` over any longer while; a quarter of a second's worth may come at once."""

    def __init__(self, bytes_per_s: int, clock: Callable[[], float] = time.monotonic) -> None:
        if bytes_per_s <= 0:
            raise ValueError("a rate limit is at least 1 byte per second")
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._lock = threading.Lock()
        self._free_from_s = 0.0
        """When the bytes counted so far will have been paid for."""

    def delay_s(self, num_bytes: int) -> float:
        """Count bytes that have arrived; seconds to wait before the next are asked for."""
        with self._lock:
            now = self._clock()
            self._free_from_s = max(self._free_from_s, now - _BURST_S) + num_bytes / self._bytes_per_s
            return max(0.0, self._free_from_s - now)
