"""Hash files and compare them with the digest that was promised.

A model hub names large files by sha256 and small ones by their git blob id (sha1 over a header
and the content); both can be checked without asking the hub again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from store.errors import InvalidName
from store.names import Digest

_CHUNK_BYTES = 4 * 1024 * 1024


def is_digest(blob: str) -> bool:
    """Whether a blob's name says what its bytes must hash to; some sources give no digest."""
    try:
        Digest(blob)
    except InvalidName:
        return False
    return True


def new_hash(digest: Digest, size_bytes: int) -> hashlib._Hash:
    """A hash to update with the `size_bytes` of a file; its hexdigest is then to be `digest`."""
    if digest.is_sha256:
        return hashlib.sha256()
    return hashlib.sha1(b"blob %d\0" % size_bytes, usedforsecurity=False)


class DigestCheck:
    """Compares bytes, given in order, with the digest that a file of `size_bytes` must have."""

    def __init__(self, digest: Digest, size_bytes: int) -> None:
        self._digest = digest
        self.hashed_bytes = 0
        self._state = new_hash(digest, size_bytes)

    def update(self, content: bytes | bytearray | memoryview) -> None:
        """Take the next bytes."""
        self._state.update(content)
        self.hashed_bytes += len(content)

    def matches(self) -> bool:
        """Whether the bytes so far are the file."""
        return self._state.hexdigest() == self._digest


def file_matches(path: Path, digest: Digest, on_bytes: Callable[[int], None]) -> bool:
    """Whether the content of `path` hashes to `digest`; `on_bytes` hears the total hashed and may raise to stop."""
    check = DigestCheck(digest, path.stat().st_size)
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            check.update(chunk)
            on_bytes(check.hashed_bytes)
    return check.matches()
