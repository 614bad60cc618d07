"""`Downloader`: the face of `store.transfer`; runs the threads of a download and speaks for them.

Fetching, hashing and syncing threads work on one schedule; the caller's own thread waits, reports,
hands over finished files and notices a cancellation.  Knows nothing of hubs or of the cache layout;
called by `pull`.
"""

from __future__ import annotations

import queue
import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import httpx

from store.errors import AccessDenied, DownloadFailed, StoreError
from store.names import Digest
from store.progress import Reporter
from store.space import storage_error
from store.transfer.connection import Connection
from store.transfer.credentials import Credentials
from store.transfer.failures import Interrupted, reason_of
from store.transfer.hashing import Hasher
from store.transfer.mirrors import Mirrors
from store.transfer.partial_file import PartialClosed
from store.transfer.policy import MIB, RetryPolicy, TransferShape
from store.transfer.rate_limit import RateLimit
from store.transfer.receiver import Receiver
from store.transfer.remote_file import FetchedFile, RemoteFile
from store.transfer.schedule import Said, Schedule

MAX_READ_BYTES = 64 * MIB
_SHA256 = re.compile(r"[0-9a-f]{64}")
_NUM_HASHERS = 2
_WATCH_INTERVAL_S = 0.05
_SYNC_INTERVAL_S = 1.0
_JOIN_TIMEOUT_S = 0.05
_SAY_INTERVAL_S = 1.0
_T = TypeVar("_T")


