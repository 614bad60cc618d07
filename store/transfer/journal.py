"""The journal of a partial file: which of its byte ranges are complete, across kill -9 and power loss.

    quire-journal 1 <size of the file> <boot id>
    + <start> <end>          these bytes were written
    = <length>               the first `length` bytes of this journal speak of data that is on the disk

A line is written after the data it speaks of, by one append.  A killed process loses nothing that
the system already took, so within one boot every `+` line holds; after another boot only those
before a `=` line do.  Lines that are torn or make no sense are ignored.  Knows no network; used by
`partial_file`.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from store.transfer.extents import Extents

_HEADER = re.compile(rb"quire-journal 1 (\d{1,19}) (\S+)\n")
_LINE = re.compile(rb"\+ (\d{1,19}) (\d{1,19})\n|= (\d{1,19})\n")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_MAX_JOURNAL_BYTES = 64 * 1024 * 1024


def boot_id() -> str:
    """Differs after every start of the system, where the system tells."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip() or "unknown"
    except OSError:
        return "unknown"


def read_journal(path: Path, size_bytes: int, boot: str) -> Extents | None:
    """The ranges that `path` vouches for; None without a journal of a file of this size."""
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_JOURNAL_BYTES)
    except FileNotFoundError:
        return None
    header = _HEADER.match(text)
    if header is None or int(header[1]) != size_bytes:
        return None
    lines: list[tuple[int, int, int]] = []
    synced_length = 0
    position = header.end()
    while position < len(text):
        following = text.find(b"\n", position) + 1 or len(text)
        match = _LINE.fullmatch(text, position, following)
        position = following
        if match is None:
            continue
        if match[3]:
            synced_length = max(synced_length, int(match[3]))
        elif int(match[1]) < int(match[2]) <= size_bytes:
            lines.append((int(match[1]), int(match[2]), position))
    is_same_boot = header[2].decode("ascii", "replace") == boot
    return Extents((start, end) for start, end, until in lines if is_same_boot or until <= synced_length)


class Journal:
    """An open journal; one owner at a time."""

    def __init__(self, path: Path, size_bytes: int, extents: Extents, boot: str) -> None:
        """Begin anew with what is known; the old journal stays until the new one is complete.  Raises OSError."""
        self._length = 0
        temporary = path.with_name(path.name + ".new")
        self._descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            self._append(f"quire-journal 1 {size_bytes} {boot}\n" + _lines(extents))
            temporary.replace(path)
        except OSError:
            os.close(self._descriptor)
            temporary.unlink(missing_ok=True)
            raise

    @property
    def length(self) -> int:
        """Bytes written so far, for `mark_synced`."""
        return self._length

    def record(self, extents: Extents) -> None:
        """Say that these ranges were written.  Raises OSError."""
        self._append(_lines(extents))

    def mark_synced(self, length: int) -> None:
        """Say that what the first `length` bytes speak of is on the disk.  Raises OSError."""
        self._append(f"= {length}\n")

    def close(self) -> None:
        os.close(self._descriptor)

    def _append(self, text: str) -> None:
        encoded = text.encode("ascii")
        written = os.write(self._descriptor, encoded)
        self._length += written
        if written < len(encoded):
            # A disk that fills up takes part of a write first; the next attempt gives the reason.
            self._length += os.write(self._descriptor, b"\n")


def _lines(extents: Extents) -> str:
    return "".join(f"+ {start} {end}\n" for start, end in extents)
