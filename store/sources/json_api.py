"""One JSON answer of a hub's API over HTTP, bounded in size and time.

Follows redirects itself: the token stays with the host it belongs to, and a mirror that sends its
visitors elsewhere is seen as that other place.  Knows nothing of what the answers mean; called by
the hubs' modules.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import httpx

from store.transfer.credentials import origin_of
from store.transfer.failures import reason_of

MAX_ANSWER_BYTES = 32 * 1024 * 1024
_MAX_REDIRECTS = 5
_BUSY = frozenset({429, 502, 503, 504})
_BUSY_ATTEMPTS = 3
_BUSY_DELAY_S = 1.0
_REDIRECTS = frozenset({301, 302, 303, 307, 308})


class ApiFailure(Exception):
    """No usable answer; the text says why, as a phrase that follows the endpoint's address."""


@dataclass(frozen=True, slots=True)
class ApiAnswer:
    """`origin` is where the answer came from in the end, without a path; `retry_after_s` is for busy servers."""

    status: int
    body: bytes
    retry_after_s: float
    error_code: str
    next_link: str | None
    origin: str


@dataclass(frozen=True, slots=True)
class ApiRequest:
    """How to ask: `timeout_s` bounds the connection and each silence, `deadline_s` (monotonic) everything.

    `on_connect` is called once the server could be asked, `on_answer` once it has begun to answer.  Who asks several
    servers gives all the same `trust`, since reading the certificates takes longer than a connection.
    """

    timeout_s: float
    deadline_s: float
    trust: ssl.SSLContext = field(default_factory=httpx.create_ssl_context)
    on_connect: Callable[[], None] = lambda: None
    on_answer: Callable[[], None] = lambda: None

    def trace(self, event: str, _details: object) -> None:
        """What httpx tells of the connection while it is made."""
        if event.endswith("send_request_headers.complete"):
            self.on_connect()


def get(url: str, token: str | None, request: ApiRequest) -> ApiAnswer:
    """Ask, and again a little later if the server is busy; any HTTP status is an answer.  Raises ApiFailure."""
    try:
        with httpx.Client(timeout=request.timeout_s, verify=request.trust, follow_redirects=False) as client:
            for _ in range(_BUSY_ATTEMPTS - 1):
                answer = _follow(client, httpx.URL(url), token, request)
                if answer.status not in _BUSY or time.monotonic() + answer.retry_after_s > request.deadline_s:
                    return answer
                time.sleep(answer.retry_after_s)
            return _follow(client, httpx.URL(url), token, request)
    except httpx.TimeoutException as error:
        raise ApiFailure(f"did not answer within {request.timeout_s:g} s") from error
    except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
        raise ApiFailure(f"failed ({reason_of(error)})") from error


def _follow(client: httpx.Client, target: httpx.URL, token: str | None, request: ApiRequest) -> ApiAnswer:
    home = origin_of(target)
    at_home = True
    for _ in range(_MAX_REDIRECTS + 1):
        at_home = at_home and origin_of(target) == home
        headers = {"Authorization": f"Bearer {token}"} if token and at_home else {}
        with client.stream("GET", target, headers=headers, extensions={"trace": request.trace}) as response:
            request.on_answer()
            if response.status_code not in _REDIRECTS or "Location" not in response.headers:
                link = response.links.get("next", {}).get("url")
                code = response.headers.get("X-Error-Code", "")
                delay = response.headers.get("Retry-After", "")
                delay_s = float(delay) if delay.isdecimal() else _BUSY_DELAY_S
                body = _read(response, request)
                return ApiAnswer(response.status_code, body, delay_s, code, link, origin_of(target))
            location = target.join(response.headers["Location"])
        if location.scheme not in ("http", "https") or (target.scheme == "https" and location.scheme != "https"):
            raise ApiFailure(f"redirects to an unsafe {location.scheme} address")
        target = location
    raise ApiFailure(f"redirects more than {_MAX_REDIRECTS} times")


def _read(response: httpx.Response, request: ApiRequest) -> bytes:
    body = bytearray()
    for chunk in response.iter_bytes():
        body += chunk
        if len(body) > MAX_ANSWER_BYTES:
            raise ApiFailure(f"sent a listing of more than {MAX_ANSWER_BYTES // 2**20} MiB")
        if time.monotonic() > request.deadline_s:
            raise ApiFailure("sent its listing too slowly")
    return bytes(body)
