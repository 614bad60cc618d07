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


def file_matches(path: Path, digest: Digest, on_bytes: Callable[[int], None]) -> bool:
    """Whether the content of `path` hashes to `digest`; `on_bytes` hears the total hashed and may raise to stop."""
    state = new_hash(digest, path.stat().st_size)
    done_bytes = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            state.update(chunk)
            done_bytes += len(chunk)
            on_bytes(done_bytes)
    return state.hexdigest() == digest
