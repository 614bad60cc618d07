"""Hash files and compare them with the digest that was promised.

A model hub names large files by sha256 and small ones by their git blob id (sha1 over a header
and the content); both can be checked without asking the hub again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from store.names import Digest

_CHUNK_BYTES = 4 * 1024 * 1024


def file_matches(path: Path, digest: Digest, on_bytes: Callable[[int], None]) -> bool:
    """Whether the content of `path` hashes to `digest`; `on_bytes` hears the total hashed and may raise to stop."""
    if digest.is_sha256:
        state = hashlib.sha256()
    else:
        state = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
    done_bytes = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            state.update(chunk)
            done_bytes += len(chunk)
            on_bytes(done_bytes)
    return state.hexdigest() == digest
