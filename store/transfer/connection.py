"""One HTTP request behind all its redirects, with the token for its own host and no other.

Knows which answers are worth another attempt, and nothing of files on disk, ranges to come or
mirrors.  Threads share it; `abort` ends what they are waiting for.  Used by `receiver` and `fetcher`.
"""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any
from weakref import WeakSet

import httpx

from store.errors import AccessDenied, DownloadFailed
from store.transfer.credentials import Credentials, origin_of
from store.transfer.failures import Interrupted, Stopped
from store.transfer.policy import RetryPolicy

MAX_REDIRECTS = 5
MAX_RETRY_AFTER_S = 60.0
_CONTENT_RANGE = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19}|\*)")
_NEW_STREAMS = ("connection.connect_tcp.complete", "connection.start_tls.complete")
_EXPIRED = (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN, httpx.codes.NOT_FOUND, httpx.codes.GONE)


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer behind the redirects; `etag` is the word of the first host that gave one."""

    response: httpx.Response
    etag: str | None

    @property
    def status(self) -> int:
        return self.response.status_code

    @property
    def length(self) -> int | None:
        """Bytes of the body, where the server says so."""
        text = self.response.headers.get("Content-Length", "")
        return int(text) if text.isdecimal() else None

    @property
    def content_range(self) -> tuple[int, int, int | None] | None:
        """Start, end and size of the file (None when the server does not know) of a partial answer."""
        match = _CONTENT_RANGE.fullmatch(self.response.headers.get("Content-Range", ""))
        if match is None:
            return None
        return int(match[1]), int(match[2]) + 1, None if match[3] == "*" else int(match[3])

    def chunks(self) -> Iterator[bytes]:
        """The body as it comes."""
        return self.response.iter_raw()


class Connection:
    """A pool of HTTP connections."""

    def __init__(self, credentials: Credentials, policy: RetryPolicy) -> None:
        self._credentials = credentials
        timeout = httpx.Timeout(policy.stall_timeout_s, connect=policy.connect_timeout_s)
        # A compressed answer could neither be resumed by offset nor counted.
        self._client = httpx.Client(timeout=timeout, follow_redirects=False, headers={"Accept-Encoding": "identity"})
        self._lock = threading.Lock()
        self._sockets: WeakSet[socket.socket] = WeakSet()
        self._locations: dict[str, tuple[str, str | None]] = {}
        self._is_aborted = False

    def close(self) -> None:
        self._client.close()

    def abort(self) -> None:
        """Wake every thread that waits for bytes; requests raise Stopped from now on."""
        with self._lock:
            self._is_aborted = True
            sockets = list(self._sockets)
        for each in sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    @contextmanager
    def request(
        self, method: str, url: str, label: str, headers: dict[str, str], *, remember_location: bool = False
    ) -> Iterator[Answer]:
        """The successful answer to a request; frees the connection after.

        With `remember_location` the address that `url` redirects to is asked directly the next time.
        Raises Interrupted, Stopped, httpx.TransportError, AccessDenied or DownloadFailed.
        """
        location, etag = self._locations.get(url, (url, None))
        try:
            with self._follow(method, url, location, label, headers) as (response, seen_etag):
                if location != url and response.status_code in _EXPIRED:
                    raise Interrupted(f"the address that {origin_of(url)} redirected to has expired")
                raise_for_status(response, label)
                answer = Answer(response, etag or seen_etag)
                if remember_location and str(response.url) != url:
                    self._locations[url] = (str(response.url), answer.etag)
                yield answer
        except (httpx.TransportError, Interrupted):
            self._locations.pop(url, None)
            if self._is_aborted:
                raise Stopped from None
            raise

    @contextmanager
    def _follow(
        self, method: str, url: str, location: str, label: str, headers: dict[str, str]
    ) -> Iterator[tuple[httpx.Response, str | None]]:
        target = httpx.URL(location)
        home = origin_of(url)
        at_home = True
        linked_etag: str | None = None
        for _ in range(MAX_REDIRECTS + 1):
            # Once away from its own host a request never carries the token again.
            at_home = at_home and origin_of(str(target)) == home
            credentials = self._credentials.header_for(url) if at_home else {}
            response = self._send(method, target, headers | credentials)
            try:
                linked_etag = linked_etag or response.headers.get("X-Linked-ETag")
                if not response.has_redirect_location:
                    yield response, normalized_etag(linked_etag or response.headers.get("ETag"))
                    return
                target = _redirect_target(target, response, label)
            finally:
                response.close()
        raise DownloadFailed(
            f"{httpx.URL(url).host} redirects more than {MAX_REDIRECTS} times for {label}; use another hub or mirror."
        )

    def _send(self, method: str, target: httpx.URL, headers: dict[str, str]) -> httpx.Response:
        if self._is_aborted:
            raise Stopped
        request = self._client.build_request(method, target, headers=headers, extensions={"trace": self._on_event})
        return self._client.send(request, stream=True)

    def _on_event(self, name: str, info: dict[str, Any]) -> None:
        """Keep track of open sockets, so that `abort` reaches threads that wait for an answer to begin."""
        if name in _NEW_STREAMS:
            stream_socket = info["return_value"].get_extra_info("socket")
            with self._lock:
                self._sockets.add(stream_socket)
                if not self._is_aborted:
                    return
            with suppress(OSError):
                stream_socket.shutdown(socket.SHUT_RDWR)


def raise_for_status(response: httpx.Response, label: str) -> None:
    """Raises Interrupted, AccessDenied or DownloadFailed unless the answer carries bytes."""
    status = response.status_code
    host = response.url.host
    if status in (httpx.codes.OK, httpx.codes.PARTIAL_CONTENT):
        return
    if status == httpx.codes.REQUESTED_RANGE_NOT_SATISFIABLE:
        raise Interrupted("the server refused the range")
    if status in (httpx.codes.TOO_MANY_REQUESTS, httpx.codes.REQUEST_TIMEOUT) or status >= 500:
        raise Interrupted(f"HTTP status {status}", retry_after_s(response.headers.get("Retry-After", "")))
    if status in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
        raise AccessDenied(
            f"{host} refuses {label} (HTTP status {status}); run `quire login` with a token that may read it, or set "
            "HF_TOKEN."
        )
    raise DownloadFailed(f"{host} answered HTTP status {status} for {label}; check the name or use another mirror.")


def retry_after_s(text: str, now: datetime | None = None) -> float:
    """Seconds from a `Retry-After` header, which counts them or names a date; 0 when it makes no sense."""
    if text.isdecimal():
        return min(float(text), MAX_RETRY_AFTER_S)
    try:
        until = parsedate_to_datetime(text)
    except ValueError:
        return 0.0
    if until.tzinfo is None:  # RFC 9110: always GMT, whatever the text leaves out
        until = until.replace(tzinfo=UTC)
    return min(max((until - (now or datetime.now(UTC))).total_seconds(), 0.0), MAX_RETRY_AFTER_S)


def normalized_etag(etag: str | None) -> str | None:
    """A strong entity tag without its quotes, a weak one with its `W/`; None for none."""
    if not etag:
        return None
    if etag.startswith("W/"):
        return "W/" + etag[2:].strip('"')
    return etag.strip('"')


def _redirect_target(target: httpx.URL, response: httpx.Response, label: str) -> httpx.URL:
    try:
        location = target.join(response.headers["Location"])
    except httpx.InvalidURL as error:
        raise DownloadFailed(
            f"{target.host} redirects to an invalid address for {label}; use another hub or mirror."
        ) from error
    is_downgrade = target.scheme == "https" and location.scheme != "https"
    if location.scheme not in ("http", "https") or not location.host or is_downgrade:
        raise DownloadFailed(
            f"{target.host} redirects to an unsafe {location.scheme} address for {label}; use another hub or mirror."
        )
    return location
