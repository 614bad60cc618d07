"""Copies files so that a copy has its name only once it is whole and compared with the original.

Symbolic links stay relative, hard links stay one file, and on one file system nothing is copied at all: the
target gets a second link.  A copy that was interrupted goes on at its last byte.  Knows nothing of data
roots; called by `relocate`.
"""

from __future__ import annotations

import filecmp
import hashlib
import os
import re
import stat
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from store.errors import BrokenFile

_CHUNK_BYTES = 4 * 2**20
_COMPARED_BYTES = 2**20
"""Up to this size a copy from an earlier attempt is compared; above it, size and time decide."""
_TIME_TOLERANCE_S = 2.0
"""What the coarsest file systems round times to."""
_UNFINISHED = ".moving"
_UNFINISHED_LINK = ".linking"
_SHA256 = re.compile(r"[0-9a-f]{64}")


def unfinished(path: Path, original: Path) -> bool:
    """Whether `path` is the beginning of a copy of a file that `original`'s folder still has."""
    return path.name.endswith(_UNFINISHED) and original.with_name(path.name.removesuffix(_UNFINISHED)).exists()


class Copier:
    """Copies from below `source` to the same places below `target`; counts bytes and damage.

    `on_progress` gets "copying" or "verifying", bytes done and bytes in all.
    """

    def __init__(
        self, source: Path, target: Path, on_progress: Callable[[str, int, int], None], *, may_link: bool
    ) -> None:
        self.source = source
        self.target = target
        self.copied_bytes = 0
        self.damaged: list[Path] = []
        self._on_progress = on_progress
        self._may_link = may_link
        self._done = {"copying": 0, "verifying": 0}
        self._total_bytes = 0
        self._copied_inodes: dict[tuple[int, int], Path] = {}

    def place(self, path: Path) -> Path:
        """Where the copy of `path` goes."""
        return self.target / path.relative_to(self.source)

    def has(self, path: Path) -> bool:
        """Whether the copy of `path` is there, from this attempt or an earlier one."""
        copy = self.place(path)
        is_there = _is_copied(path, copy)
        if is_there and not path.is_symlink() and path.is_file():
            facts = path.stat()
            self._copied_inodes[facts.st_dev, facts.st_ino] = copy
        return is_there

    def expect(self, num_bytes: int) -> None:
        """Add to the bytes in all."""
        self._total_bytes += num_bytes

    def needed_bytes(self, files: Sequence[Path]) -> int:
        """What copying these takes on the target's disk; hard links once, begun copies credited."""
        device = self.target.stat().st_dev
        seen = set(self._copied_inodes)
        needed = 0
        for path in files:
            with suppress(FileNotFoundError):
                facts = path.stat()
                is_linked = self._may_link and facts.st_dev == device
                if not is_linked and (facts.st_dev, facts.st_ino) not in seen:
                    seen.add((facts.st_dev, facts.st_ino))
                    needed += max(0, facts.st_size - _size(_beginning(self.place(path))))
        return needed

    def copy(self, path: Path) -> None:
        """Copy a directory (itself alone), a link or a file.  Raises OSError or BrokenFile."""
        facts = path.lstat()
        copy = self.place(path)
        if stat.S_ISDIR(facts.st_mode):
            copy.mkdir(exist_ok=True)
        elif stat.S_ISLNK(facts.st_mode):
            self._copy_link(path, copy)
        elif stat.S_ISREG(facts.st_mode):
            self._copy_file(path, copy, facts)

    def _copy_link(self, path: Path, copy: Path) -> None:
        pointed = path.readlink()
        if pointed.is_relative_to(self.source):
            pointed = Path(os.path.relpath(pointed, path.parent))
        temporary = _beginning(copy)
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(pointed)
        temporary.replace(copy)

    def _copy_file(self, path: Path, copy: Path, facts: os.stat_result) -> None:
        inode = (facts.st_dev, facts.st_ino)
        twin = self._copied_inodes.get(inode) if facts.st_nlink > 1 else None
        if twin is None or not _link(twin, copy):
            is_linked = self._may_link and facts.st_dev == self.target.stat().st_dev and _link(path, copy)
            if not is_linked:
                self._copy_bytes(path, copy)
                self.copied_bytes += facts.st_size
                self._copied_inodes[inode] = copy
                return
        _beginning(copy).unlink(missing_ok=True)
        self._count("copying", facts.st_size)
        self._count("verifying", facts.st_size)

    def _copy_bytes(self, path: Path, copy: Path) -> None:
        temporary = _beginning(copy)
        if not self._is_equal_copy(path, temporary):
            # The beginning may be of an earlier version of the file, or a disk may have lost it in a crash.
            temporary.unlink(missing_ok=True)
            if not self._is_equal_copy(path, temporary):
                raise BrokenFile(
                    f"The copy of {path} differs from the original; check the disk of {self.target}, then run the "
                    "move again."
                )
        facts = path.stat()
        os.utime(temporary, ns=(facts.st_atime_ns, facts.st_mtime_ns))
        temporary.chmod(stat.S_IMODE(facts.st_mode))
        temporary.replace(copy)

    def _is_equal_copy(self, path: Path, temporary: Path) -> bool:
        self._append_rest(path, temporary)
        found = self._digest(temporary)
        promised = path.name if path.parent.name == "blobs" and _SHA256.fullmatch(path.name) else None
        if found == promised:
            return True
        is_equal = found == _sha256(path, lambda _: None)
        if is_equal and promised is not None:
            self.damaged.append(path)
        return is_equal

    def _append_rest(self, path: Path, temporary: Path) -> None:
        with path.open("rb") as original, temporary.open("ab") as copy:
            begun_bytes = copy.tell()
            original.seek(begun_bytes)
            self._count("copying", begun_bytes)
            while chunk := original.read(_CHUNK_BYTES):
                copy.write(chunk)
                self._count("copying", len(chunk))
            copy.flush()
            os.fsync(copy.fileno())

    def _digest(self, temporary: Path) -> str:
        return _sha256(temporary, lambda num_bytes: self._count("verifying", num_bytes))

    def _count(self, stage: str, num_bytes: int) -> None:
        self._done[stage] = min(self._done[stage] + num_bytes, self._total_bytes)
        self._on_progress(stage, self._done[stage], self._total_bytes)


