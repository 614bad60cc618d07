"""`PartialFile`: the bytes of one file while they gather, and its journal.

Several threads write ranges of it, others read what is there; after `close` or `discard` nothing
is written any more, whatever a late thread still holds.  Knows no network and no schedule; used
by `schedule`, `receiver` and `hashing`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from store.transfer.extents import Extents
from store.transfer.journal import Journal, boot_id, read_journal
from store.transfer.remote_file import RemoteFile

JOURNAL_EVERY_BYTES = 2 * 1024 * 1024
"""What a killed process may have to fetch again of each file."""
_BYTES_PER_BLOCK = 512


class PartialClosed(Exception):
    """The file was taken away from this thread; what it still has is not wanted."""


class PartialFile:
    """An identified file's `.partial` in `folder`, resumed where that is safe."""

    def __init__(self, file: RemoteFile, folder: Path) -> None:
        """Open or create it.  Raises OSError."""
        assert file.size_bytes is not None, "a file is identified before it is fetched"
        self.path = file.partial_path(folder)
        self.size_bytes = file.size_bytes
        self._journal_path = _journal_path(self.path)
        self._lock = threading.Lock()
        self._extents = stored_extents(file, folder)
        self.resumed_bytes = self._extents.total_bytes
        self._unrecorded = Extents()
        self._unsynced = self.resumed_bytes > 0
        self._journal: Journal | None = None
        self._descriptor: int | None = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            if not self.resumed_bytes:
                self._journal_path.unlink(missing_ok=True)
                os.ftruncate(self._descriptor, 0)
            elif self._journal_path.exists():
                self._open_journal()
        except OSError:
            os.close(self._descriptor)
            raise

    @property
    def done_bytes(self) -> int:
        return self._extents.total_bytes

    @property
    def is_complete(self) -> bool:
        return self.done_bytes == self.size_bytes

    @property
    def frontier(self) -> int:
        """How far it can be hashed."""
        with self._lock:
            return self._extents.frontier

    def missing_besides(self, busy: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """The ranges that are neither there nor in `busy`, in order."""
        with self._lock:
            extents = self._extents.copy()
        for start, end in busy:
            extents.add(start, end)
        return list(extents.gaps(self.size_bytes))

    def write(self, content: memoryview, offset: int) -> int:
        """Write bytes from `offset`; the offset behind them.  Raises OSError, PartialClosed."""
        with self._lock:
            descriptor = self._open_descriptor()
            end = offset + len(content)
            position = offset
            while position < end:
                position += os.pwrite(descriptor, content[position - offset :], position)
            self._extents.add(offset, end)
            self._unrecorded.add(offset, end)
            self._unsynced = True
            if self._unrecorded.total_bytes >= JOURNAL_EVERY_BYTES:
                self._record()
            return end

    def read_into(self, buffer: bytearray, offset: int) -> int:
        """Fill `buffer` from `offset` as far as there is something; bytes read.  Raises OSError, PartialClosed."""
        # A duplicate, so that `close` neither waits for a slow disk nor frees a number that is in use.
        with self._lock:
            descriptor = os.dup(self._open_descriptor())
        try:
            return os.preadv(descriptor, [buffer], offset)
        finally:
            os.close(descriptor)

    def sync(self) -> None:
        """Put what is there on the disk and say so in the journal.  Raises OSError, PartialClosed."""
        with self._lock:
            descriptor = self._open_descriptor()
            if not self._unsynced:
                return
            if self._journal is not None:
                self._record()
            length = self._journal.length if self._journal is not None else 0
            self._unsynced = False
            descriptor = os.dup(descriptor)
        try:
            os.fdatasync(descriptor)
        finally:
            os.close(descriptor)
        with self._lock:
            if self._journal is not None and length:
                self._journal.mark_synced(length)

    def finish(self) -> None:
        """Complete and verified: everything on the disk, the journal gone.  Raises OSError, PartialClosed."""
        self.sync()
        with self._lock:
            # Whoever closed it meanwhile may have handed the folder on to another process.
            descriptor = self._open_descriptor()
            self._descriptor = None
            os.close(descriptor)
            if self._journal is not None:
                self._journal.close()
                self._journal = None
            self._journal_path.unlink(missing_ok=True)

    def close(self) -> None:
        """Nothing is written after this; what is there stays for the next attempt."""
        with self._lock:
            if self._descriptor is None:
                return
            # On a full disk the last stretch goes unrecorded and will be fetched again.
            with suppress(OSError):
                if self._unrecorded.total_bytes:
                    self._record()
            os.close(self._descriptor)
            self._descriptor = None
            if self._journal is not None:
                self._journal.close()
                self._journal = None

    def discard(self) -> None:
        """Nothing of it stays.  Raises OSError."""
        self.close()
        self.path.unlink(missing_ok=True)
        self._journal_path.unlink(missing_ok=True)

    def _open_descriptor(self) -> int:
        if self._descriptor is None:
            raise PartialClosed
        return self._descriptor

    def _record(self) -> None:
        if self._journal is None:
            self._open_journal()
        else:
            self._journal.record(self._unrecorded)
        self._unrecorded = Extents()

    def _open_journal(self) -> None:
        self._journal = Journal(self._journal_path, self.size_bytes, self._extents, boot_id())


def stored_extents(file: RemoteFile, folder: Path) -> Extents:
    """What of an identified file lies in `folder` and need not be fetched again."""
    path = file.partial_path(folder)
    size_bytes = file.size_bytes or 0
    try:
        status = path.stat()
    except FileNotFoundError:
        return Extents()
    if status.st_size > size_bytes or not file.is_resumable:
        return Extents()
    recorded = read_journal(_journal_path(path), size_bytes, boot_id())
    if recorded is not None:
        return recorded.clipped(status.st_size)
    # Without a journal only a file without holes can be a prefix, and only a digest can tell.
    is_dense = status.st_blocks * _BYTES_PER_BLOCK >= status.st_size
    return Extents([(0, status.st_size)]) if file.digest is not None and is_dense else Extents()


def credited_bytes(folder: Path, file: RemoteFile) -> int:
    """Bytes of an identified file that a partial in `folder` already holds and that need not be fetched again."""
    return stored_extents(file, folder).total_bytes


def _journal_path(partial: Path) -> Path:
    return partial.with_suffix(".journal")