class Downloader:
    """Fetches files; `with` it, so that its connections are closed."""

    def __init__(
        self,
        reporter: Reporter,
        *,
        credentials: Credentials,
        policy: RetryPolicy,
        limit: RateLimit | None = None,
        shape: TransferShape = TransferShape(),  # noqa: B008  # frozen, so sharing it is safe
    ) -> None:
        self._reporter = reporter
        self._credentials = credentials
        self._policy = policy
        self._limit = limit
        self._shape = shape
        self._open_connection: Connection | None = None
        self._unusable: dict[str, StoreError] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._open_connection is not None:
            self._open_connection.close()

    def identify(self, file: RemoteFile) -> RemoteFile:
        """Ask for the size and entity tag of a file whose listing had none.  Raises as `read_range`."""
        if file.digest is not None and file.size_bytes is not None:
            return file
        return self._ask(file, partial(self._ask_identity, file))

    def read_range(self, file: RemoteFile, offset: int, length: int) -> bytes:
        """`length` bytes from `offset`, fewer only at the end of the file; nothing touches the disk.

        Raises ValueError for more than MAX_READ_BYTES, DownloadFailed, AccessDenied or Cancelled.
        """
        if offset < 0 or not 0 <= length <= MAX_READ_BYTES:
            raise ValueError(f"a range of {length} bytes at {offset} cannot be read at once")
        if file.size_bytes is not None:
            length = min(length, max(0, file.size_bytes - offset))
        return self._ask(file, partial(self._read_range, file, offset, length)) if length else b""

    def fetch(self, files: Sequence[RemoteFile], folder: Path, on_complete: Callable[[FetchedFile], None]) -> None:
        """Download identified files into `folder`, where partials of them may lie.

        `on_complete` is called in the caller's thread for each file as soon as it is verified and on the disk, and
        takes its path away; the file it names differs from the one asked for when the server's content changed
        meanwhile.  The caller sees to it that nobody else works in `folder`.
        Raises BrokenFile, DownloadFailed, AccessDenied, NotEnoughSpace, DataRootUnusable or Cancelled.
        """
        self._reporter.expect({file.label: file.size_bytes or 0 for file in files})
        # Files with the same bytes share a partial, so only one of them can be on its way.
        first_of_name = {file.blob_name: file for file in reversed(files)}
        once = [file for file in files if first_of_name[file.blob_name] is file]
        again = [file for file in files if first_of_name[file.blob_name] is not file]
        if once:
            self._fetch_at_once(once, folder, on_complete)
        if again:
            self.fetch(again, folder, on_complete)

    def _fetch_at_once(
        self, files: Sequence[RemoteFile], folder: Path, on_complete: Callable[[FetchedFile], None]
    ) -> None:
        schedule = Schedule(files, folder, self._policy, self._shape, self._unusable)
        threads = self._start_threads(schedule)
        is_done = False
        try:
            self._watch(schedule, on_complete)
            is_done = True
        except OSError as error:
            raise storage_error(error, folder) from error
        finally:
            schedule.stop()
            if not is_done:
                self._drop_connections()
            # A thread that waits for a name server cannot be woken; it will find that nothing is wanted any more.
            deadline_s = time.monotonic() + _JOIN_TIMEOUT_S
            for thread in threads:
                thread.join(max(0.0, deadline_s - time.monotonic()))
            schedule.close()

    def _start_threads(self, schedule: Schedule) -> list[threading.Thread]:
        receivers = [Receiver(schedule, self._connection, self._policy, self._limit).run] * self._shape.connections
        loops = [*receivers, *[Hasher(schedule).run for _ in range(_NUM_HASHERS)], partial(_keep_synced, schedule)]

        def guarded(loop: Callable[[], None]) -> None:
            try:
                loop()
            except Exception as error:  # noqa: BLE001  # the edge of a thread: whatever it is belongs to the caller
                schedule.fail(error)

        threads = [threading.Thread(target=guarded, args=(loop,), name="download", daemon=True) for loop in loops]
        for thread in threads:
            thread.start()
        return threads

    def _watch(self, schedule: Schedule, on_complete: Callable[[FetchedFile], None]) -> None:
        """Report and hand over until every file is complete; raises what ends the download early."""
        num_left = len(schedule.transfers)
        said_s = 0.0
        while num_left:
            self._reporter.raise_if_cancelled()
            try:
                event = schedule.events.get(timeout=_WATCH_INTERVAL_S)
            except queue.Empty:
                event = None
            if isinstance(event, Exception):
                raise event
            if isinstance(event, Said) and time.monotonic() - said_s >= _SAY_INTERVAL_S:
                said_s = time.monotonic()
                self._reporter.say(event.status)
            self._report(schedule)
            if isinstance(event, FetchedFile):
                size_bytes = event.file.size_bytes or 0
                self._reporter.count("downloading", event.file.label, size_bytes, size_bytes)
                self._reporter.count("verifying", event.file.label, size_bytes, size_bytes)
                on_complete(event)
                num_left -= 1

    def _report(self, schedule: Schedule) -> None:
        for transfer in schedule.transfers:
            if transfer.is_verified or transfer.partial is None:
                continue
            label, size_bytes = transfer.file.label, transfer.size_bytes
            if (done_bytes := transfer.done_bytes) < size_bytes:
                self._reporter.count("downloading", label, done_bytes, size_bytes)
            else:
                self._reporter.count("verifying", label, transfer.hashed_bytes, size_bytes)

    def _ask(self, file: RemoteFile, attempt: Callable[[str], _T]) -> _T:
        """What `attempt` brings from the first address that answers."""
        mirrors = Mirrors(file, self._policy, self._unusable)
        while (url := mirrors.current) is not None:
            began_s = time.monotonic()
            try:
                return self._interruptibly(partial(attempt, url))
            except (httpx.TransportError, Interrupted) as error:
                reason = reason_of(error) if isinstance(error, httpx.TransportError) else error.reason
                mirrors.failed(url, reason, began_s, time.monotonic())
                if mirrors.current == url:
                    retry_after_s = error.retry_after_s if isinstance(error, Interrupted) else 0.0
                    self._reporter.wait(max(self._policy.delay_s(mirrors.failures), retry_after_s))
            except (AccessDenied, DownloadFailed) as error:
                mirrors.refuse(url, error)
        raise mirrors.error()

    def _interruptibly(self, call: Callable[[], _T]) -> _T:
        """`call` in a thread of its own, which a cancellation does not wait for."""
        outcome: Future[_T] = Future()

        def run() -> None:
            try:
                outcome.set_result(call())
            except Exception as error:  # noqa: BLE001  # the edge of a thread: whatever it is belongs to the caller
                outcome.set_exception(error)

        threading.Thread(target=run, name="download", daemon=True).start()
        try:
            while True:
                self._reporter.raise_if_cancelled()
                try:
                    return outcome.result(_WATCH_INTERVAL_S)
                except TimeoutError:
                    if outcome.done():
                        raise
        except BaseException:
            if not outcome.done():
                self._drop_connections()
            raise

    def _ask_identity(self, file: RemoteFile, url: str) -> RemoteFile:
        with self._connection.request("HEAD", url, file.label, {}) as answer:
            linked_size = answer.response.headers.get("X-Linked-Size", "")
            size_bytes = int(linked_size) if linked_size.isdecimal() else answer.length
            etag = answer.etag
        if etag is None or size_bytes is None:
            raise DownloadFailed(
                f"{httpx.URL(url).host} does not say how large {file.label} is or when it changes; use another hub or "
                "mirror."
            )
        digest = file.digest or (Digest(etag) if _SHA256.fullmatch(etag) else None)
        return replace(file, size_bytes=size_bytes, digest=digest, etag=etag)

    def _read_range(self, file: RemoteFile, offset: int, length: int, url: str) -> bytes:
        headers = {"Range": f"bytes={offset}-{offset + length - 1}"}
        with self._connection.request("GET", url, file.label, headers) as answer:
            skip_bytes = offset
            if answer.status == httpx.codes.PARTIAL_CONTENT:
                if answer.content_range is None or answer.content_range[0] != offset:
                    raise Interrupted("the server sent another range than asked")
                skip_bytes = 0
            content = bytearray()
            for chunk in answer.chunks():
                content += chunk[skip_bytes:]
                skip_bytes = max(0, skip_bytes - len(chunk))
                if len(content) >= length:
                    break
            return bytes(content[:length])

    @property
    def _connection(self) -> Connection:
        if self._open_connection is None:
            self._open_connection = Connection(self._credentials, self._policy)
        return self._open_connection

    def _drop_connections(self) -> None:
        """Wake whoever waits for bytes; later requests get connections of their own."""
        if self._open_connection is not None:
            self._open_connection.abort()
            self._open_connection.close()
            self._open_connection = None


def _keep_synced(schedule: Schedule) -> None:
    """Put bytes on the disk as they come: the end need not wait for it, and power loss costs little."""
    while not schedule.stopped.wait(_SYNC_INTERVAL_S):
        for transfer in schedule.transfers:
            if transfer.partial is not None and not transfer.is_verified:
                try:
                    transfer.partial.sync()
                except PartialClosed:
                    continue
