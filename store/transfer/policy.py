"""How patient a download is and how it cuts up the work, as plain numbers.

Chosen by `pull` (and shortened by tests), read by every part of `store.transfer`.
"""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class TransferShape:
    """How the work is cut up: `connections` at once, each fetching `range_bytes` at a time."""

    connections: int = 4
    range_bytes: int = 32 * MIB
    min_split_bytes: int = 4 * MIB
    """A range that lags behind at the end is shared with an idle connection in parts no smaller than this."""
    split_after_s: float = 2.0
    """Only if it would take longer than this."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """`attempts` in a row that bring no byte end the download; delays double from the first to the last.

    An address that is not the last one is given up after `failover_attempts`.  A connection that brings less than
    `slow_bytes_per_s` over `slow_window_s` is replaced.
    """

    attempts: int = 6
    failover_attempts: int = 2
    first_delay_s: float = 0.5
    max_delay_s: float = 8.0
    connect_timeout_s: float = 10.0
    stall_timeout_s: float = 30.0
    slow_bytes_per_s: int = 4096
    slow_window_s: float = 20.0

    def delay_s(self, failures: int) -> float:
        """Seconds to wait after `failures` attempts in a row that brought nothing."""
        return min(self.max_delay_s, self.first_delay_s * 2.0 ** max(failures - 1, 0))
