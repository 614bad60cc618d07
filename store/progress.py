"""What a long operation of the store reports, and how it is told to stop.

`PullProgress` is one report.  `Reporter` pairs the caller's two callbacks and thins out byte
counts, so that whoever draws a bar is called a few times a second whatever the link's speed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from store.errors import Cancelled

_MIN_INTERVAL_S = 0.1


class PullProgress(msgspec.Struct, frozen=True):
    """`status` is a phrase for people; byte counts are 0 while there is nothing to count.

    Reports of several files interleave.  The `all_` counts are of every file of the pull, those of `file` included.
    """

    status: str
    file: str | None = None
    total_bytes: int = 0
    done_bytes: int = 0
    all_total_bytes: int = 0
    all_done_bytes: int = 0


ProgressCallback = Callable[[PullProgress], None]
CancelCheck = Callable[[], bool]


@dataclass(slots=True)
class _Counted:
    """What was last heard of one file."""

    total_bytes: int
    done_bytes: int = 0
    reported: tuple[str, int] | None = None
    """Status and count of the latest report."""
    reported_at: float = 0.0


class Reporter:
    """One operation's line to its caller.  Used from one thread."""

    def __init__(self, on_progress: ProgressCallback, is_cancelled: CancelCheck) -> None:
        self._on_progress = on_progress
        self._is_cancelled = is_cancelled
        self._files: dict[str, _Counted] = {}

    def say(self, status: str) -> None:
        self._on_progress(PullProgress(status=status))

    def expect(self, sizes: Mapping[str, int], arrived: Mapping[str, int] | None = None) -> None:
        """Files, by label, that the whole consists of, and how much of each is here already, in bytes.

        More may be added as they become known.
        """
        for file, size_bytes in sizes.items():
            counted = self._files.setdefault(file, _Counted(size_bytes))
            counted.total_bytes = size_bytes
            counted.done_bytes = max(counted.done_bytes, (arrived or {}).get(file, 0))

    def count(self, status: str, file: str, done_bytes: int, total_bytes: int) -> None:
        """Report bytes of one file; reports between its first and last of one status may be dropped."""
        counted = self._files.setdefault(file, _Counted(total_bytes))
        now = time.monotonic()
        is_new = counted.reported is None or counted.reported[0] != status
        # A file that is verified or started anew does not take the whole back.
        counted.done_bytes = min(max(counted.done_bytes, done_bytes), total_bytes)
        counted.total_bytes = total_bytes
        is_soon = done_bytes < total_bytes and now - counted.reported_at < _MIN_INTERVAL_S
        if counted.reported == (status, done_bytes) or (is_soon and not is_new):
            return
        counted.reported_at = now
        counted.reported = (status, done_bytes)
        self._on_progress(
            PullProgress(
                status=status,
                file=file,
                total_bytes=total_bytes,
                done_bytes=done_bytes,
                all_total_bytes=sum(each.total_bytes for each in self._files.values()),
                all_done_bytes=sum(each.done_bytes for each in self._files.values()),
            )
        )

    def raise_if_cancelled(self) -> None:
        if self._is_cancelled():
            raise Cancelled("The download was stopped; what has arrived is kept and the next `quire pull` resumes it.")

    def wait(self, seconds: float) -> None:
        """Sleep in short steps so that a cancellation is seen soon."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self.raise_if_cancelled()
            time.sleep(min(left, 0.1))