def _is_copied(path: Path, copy: Path) -> bool:
    """Whether `copy` is what `Copier.copy` makes of `path`."""
    try:
        original, found = path.lstat(), copy.lstat()
    except OSError:
        return False
    if stat.S_IFMT(original.st_mode) != stat.S_IFMT(found.st_mode):
        return False
    if stat.S_ISDIR(original.st_mode):
        return True
    if stat.S_ISLNK(original.st_mode):
        return path.readlink() == copy.readlink()
    if (original.st_ino, original.st_dev) == (found.st_ino, found.st_dev):
        return True
    if original.st_size != found.st_size:
        return False
    if original.st_size <= _COMPARED_BYTES:
        return filecmp.cmp(path, copy, shallow=False)
    return abs(original.st_mtime - found.st_mtime) <= _TIME_TOLERANCE_S


def _beginning(copy: Path) -> Path:
    return copy.with_name(copy.name + _UNFINISHED)


def _link(existing: Path, new: Path) -> bool:
    """Give a file a second name; False where the file system will not."""
    temporary = new.with_name(new.name + _UNFINISHED_LINK)
    temporary.unlink(missing_ok=True)
    try:
        os.link(existing, temporary)
    except OSError:
        return False
    temporary.replace(new)
    # Of two names of one file, rename leaves both.
    temporary.unlink(missing_ok=True)
    return True


def _sha256(path: Path, count: Callable[[int], None]) -> str:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        # What is compared is what the disk has, not what memory still holds.
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            count(len(chunk))
    return digest.hexdigest()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
