"""What a long operation of the store reports, and how it is told to stop.

`PullProgress` is one report.  `Reporter` pairs the caller's two callbacks and thins out byte
counts, so that whoever draws a bar is called a few times a second whatever the link's speed.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from store.errors import Cancelled

_MIN_INTERVAL_S = 0.1


class PullProgress(msgspec.Struct, frozen=True):
    """`status` is a phrase for people; byte counts are 0 while there is nothing to count."""

    status: str
    file: str | None = None
    total_bytes: int = 0
    done_bytes: int = 0


ProgressCallback = Callable[[PullProgress], None]
CancelCheck = Callable[[], bool]


class Reporter:
    """One operation's line to its caller."""

    def __init__(self, on_progress: ProgressCallback, is_cancelled: CancelCheck) -> None:
        self._on_progress = on_progress
        self._is_cancelled = is_cancelled
        self._reported_at = 0.0
        self._counting: tuple[str, str] | None = None

    def say(self, status: str) -> None:
        self._on_progress(PullProgress(status=status))

    def count(self, status: str, file: str, done_bytes: int, total_bytes: int) -> None:
        """Report bytes; reports between a file's first and last may be dropped."""
        now = time.monotonic()
        is_new = self._counting != (status, file)
        if not is_new and done_bytes < total_bytes and now - self._reported_at < _MIN_INTERVAL_S:
            return
        self._reported_at = now
        self._counting = (status, file)
        self._on_progress(PullProgress(status=status, file=file, total_bytes=total_bytes, done_bytes=done_bytes))

    def raise_if_cancelled(self) -> None:
        if self._is_cancelled():
            raise Cancelled("The download was stopped; what has arrived is kept and the next `quire pull` resumes it.")

    def wait(self, seconds: float) -> None:
        """Sleep in short steps so that a cancellation is seen soon."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self.raise_if_cancelled()
            time.sleep(min(left, 0.1))
