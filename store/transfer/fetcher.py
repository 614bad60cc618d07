"""Fetch one file over HTTP into `<digest>.partial`, resume it whenever it breaks, verify it.

The partial's size is the whole journal: each chunk is written through to the operating system
before the next is read, so a process killed at any moment resumes where it stopped, and the digest
over the complete file is checked before anyone may use it.  Knows nothing of hubs or of the cache
layout; called by `pull`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self, TypeVar

import httpx

from store.digests import file_matches
from store.errors import AccessDenied, BrokenFile, DownloadFailed
from store.names import Digest
from store.progress import Reporter
from store.space import storage_error
from store.transfer.credentials import Credentials, origin_of
from store.transfer.policy import RetryPolicy
from store.transfer.rate_limit import RateLimit
from store.transfer.remote_file import FetchedFile, RemoteFile

MAX_REDIRECTS = 5
MAX_READ_BYTES = 64 * 1024 * 1024
MAX_RETRY_AFTER_S = 60.0
_CONTENT_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+|\*)")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_T = TypeVar("_T")


class _Interrupted(Exception):
    """This attempt ended early and another may do better."""

    def __init__(self, reason: str, retry_after_s: float = 0.0) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


class _ContentChanged(Exception):
    """The address no longer gives the bytes that the partial began with."""


class Downloader:
    """Fetches files over one connection pool."""

    def __init__(
        self, reporter: Reporter, *, credentials: Credentials, policy: RetryPolicy, limit: RateLimit | None = None
    ) -> None:
        self._reporter = reporter
        self._credentials = credentials
        self._policy = policy
        self._limit = limit
        timeout = httpx.Timeout(policy.stall_timeout_s, connect=policy.connect_timeout_s)
        # A compressed answer could neither be resumed by offset nor counted.
        self._client = httpx.Client(timeout=timeout, follow_redirects=False, headers={"Accept-Encoding": "identity"})

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close()

    def identify(self, file: RemoteFile) -> RemoteFile:
        """Ask the server for the size and entity tag of a file whose listing had none.  Raises as `fetch`."""
        if file.digest is not None and file.size_bytes is not None:
            return file
        return self._retrying(file, lambda: self._ask_identity(file), lambda: 0)

    def fetch(self, files: Sequence[RemoteFile], folder: Path, on_complete: Callable[[FetchedFile], None]) -> None:
        """Download identified files into `folder`, where partials of them may lie.

        `on_complete` is called in the caller's thread for each file as soon as it is verified, and takes its
        path away; the file it names differs from the one asked for when the server's content changed meanwhile.
        Raises BrokenFile, DownloadFailed, AccessDenied, NotEnoughSpace, DataRootUnusable or Cancelled.
        """
        self._reporter.expect({file.label: file.size_bytes or 0 for file in files})
        for file in files:
            on_complete(self._fetch_one(file, folder))

    def read_range(self, file: RemoteFile, offset: int, length: int) -> bytes:
        """`length` bytes from `offset`, fewer only at the end of the file; nothing touches the disk.

        Raises ValueError for more than MAX_READ_BYTES, DownloadFailed, AccessDenied or Cancelled.
        """
        if offset < 0 or not 0 <= length <= MAX_READ_BYTES:
            raise ValueError(f"a range of {length} bytes at {offset} cannot be read at once")
        return self._retrying(file, lambda: self._read_range(file, offset, length), lambda: 0) if length else b""

    def _read_range(self, file: RemoteFile, offset: int, length: int) -> bytes:
        headers = {"Range": f"bytes={offset}-{offset + length - 1}"}
        with self._request("GET", file, headers) as (response, _):
            if response.status_code == httpx.codes.REQUESTED_RANGE_NOT_SATISFIABLE:
                return b""
            self._raise_for_status(response, file)
            skip = offset if response.status_code == httpx.codes.OK else 0
            got = bytearray()
            for chunk in response.iter_raw():
                self._reporter.raise_if_cancelled()
                got += chunk[skip:]
                skip = max(0, skip - len(chunk))
                if len(got) >= length:
                    break
            return bytes(got[:length])

    def _fetch_one(self, file: RemoteFile, folder: Path) -> FetchedFile:
        for _ in range(2):  # a spoilt partial or a moved branch deserves one fresh start, a lying server no more
            path = file.partial_path(folder)
            try:
                self._retrying(file, partial(self._transfer, file, path), partial(partial_size, path))
                if self._verified(file, path):
                    return FetchedFile(file, path)
                path.unlink()
            except _ContentChanged:
                path.unlink(missing_ok=True)
                file = self.identify(replace(file, size_bytes=None, etag=None))
            except OSError as error:
                raise storage_error(error, folder) from error
        raise BrokenFile(
            f"{file.label} from {httpx.URL(file.urls[0]).host} is not what was promised; try again or use another hub "
            "or mirror."
        )

    def _retrying(self, file: RemoteFile, attempt: Callable[[], _T], progress: Callable[[], int]) -> _T:
        """Run `attempt` until it succeeds; failures count only while `progress` stands still."""
        failures = 0
        while True:
            self._reporter.raise_if_cancelled()
            before = progress()
            try:
                return attempt()
            except (httpx.TransportError, _Interrupted) as error:
                failures = 0 if progress() > before else failures + 1
                self._pause(file, failures, error)

    def _ask_identity(self, file: RemoteFile) -> RemoteFile:
        with self._request("HEAD", file, {}) as (response, etag):
            self._raise_for_status(response, file)
            length = response.headers.get("X-Linked-Size") or response.headers.get("Content-Length")
        if etag is None or length is None or not length.isdecimal():
            raise DownloadFailed(f"{file.urls[0]} reports no size or entity tag; use another hub or mirror.")
        digest = file.digest or (Digest(etag) if _SHA256.fullmatch(etag) else None)
        return replace(file, size_bytes=int(length), digest=digest, etag=etag)

    def _transfer(self, file: RemoteFile, path: Path) -> None:
        """One request.  Returns with the partial complete, or raises _Interrupted or a transport error."""
        assert file.size_bytes is not None
        offset = partial_size(path)
        if offset > file.size_bytes:
            path.unlink()
            offset = 0
        with path.open("ab") as out:
            if offset == file.size_bytes:
                return
            headers = {"Range": f"bytes={offset}-"} if offset else {}
            with self._request("GET", file, headers) as (response, etag):
                if response.status_code == httpx.codes.REQUESTED_RANGE_NOT_SATISFIABLE:
                    out.truncate(0)
                    raise _Interrupted("the server refused the range")
                self._raise_for_status(response, file)
                if file.digest is None and etag != file.etag:
                    raise _ContentChanged
                if _range_start(response, file.size_bytes) != offset:
                    # 200 to a Range request, or another range than asked: these are the bytes from the start.
                    out.truncate(0)
                    if response.status_code != httpx.codes.OK:
                        raise _Interrupted("the server sent another range than asked")
                    offset = 0
                self._receive(response, file, out, offset)

    def _receive(self, response: httpx.Response, file: RemoteFile, out: BinaryIO, done_bytes: int) -> None:
        total_bytes = file.size_bytes or 0
        for chunk in response.iter_raw():
            self._reporter.raise_if_cancelled()
            done_bytes += len(chunk)
            if done_bytes > total_bytes:
                out.truncate(0)
                raise _Interrupted("the server sent more bytes than the file has")
            out.write(chunk)
            out.flush()
            self._reporter.count("downloading", file.label, done_bytes, total_bytes)
        if done_bytes < total_bytes:
            raise _Interrupted("the connection ended early")

    def _verified(self, file: RemoteFile, path: Path) -> bool:
        if file.digest is None:
            return partial_size(path) == file.size_bytes

        def on_bytes(done_bytes: int) -> None:
            self._reporter.raise_if_cancelled()
            self._reporter.count("verifying", file.label, done_bytes, file.size_bytes or 0)

        return file_matches(path, file.digest, on_bytes)

    @contextmanager
    def _request(
        self, method: str, file: RemoteFile, headers: dict[str, str]
    ) -> Iterator[tuple[httpx.Response, str | None]]:
        """The answer behind all redirects and the entity tag the hub gave for it; closes the connection after."""
        target = home = httpx.URL(file.urls[0])
        at_home = True
        linked_etag: str | None = None
        for _ in range(MAX_REDIRECTS + 1):
            # Once away from its own host a request never carries the token again.
            at_home = at_home and origin_of(str(target)) == origin_of(str(home))
            credentials = self._credentials.header_for(str(target)) if at_home else {}
            request = self._client.build_request(method, target, headers=headers | credentials)
            response = self._client.send(request, stream=True)
            try:
                linked_etag = linked_etag or response.headers.get("X-Linked-ETag")
                if not response.has_redirect_location:
                    yield response, _strip_etag(linked_etag or response.headers.get("ETag"))
                    return
                target = _redirect_target(target, response, file)
            finally:
                response.close()
        raise DownloadFailed(f"{file.urls[0]} redirects more than {MAX_REDIRECTS} times; use another hub or mirror.")

    def _raise_for_status(self, response: httpx.Response, file: RemoteFile) -> None:
        status = response.status_code
        if status in (httpx.codes.OK, httpx.codes.PARTIAL_CONTENT):
            return
        if status == httpx.codes.TOO_MANY_REQUESTS or status == httpx.codes.REQUEST_TIMEOUT or status >= 500:
            retry_after = response.headers.get("Retry-After", "")
            seconds = float(retry_after) if retry_after.isdecimal() else 0.0
            raise _Interrupted(f"HTTP status {status}", min(seconds, MAX_RETRY_AFTER_S))
        if status in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            raise AccessDenied(
                f"{response.url.host} refuses {file.label} (HTTP status {status}); set HF_TOKEN to a token that may "
                "read it."
            )
        raise DownloadFailed(
            f"{response.url.host} answered HTTP status {status} for {file.label}; check the name or use another mirror."
        )

    def _pause(self, file: RemoteFile, failures: int, error: Exception) -> None:
        """Wait before the next attempt.  Raises DownloadFailed when there shall be none."""
        reason = str(error) or type(error).__name__
        if failures >= self._policy.attempts:
            raise DownloadFailed(
                f"{file.label} could not be downloaded from {httpx.URL(file.urls[0]).host} in {failures} attempts "
                f"({reason}); pull again to resume."
            ) from error
        delay_s = self._policy.delay_s(failures)
        if isinstance(error, _Interrupted):
            delay_s = max(delay_s, error.retry_after_s)
        self._reporter.say(f"the connection broke ({reason}), trying again")
        self._reporter.wait(delay_s)


def credited_bytes(folder: Path, file: RemoteFile) -> int:
    """Bytes of an identified file that a partial in `folder` already holds and that need not be fetched again."""
    size_bytes = partial_size(file.partial_path(folder))
    return size_bytes if size_bytes <= (file.size_bytes or 0) else 0


def partial_size(path: Path) -> int:
    """Bytes that are already there."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _redirect_target(target: httpx.URL, response: httpx.Response, file: RemoteFile) -> httpx.URL:
    try:
        location = target.join(response.headers["Location"])
    except httpx.InvalidURL as error:
        raise DownloadFailed(f"{file.urls[0]} redirects to an invalid address; use another mirror.") from error
    if location.scheme not in ("http", "https") or (target.scheme == "https" and location.scheme != "https"):
        raise DownloadFailed(f"{file.urls[0]} redirects to an unsafe {location.scheme} address; use another mirror.")
    return location


def _range_start(response: httpx.Response, size_bytes: int) -> int | None:
    """The offset of the first byte of the answer; None when a 206 does not say or speaks of another size."""
    if response.status_code == httpx.codes.OK:
        return 0
    match = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
    if not match or match[2] not in ("*", str(size_bytes)):
        return None
    return int(match[1])


def _strip_etag(etag: str | None) -> str | None:
    return etag.removeprefix("W/").strip('"') if etag else None
