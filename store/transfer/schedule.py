"""`Schedule`: what is to be done next, for all threads of a download.

Files are begun in the order given, and their ranges handed out in order, so that hashing can
follow close behind.  All state is under one lock; whoever has nothing to do waits here.  What the
caller of the download has to know goes into `events`.  Knows no HTTP and writes no bytes.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import httpx

from store.errors import BrokenFile, DownloadFailed, StoreError
from store.transfer.failures import ContentChanged, Interrupted
from store.transfer.file_transfer import Claim, FileTransfer, HashJob
from store.transfer.mirrors import Mirrors
from store.transfer.policy import MIB, RetryPolicy, TransferShape
from store.transfer.remote_file import FetchedFile, RemoteFile

_MAX_CHANGES = 3
_LOOK_AGAIN_S = 0.5
"""For ranges that have become slow enough to be shared."""


@dataclass(frozen=True, slots=True)
class Said:
    """A sentence for the person who waits."""

    status: str


Event = Said | FetchedFile | Exception
"""An exception ends the download."""


class Schedule:
    """One download of several files."""

    def __init__(
        self,
        files: Sequence[RemoteFile],
        folder: Path,
        policy: RetryPolicy,
        shape: TransferShape,
        unusable: dict[str, StoreError],
    ) -> None:
        self._policy = policy
        self._shape = shape
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._bytes = threading.Condition(self._lock)
        self.transfers = [FileTransfer(file, folder, Mirrors(file, policy, unusable)) for file in files]
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.stopped = threading.Event()

    def stop(self) -> None:
        """End every thread that waits here."""
        with self._lock:
            self.stopped.set()
            self._work.notify_all()
            self._bytes.notify_all()

    def close(self) -> None:
        """End all writing; what has arrived stays."""
        for transfer in self.transfers:
            if transfer.partial is not None:
                transfer.partial.close()

    def fail(self, error: Exception) -> None:
        """End the download with `error`, from any thread."""
        self.events.put(error)

    def next_claim(self) -> Claim | None:
        """Wait for a range to fetch; None when the download is over.  Raises OSError."""
        with self._lock:
            while not self.stopped.is_set():
                now_s = time.monotonic()
                for transfer in self.transfers:
                    claim = transfer.next_claim(self._shape, now_s)
                    # The file may just have been opened, and what lies there already wants hashing.
                    self._bytes.notify()
                    if claim is not None:
                        return claim
                for transfer in self.transfers:
                    if claim := transfer.split_claim(self._shape, now_s):
                        return claim
                waits = [each.retry_at_s - now_s for each in self.transfers if each.retry_at_s > now_s]
                self._work.wait(min([*waits, _LOOK_AGAIN_S]))
            return None

    def ranges_work(self, claim: Claim) -> None:
        """The server answered with the range that was asked for."""
        with self._lock:
            if claim.is_current and not claim.transfer.supports_ranges:
                claim.transfer.supports_ranges = True
                self._work.notify_all()

    def accept_whole(self, claim: Claim) -> bool:
        """The server answers with the whole file; whether `claim` shall take it."""
        with self._lock:
            return claim.is_current and claim.transfer.accept_whole(claim)

    def advanced(self, claim: Claim) -> None:
        """Bytes of `claim` were written."""
        with self._lock:
            if claim.is_current:
                claim.transfer.note_source(claim.url)
            self._bytes.notify()

    def ended(self, claim: Claim, failure: Interrupted | None = None) -> None:
        """`claim` is complete, or broke off with `failure`; what is missing of it is up for grabs."""
        with self._lock:
            if not claim.is_current:
                return
            claim.transfer.claims.remove(claim)
            if failure is not None:
                self._broke_off(claim, failure)
            self._work.notify_all()
            self._bytes.notify()

    def refused(self, claim: Claim, error: StoreError) -> None:
        """The address of `claim` will never give this file."""
        with self._lock:
            if claim.is_current:
                claim.transfer.claims.remove(claim)
                claim.transfer.mirrors.refuse(claim.url, error)
                self._go_on(claim, error.reason)
                self._work.notify_all()

    def changed(self, claim: Claim, change: ContentChanged) -> None:
        """The file is another one now: fetch that, from its first byte.  Raises OSError."""
        with self._lock:
            if not claim.is_current:
                return
            transfer = claim.transfer
            transfer.num_changes += 1
            host = httpx.URL(claim.url).host
            if change.etag is None or change.size_bytes is None:
                what = f"{host} no longer says how large {claim.file.label} is or when it changes"
                self.fail(DownloadFailed(f"{what}; use another hub or mirror."))
            elif transfer.num_changes > _MAX_CHANGES:
                self.fail(DownloadFailed(f"{claim.file.label} keeps changing on {host}; try again later."))
            else:
                transfer.start_anew(replace(claim.file, etag=change.etag, size_bytes=change.size_bytes))
                self.events.put(Said(f"{claim.file.label} changed on {host}, starting it anew"))
                self._work.notify_all()

    def next_hash_job(self) -> HashJob | None:
        """Wait for bytes to hash; None when the download is over."""
        with self._lock:
            while not self.stopped.is_set():
                for transfer in self.transfers:
                    if job := transfer.next_hash_job():
                        return job
                self._bytes.wait()
            return None

    def hashed(self, job: HashJob) -> bool:
        """Take note of a finished job; whether its file is verified now.  Raises OSError."""
        with self._lock:
            transfer = job.transfer
            if transfer.end_hash_job(job):
                if job.check is None or job.check.matches():
                    transfer.is_verified = True
                    return True
                self._reject(transfer)
                self._work.notify_all()
            return False

    def _broke_off(self, claim: Claim, failure: Interrupted) -> None:
        transfer, mirrors = claim.transfer, claim.transfer.mirrors
        now_s = time.monotonic()
        if transfer.is_alive() and (mirrors.is_last or not failure.is_slow):
            mirrors.progressed()
        else:
            mirrors.failed(claim.url, failure.reason, claim.began_s, now_s)
        if mirrors.current == claim.url:
            delay_s = 0.0 if claim.position - claim.start >= MIB else self._policy.delay_s(mirrors.failures)
            delay_s = max(delay_s, failure.retry_after_s)
            transfer.retry_at_s = now_s + delay_s
            when = f" in {delay_s:.0f} s" if delay_s >= 1 else ""
            self.events.put(Said(f"the connection broke ({failure.reason}), trying again{when}"))
            if transfer.supports_ranges is False:
                transfer.supports_ranges = None
        if not transfer.file.is_resumable:
            transfer.start_anew(transfer.file)
        self._go_on(claim, failure.reason)

    def _go_on(self, claim: Claim, reason: str) -> None:
        """To the next address, if that of `claim` is not to be asked any more."""
        transfer = claim.transfer
        url = transfer.mirrors.current
        if url is None:
            self.fail(transfer.mirrors.error())
        elif url != claim.url:
            transfer.supports_ranges = None
            transfer.retry_at_s = 0.0
            if transfer.one_source_only:
                transfer.start_anew(transfer.file)
            self.events.put(Said(f"{httpx.URL(claim.url).host} failed ({reason}), going on with {httpx.URL(url).host}"))

    def _reject(self, transfer: FileTransfer) -> None:
        """All bytes are there and they are wrong."""
        label = transfer.file.label
        if transfer.is_mixed and not transfer.one_source_only:
            transfer.one_source_only = True
            self.events.put(Said(f"{label} is not what was promised, starting it anew"))
        elif url := transfer.source_url:
            host = httpx.URL(url).host
            transfer.mirrors.set_aside(
                url,
                BrokenFile(f"{label} from {host} is not what was promised; try again or use another hub or mirror."),
            )
            self.events.put(Said(f"{label} from {host} is not what was promised"))
        transfer.start_anew(transfer.file)
        if transfer.mirrors.current is None:
            self.fail(transfer.mirrors.error())
