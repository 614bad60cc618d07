"""What a hashing thread does: follow the bytes as they become complete, and give the verdict.

Reads what was just written, which the system still holds in memory.  Called by `fetcher`, which
runs some of these loops beside the fetching ones.
"""

from __future__ import annotations

from store.digests import DigestCheck
from store.transfer.file_transfer import HashJob
from store.transfer.partial_file import PartialClosed, PartialFile
from store.transfer.policy import MIB
from store.transfer.remote_file import FetchedFile
from store.transfer.schedule import Schedule

_READ_BYTES = 2 * MIB


class Hasher:
    """Hashes one stretch of one file after another."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._buffer = bytearray(_READ_BYTES)

    def run(self) -> None:
        """Hash until the download is over.  Raises OSError when the disk fails."""
        while (job := self._schedule.next_hash_job()) is not None:
            try:
                self._run_job(job)
            except PartialClosed:
                continue

    def _run_job(self, job: HashJob) -> None:
        if job.check is not None:
            self._hash(job.partial, job.check, job.end)
        if self._schedule.hashed(job):
            job.partial.finish()
            self._schedule.events.put(FetchedFile(job.transfer.file, job.partial.path))

    def _hash(self, partial: PartialFile, check: DigestCheck, end: int) -> None:
        while check.hashed_bytes < end and not self._schedule.stopped.is_set():
            num_bytes = min(partial.read_into(self._buffer, check.hashed_bytes), end - check.hashed_bytes)
            if num_bytes == 0:
                raise OSError("the file became shorter while it was read")
            check.update(memoryview(self._buffer)[:num_bytes])
