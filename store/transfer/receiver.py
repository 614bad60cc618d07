"""What a fetching thread does: take a range, ask for it, write what comes, report how it ended.

Every way in which a server can misbehave ends here as one of `failures`.  Called by `fetcher`,
which runs several of these loops at once.
"""

from __future__ import annotations

import time

import httpx

from store.errors import AccessDenied, DownloadFailed
from store.transfer.connection import Answer, Connection
from store.transfer.failures import ContentChanged, Interrupted, Stopped, reason_of
from store.transfer.file_transfer import Claim
from store.transfer.partial_file import PartialClosed
from store.transfer.policy import RetryPolicy
from store.transfer.rate_limit import RateLimit
from store.transfer.schedule import Schedule


class Receiver:
    """One connection's worth of fetching."""

    def __init__(
        self, schedule: Schedule, connection: Connection, policy: RetryPolicy, limit: RateLimit | None
    ) -> None:
        self._schedule = schedule
        self._connection = connection
        self._policy = policy
        self._limit = limit

    def run(self) -> None:
        """Fetch until the download is over.  Raises OSError when the disk fails."""
        while (claim := self._schedule.next_claim()) is not None:
            self._run_claim(claim)

    def _run_claim(self, claim: Claim) -> None:
        try:
            self._fetch(claim)
        except Interrupted as failure:
            self._schedule.ended(claim, failure)
        except httpx.TransportError as error:
            self._schedule.ended(claim, Interrupted(reason_of(error)))
        except ContentChanged as change:
            self._schedule.changed(claim, change)
        except (AccessDenied, DownloadFailed) as error:
            self._schedule.refused(claim, error)
        except (PartialClosed, Stopped):
            return
        else:
            self._schedule.ended(claim)

    def _fetch(self, claim: Claim) -> None:
        file = claim.file
        headers = {} if claim.is_whole else {"Range": f"bytes={claim.position}-{claim.end - 1}"}
        # Without a digest each answer must be the hub's own word on whether the file is still the same.
        remember = file.digest is not None
        with self._connection.request("GET", claim.url, file.label, headers, remember_location=remember) as answer:
            expected_bytes = self._check_answer(answer, claim)
            skip_bytes = claim.position if claim.is_whole else 0
            self._receive(answer, claim, skip_bytes, expected_bytes)

    def _check_answer(self, answer: Answer, claim: Claim) -> int:
        """Whether these are bytes of the claim; how many the answer will have."""
        if answer.status == httpx.codes.PARTIAL_CONTENT:
            if answer.content_range is None:
                raise Interrupted("the server does not say which range it sends")
            start, end, size_bytes = answer.content_range
            self._check_identity(answer, claim, size_bytes)
            if claim.is_whole or start != claim.position or not start < end <= claim.end:
                raise Interrupted("the server sent another range than asked")
            self._schedule.ranges_work(claim)
            return end - start
        self._check_identity(answer, claim, answer.length)
        if not claim.is_whole and not self._schedule.accept_whole(claim):
            raise Interrupted("the server ignored the range")
        return claim.end

    def _check_identity(self, answer: Answer, claim: Claim, size_bytes: int | None) -> None:
        if claim.file.digest is None and answer.etag != claim.file.etag:
            raise ContentChanged(answer.etag, size_bytes)
        if size_bytes is not None and size_bytes != claim.file.size_bytes:
            raise Interrupted(f"the file has {size_bytes} bytes there instead of {claim.file.size_bytes}")

    def _receive(self, answer: Answer, claim: Claim, skip_bytes: int, expected_bytes: int) -> None:
        """Write the answer's bytes up to the claim's end, which may come nearer meanwhile."""
        left_bytes = expected_bytes
        pace = _Pace(self._policy)
        chunks = answer.chunks()
        while claim.position < claim.end:
            asked_s = time.monotonic()
            chunk = next(chunks, None)
            if chunk is None:
                raise Interrupted("the connection ended early")
            pace.add(len(chunk), time.monotonic() - asked_s)
            left_bytes -= len(chunk)
            if left_bytes < 0:
                raise Interrupted("the server sent more bytes than the file has")
            if len(chunk) > skip_bytes:
                wanted = memoryview(chunk)[skip_bytes:][: claim.end - claim.position]
                claim.position = claim.partial.write(wanted, claim.position)
                self._schedule.advanced(claim)
            skip_bytes = max(0, skip_bytes - len(chunk))
            self._wait_for_limit(len(chunk))
        # Only an answer that was read to its end leaves a connection that can be used again.
        if left_bytes == 0 and next(chunks, None) is not None:
            raise Interrupted("the server sent more bytes than the file has")

    def _wait_for_limit(self, num_bytes: int) -> None:
        if self._limit is not None:
            delay_s = self._limit.delay_s(num_bytes)
            if delay_s > 0 and self._schedule.stopped.wait(delay_s):
                raise Stopped


class _Pace:
    """Notices a connection that drips; time spent on anything but waiting for bytes does not count."""

    def __init__(self, policy: RetryPolicy) -> None:
        self._policy = policy
        self._waited_s = 0.0
        self._num_bytes = 0

    def add(self, num_bytes: int, waited_s: float) -> None:
        self._waited_s += waited_s
        self._num_bytes += num_bytes
        if self._waited_s >= self._policy.slow_window_s:
            rate = self._num_bytes / self._waited_s
            if rate < self._policy.slow_bytes_per_s:
                raise Interrupted(f"only {rate:.0f} bytes per second came", is_slow=True)
            self._waited_s, self._num_bytes = 0.0, 0
