"""`RemoteFile`: what to fetch; `FetchedFile`: what was fetched.

Plain values with no behaviour beyond naming.  Built by the sources and by `pull`, read by the rest
of `store.transfer`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from store.names import Digest


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file and everywhere it can be had.

    `label` is its name in messages and progress.  `urls` give the same bytes, the preferred one
    first.  Without `digest` or `size_bytes` a server is asked for them; `etag` is then its word.
    """

    label: str
    urls: tuple[str, ...]
    size_bytes: int | None = None
    digest: Digest | None = None
    etag: str | None = None

    @property
    def blob_name(self) -> str:
        """The name of these bytes, safe as a file name whatever the server sent."""
        if self.digest is not None:
            return self.digest
        assert self.etag is not None, "a file is identified before it is named"
        return "etag-" + hashlib.sha256(self.etag.encode()).hexdigest()[:40]

    @property
    def is_resumable(self) -> bool:
        """Whether bytes of two answers surely fit together: a weak entity tag promises no such thing."""
        return self.digest is not None or (self.etag is not None and not self.etag.startswith("W/"))

    def partial_path(self, folder: Path) -> Path:
        """Where the bytes gather below `folder` until they are complete and verified."""
        return folder / f"{self.blob_name}.partial"


@dataclass(frozen=True, slots=True)
class FetchedFile:
    """`path` holds the complete, verified bytes of `file`."""

    file: RemoteFile
    path: Path
