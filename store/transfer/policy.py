"""How patient a download is, as plain numbers.

Chosen by `pull` (and shortened by tests), read by every part of `store.transfer`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """`attempts` in a row that bring no byte end the download; delays double from the first to the last."""

    attempts: int = 6
    first_delay_s: float = 0.5
    max_delay_s: float = 8.0
    connect_timeout_s: float = 10.0
    stall_timeout_s: float = 30.0

    def delay_s(self, failures: int) -> float:
        """Seconds to wait after `failures` attempts in a row that brought nothing."""
        return min(self.max_delay_s, self.first_delay_s * 2.0 ** max(failures - 1, 0))
