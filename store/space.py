"""Is there room on the disk, and what to say when there is not.

Called before the first byte of a download and when a write below the data root fails.
"""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

from store.errors import DataRootUnusable, NotEnoughSpace

SPACE_RESERVE_BYTES = 64 * 1024 * 1024
"""Kept free beyond the download, so that the daemon can still write its log."""


def require_free_space(needed_bytes: int, directory: Path, what: str) -> None:
    """Raise NotEnoughSpace unless `directory` can take `needed_bytes` and a reserve."""
    free_bytes = shutil.disk_usage(directory).free
    if needed_bytes and needed_bytes + SPACE_RESERVE_BYTES > free_bytes:
        raise NotEnoughSpace(
            f"{what} needs {format_bytes(needed_bytes)} more but {directory} has {format_bytes(free_bytes)} free; "
            "free some space with `quire rm MODEL` or take a larger disk with `quire disk move PATH`.",
            needed_bytes=needed_bytes,
            free_bytes=free_bytes,
        )


def storage_error(error: OSError, directory: Path) -> NotEnoughSpace | DataRootUnusable:
    """The sentence for a failed write below the data root."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return NotEnoughSpace(
            f"The disk of {directory} is full; free some space and pull again, the download resumes where it stopped."
        )
    reason = (error.strerror or type(error).__name__).lower()
    return DataRootUnusable(f"{directory} cannot be written ({reason}); check the disk and its permissions.")


def format_bytes(size_bytes: int) -> str:
    """94134720 → "94 MB", 4_100_000_000 → "4.1 GB"; decimal units, as disks are sold and hubs count."""
    size = float(size_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if abs(size) < 999.5:
            return f"{size:.1f} {unit}" if unit == "GB" else f"{size:.0f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
