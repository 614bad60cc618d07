"""Why one attempt at a range ended early, as the parts of `store.transfer` tell each other.

The exceptions never leave the package: the schedule turns them into another attempt, another address
or a StoreError.  `reason_of` also serves `store.sources`.
"""

from __future__ import annotations

import re

import httpx

_NUMBER = re.compile(r"^\[Errno -?\d+\] ")


class Interrupted(Exception):
    """This attempt is over and another may do better; `is_slow` when bytes came, but far too few."""

    def __init__(self, reason: str, retry_after_s: float = 0.0, *, is_slow: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.retry_after_s = retry_after_s
        self.is_slow = is_slow


class ContentChanged(Exception):
    """The address no longer gives the bytes that the partial began with, but these."""

    def __init__(self, etag: str | None, size_bytes: int | None) -> None:
        super().__init__("the file changed on the server")
        self.etag = etag
        self.size_bytes = size_bytes


class Stopped(Exception):
    """The download as a whole is over; nobody waits for this attempt."""


def reason_of(error: Exception) -> str:
    """A few words for people on what went wrong below HTTP."""
    if isinstance(error, httpx.ReadTimeout):
        return "nothing came any more"
    if isinstance(error, httpx.ConnectTimeout):
        return "no connection in time"
    if isinstance(error, (httpx.RemoteProtocolError, httpx.ReadError)):
        return "the connection ended early"
    # "[Errno 111] Connection refused" says less than its words.
    text = _NUMBER.sub("", str(error))
    return text[:1].lower() + text[1:] or type(error).__name__
