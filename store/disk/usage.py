"""What takes the room below a data root, by folder and by model.  Only looks; called by `quire disk usage`."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from store.disk.filesystems import free_bytes_at
from store.errors import InvalidName
from store.known_roots import mount_of
from store.names import RepoId
from store.paths import DataRoot


@dataclass(frozen=True, slots=True)
class Usage:
    """Bytes that files take; hard links count once.  `models` has one entry for each repository."""

    models: dict[str, int]
    downloads: int
    kernels: int
    packed_weights: int
    logs: int
    mount: Path
    free_bytes: int

    @property
    def total_bytes(self) -> int:
        return sum(self.models.values()) + self.downloads + self.kernels + self.packed_weights + self.logs


def disk_usage(root: DataRoot) -> Usage:
    """Sum up the data root; files that vanish meanwhile count as nothing."""
    repos = {repo: path for path in sorted(root.hub.glob("*--*")) if path.is_dir() and (repo := _repo_of(path))}
    packed = _sum(path for path in _files(root.kernels) if path.suffix == ".safetensors")
    return Usage(
        models={str(repo): _sum(_files(path)) for repo, path in repos.items()},
        downloads=_sum(_files(root.downloads)),
        kernels=_sum(_files(root.kernels)) - packed,
        packed_weights=packed,
        logs=_sum(_files(root.logs)),
        mount=mount_of(root.root),
        free_bytes=free_bytes_at(root.root),
    )


def _repo_of(path: Path) -> RepoId | None:
    """The repository a directory of the cache belongs to, or None for what is no repository's."""
    try:
        return RepoId.of_folder(path.name)
    except InvalidName:
        return None


def _files(folder: Path) -> Iterable[Path]:
    return (Path(place, name) for place, _, names in os.walk(folder) for name in names)


def _sum(files: Iterable[Path]) -> int:
    sizes: dict[tuple[int, int], int] = {}
    for path in files:
        try:
            facts = path.lstat()
        except OSError:
            continue
        # What is allocated, since an unfinished download may have holes; a small file takes a block.
        sizes[facts.st_dev, facts.st_ino] = facts.st_blocks * 512
    return sum(sizes.values())
