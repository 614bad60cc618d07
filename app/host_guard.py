"""`HostGuard`: the ASGI middleware in front of every route, against DNS rebinding and strangers.

Checks, in this order: the Host header names this machine (else 403), a browser's Origin
does too (else 403), and the API key is right where one is set (else 401).  Knows nothing
of the routes behind it.  Litestar's own allowed-hosts check compares the header with its
port still on, so it cannot be used.
"""

from __future__ import annotations

import hmac
import ipaddress
import socket
from collections.abc import Iterable
from urllib.parse import urlsplit

from litestar.enums import ScopeType
from litestar.types import ASGIApp, Receive, Scope, Send

from app.errors import NotAllowed, Unauthorized

_LOCAL_SUFFIXES = (".localhost", ".local", ".internal")


def host_of(authority: str) -> str:
    """The lower-case host of "host", "host:port" or "[v6]:port"; "" if it is none of these."""
    try:
        return (urlsplit(f"//{authority}").hostname or "").rstrip(".")
    except ValueError:
        return ""


def is_allowed_host(authority: str, extra_hosts: Iterable[str] = ()) -> bool:
    """Whether a Host header can mean this daemon.

    A name that a foreign DNS server controls must not pass; an address cannot be rebound.
    """
    host = host_of(authority)
    if not host or host in extra_hosts:
        return bool(host)
    own_names = {"localhost", socket.gethostname().lower()}
    return host in own_names or host.endswith(_LOCAL_SUFFIXES) or _address(host) is not None


def is_allowed_origin(origin: str, host_header: str, extra_hosts: Iterable[str] = ()) -> bool:
    """Whether pages of this origin may call: the daemon's own, those of this machine, and `extra_hosts`."""
    try:
        page_host = host_of(urlsplit(origin).netloc)
    except ValueError:
        return False
    if not page_host:
        return False
    if page_host in extra_hosts or page_host == host_of(host_header):
        return True
    address = _address(page_host)
    return page_host == "localhost" or page_host.endswith(".localhost") or (address is not None and address.is_loopback)


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


class HostGuard:
    """Raises before the route is reached; the exception handlers turn that into an answer."""

    def __init__(self, app: ASGIApp, *, api_key: str | None, allowed_hosts: Iterable[str]) -> None:
        self._app = app
        self._api_key = api_key
        self._allowed_hosts = frozenset(host.lower() for host in allowed_hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == ScopeType.HTTP:
            headers = {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}
            self._check_names(headers)
            self._check_key(headers)
        await self._app(scope, receive, send)

    def _check_names(self, headers: dict[bytes, str]) -> None:
        host = headers.get(b"host", "")
        if not is_allowed_host(host, self._allowed_hosts):
            raise NotAllowed(f"The host name {host!r} is not served here; add it to allowed_hosts if it is yours.")
        origin = headers.get(b"origin")
        if origin is not None and not is_allowed_origin(origin, host, self._allowed_hosts):
            raise NotAllowed(f"Web pages of {origin!r} may not call this daemon; add its host to allowed_hosts.")

    def _check_key(self, headers: dict[bytes, str]) -> None:
        if self._api_key is None:
            return
        scheme, _, key = headers.get(b"authorization", "").partition(" ")
        is_right = hmac.compare_digest(key.strip().encode(), self._api_key.encode())
        if scheme.lower() != "bearer" or not is_right:
            raise Unauthorized("The API key is missing or wrong; send the header `Authorization: Bearer KEY`.")
