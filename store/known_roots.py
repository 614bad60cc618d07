"""Which data roots were used before, so that a disk that is not mounted is told from a new data root.

A data root carries a marker file with an id; the user's state directory remembers, for every root that
was opened, the id and where its file system was mounted.  A root that is remembered and whose marker is
gone is not created again.  Knows nothing of what a root contains; called by `paths` and `disk.relocate`.
"""

from __future__ import annotations

import hashlib
import os
import uuid
from pathlib import Path

import msgspec

MARKER_NAME = ".quire-data-root"
_RECORDS_FOLDER = "data-roots"


class KnownRoot(msgspec.Struct, frozen=True):
    """A data root that was used; `moved_to` is where `quire disk move` took it."""

    path: str
    id: str
    mount: str
    moved_to: str | None = None


def known_root(state_dir: Path, root: Path) -> KnownRoot | None:
    """What is remembered of `root`; a record that cannot be read counts as none."""
    try:
        return msgspec.json.decode(_record(state_dir, root).read_bytes(), type=KnownRoot)
    except (OSError, msgspec.DecodeError):
        return None


def remember_root(state_dir: Path, known: KnownRoot) -> None:
    """Write the record unless it is there already.  Raises OSError."""
    if known_root(state_dir, Path(known.path)) == known:
        return
    record = _record(state_dir, Path(known.path))
    record.parent.mkdir(parents=True, exist_ok=True)
    temporary = record.with_suffix(f".{os.getpid()}.new")
    temporary.write_bytes(msgspec.json.encode(known))
    temporary.replace(record)


def read_marker(root: Path) -> str | None:
    """The id in the marker, or None where there is no marker.  Raises OSError for one that cannot be read."""
    try:
        return (root / MARKER_NAME).read_text(encoding="ascii", errors="replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        return None


def ensure_marker(root: Path) -> str:
    """The id in the marker, which is made where there is none.  Raises OSError."""
    if found := read_marker(root):
        return found
    marker = root / MARKER_NAME
    temporary = root / f"{MARKER_NAME}.{os.getpid()}.new"
    temporary.write_text(f"{uuid.uuid4().hex}\n", encoding="ascii")
    try:
        # Of two processes that make it at once, one wins and both read the same id.
        os.link(temporary, marker)
    except FileExistsError:
        pass
    except OSError:
        # A file system without hard links.
        temporary.replace(marker)
    finally:
        temporary.unlink(missing_ok=True)
    return read_marker(root) or ""


def mount_of(path: Path) -> Path:
    """The mount point of the file system that holds `path`, or would hold it."""
    place = Path(os.path.realpath(path))
    while not os.path.ismount(place) and place != place.parent:
        place = place.parent
    return place


def reason_missing(known: KnownRoot) -> str:
    """Why a remembered root is not there, and what to do: one sentence."""
    if known.moved_to is not None:
        return (
            f"The data root {known.path} was moved to {known.moved_to}; set QUIRE_HOME to that if it is set, else "
            f"run `quire disk use {known.moved_to}`."
        )
    if not os.path.ismount(known.mount):
        return (
            f"The disk of {known.mount} is not mounted, and the data root {known.path} is on it; mount it, or take "
            "another data root with `quire disk use PATH`."
        )
    return (
        f"The data root {known.path} is gone although its disk {known.mount} is mounted; bring the folder back, or "
        f"begin an empty one with `quire disk use {known.path}`."
    )


def _record(state_dir: Path, root: Path) -> Path:
    return state_dir / _RECORDS_FOLDER / f"{hashlib.sha256(os.fsencode(root)).hexdigest()[:24]}.json"
