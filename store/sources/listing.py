"""What a repository of a hub holds, whichever hub it is: the common form of all listings."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import quote

from store.errors import InvalidName
from store.names import CommitId, Digest, RepoFile, RepoId


@dataclass(frozen=True, slots=True)
class HubFile:
    """One file of a listing; a hub that reports neither size nor digest leaves None."""

    path: RepoFile
    size_bytes: int | None
    digest: Digest | None


@dataclass(frozen=True, slots=True)
class RepoListing:
    """A repository at one commit, as `endpoint` lists it.

    `resolve_base` is the address below which the files' bytes lie.
    """

    repo: RepoId
    endpoint: str
    commit: CommitId
    resolve_base: str
    files: tuple[HubFile, ...]
    license: str | None = None
    is_gated: bool = False

    def url_of(self, file: RepoFile) -> str:
        """The address of a file's bytes at this commit."""
        return f"{self.resolve_base}/{quote(file)}"

    def find(self, file: RepoFile) -> HubFile | None:
        """The listed file of that path."""
        return next((listed for listed in self.files if listed.path == file), None)


def listed_file(path: str, size_bytes: int | None, digest: str | None) -> HubFile | None:
    """A file as validated values; None for a name that must not touch a disk, which no model needs.

    Raises InvalidName for a digest that is none.
    """
    try:
        name = RepoFile(path)
    except InvalidName:
        return None
    known_size = size_bytes if size_bytes is not None and size_bytes >= 0 else None
    return HubFile(name, known_size, Digest(digest) if digest else None)
