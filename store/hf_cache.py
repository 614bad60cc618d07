"""The Hugging Face cache layout, so that other tools find and share what Quire downloads.

    <hub>/models--org--name/blobs/<digest>                     the bytes
    <hub>/models--org--name/snapshots/<commit>/<file>          a relative symbolic link to a blob
    <hub>/models--org--name/refs/<revision>                    the commit a branch or tag stood for
    <hub>/models--org--name/quire/placed                       files of snapshots that Quire put there

On a file system without symbolic links the blob is moved into the snapshot instead, as
huggingface_hub does.  Knows nothing of where bytes come from; called by `pull` and `models`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from store.errors import InvalidName
from store.names import CommitId, RepoFile, RepoId, Revision


@dataclass(frozen=True, slots=True)
class RepoCache:
    """One repository below `hub`."""

    hub: Path
    repo: RepoId

    @property
    def directory(self) -> Path:
        return self.hub / self.repo.folder

    @property
    def snapshots(self) -> Path:
        return self.directory / "snapshots"

    def blob(self, blob_name: str) -> Path:
        return self.directory / "blobs" / blob_name

    def snapshot(self, commit: CommitId) -> Path:
        return self.snapshots / commit

    def has(self, commit: CommitId, file: RepoFile, blob_name: str, size_bytes: int) -> bool:
        """Whether the file is there in full, in the snapshot or as a blob alone; changes nothing.

        A blob gets its name only after its digest was checked, so the size is enough here.
        """
        link = self.snapshot(commit) / file
        return _has_size(self.blob(blob_name), size_bytes) or (not link.is_symlink() and _has_size(link, size_bytes))

    def holds(self, commit: CommitId, file: RepoFile, blob_name: str, size_bytes: int) -> bool:
        """Whether the file is there in full; links it into the snapshot when only its blob was."""
        if not self.has(commit, file, blob_name, size_bytes):
            return False
        link = self.snapshot(commit) / file
        blob = self.blob(blob_name)
        if _has_size(blob, size_bytes) and not (link.exists() and link.samefile(blob)):
            self._link(link, blob)
        return True

    def add(self, verified: Path, commit: CommitId, file: RepoFile, blob_name: str) -> None:
        """Move a complete, verified file in.  Atomic: a reader sees all of it or nothing."""
        blob = self.blob(blob_name)
        blob.parent.mkdir(parents=True, exist_ok=True)
        _sync(verified)
        verified.replace(blob)
        _sync(blob.parent)
        self._link(self.snapshot(commit) / file, blob)

    def ref(self, revision: Revision) -> Path:
        return self.directory / "refs" / revision

    def write_ref(self, revision: Revision, commit: CommitId) -> None:
        ref = self.ref(revision)
        ref.parent.mkdir(parents=True, exist_ok=True)
        temporary = ref.with_name(ref.name + ".new")
        temporary.write_text(commit, encoding="ascii")
        temporary.replace(ref)

    def needed_only_by(self, commit: CommitId, files: Iterable[RepoFile]) -> dict[Path, int]:
        """What would go with `files` of a snapshot: blobs that nothing else links to, with their sizes in bytes."""
        links = {self.snapshot(commit) / file for file in files}
        others = {target for link in self._links() - links if (target := _target(link))}
        sizes: dict[Path, int] = {}
        for link in links:
            path = _target(link) or link
            is_ours = path == link or path.parent == self.blob("x").parent
            if is_ours and path not in others and path.is_file():
                sizes[path] = path.lstat().st_size
        return sizes

    def remove_files(self, commit: CommitId, files: Collection[RepoFile]) -> int:
        """Remove files from a snapshot, then blobs that no snapshot links to any more; bytes freed."""
        sizes = self.needed_only_by(commit, files)
        for file in files:
            (self.snapshot(commit) / file).unlink(missing_ok=True)
        for path in sizes:
            path.unlink(missing_ok=True)
        self._remove_empty_directories()
        return sum(sizes.values())

    def unlinked_blobs(self) -> dict[Path, int]:
        """Complete blobs that no snapshot links to, with their sizes in bytes."""
        linked = {_target(link) for link in self._links()}
        blobs = self.blob("x").parent.glob("*")
        # Other tools write into the same folder, under names with a suffix.
        return {path: path.lstat().st_size for path in blobs if path not in linked and not path.suffix}

    def placed(self) -> set[tuple[CommitId, RepoFile]]:
        """Files of snapshots that Quire put there, for a model or for one that never was complete."""
        try:
            lines = self._placed.read_text(encoding="utf-8").split("\n")
        except (OSError, UnicodeDecodeError):
            return set()
        recorded = set()
        for line in lines:
            commit, _, file = line.partition("/")
            # A kill may have cut the last line short.
            with suppress(InvalidName):
                recorded.add((CommitId(commit), RepoFile(file)))
        return recorded & set(self.snapshot_files())

    @property
    def _placed(self) -> Path:
        return self.directory / "quire" / "placed"

    def snapshot_files(self) -> list[tuple[CommitId, RepoFile]]:
        """Every file of every snapshot, whoever put it there; oddly named ones are not ours and left out."""
        found = []
        for path in self.snapshots.rglob("*"):
            if path.is_symlink() or path.is_file():
                commit, _, file = path.relative_to(self.snapshots).as_posix().partition("/")
                with suppress(InvalidName):
                    found.append((CommitId(commit), RepoFile(file)))
        return found

    def _links(self) -> set[Path]:
        return {path for path in self.snapshots.rglob("*") if path.is_symlink()}

    def _remove_empty_directories(self) -> None:
        directories = [path for path in self.snapshots.rglob("*") if path.is_dir() and not path.is_symlink()]
        for path in sorted(directories, key=lambda path: len(path.parts), reverse=True):
            if not any(path.iterdir()):
                path.rmdir()
        if self.snapshots.is_dir() and not any(self.snapshots.iterdir()):
            shutil.rmtree(self.directory)

    def _link(self, link: Path, blob: Path) -> None:
        link.parent.mkdir(parents=True, exist_ok=True)
        if not (link.exists() or link.is_symlink()):
            self._placed.parent.mkdir(exist_ok=True)
            with self._placed.open("a", encoding="utf-8") as record:
                record.write(link.relative_to(self.snapshots).as_posix() + "\n")
        temporary = link.with_name(link.name + ".new")
        temporary.unlink(missing_ok=True)
        try:
            temporary.symlink_to(os.path.relpath(blob, link.parent))
        except OSError:
            blob.replace(link)
            return
        temporary.replace(link)


def _target(link: Path) -> Path | None:
    """What a link in a snapshot points at; None for a file that is no link.

    One hop only: newer versions of huggingface_hub share blobs between repositories by a second link.
    """
    return Path(os.path.normpath(link.parent / link.readlink())) if link.is_symlink() else None


def _has_size(path: Path, size_bytes: int) -> bool:
    try:
        return path.stat().st_size == size_bytes
    except OSError:
        return False


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
