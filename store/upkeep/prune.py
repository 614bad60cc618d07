"""What below the data root nobody needs any more, and deleting it.

Found without asking: files that Quire put into the cache for no model, blobs without a link, unfinished
downloads that are old or superseded, files that were set aside as broken, and what `prune_caches` finds.
Whatever else lies in the cache is taken for another tool's, and found only when `everything` is asked for.
Called by `quire prune`.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from store.bundles.bundle_import import IMPORT_FOLDER_PREFIX
from store.errors import InvalidName
from store.hf_cache import RepoCache
from store.locks import repo_lock_now
from store.models import Manifest, ModelStore
from store.names import CommitId, RepoFile, RepoId
from store.upkeep.prune_caches import Waste, allocated_bytes, is_old, stale_kernels, stale_packed_weights
from store.upkeep.removal import stray_files
from store.upkeep.verify import SET_ASIDE_SUFFIX

_DAY_S = 86400.0


@dataclass(frozen=True, slots=True)
class Finding:
    """Something to delete; under the lock of `repo`, `remove` deletes what is still not needed then."""

    waste: Waste
    remove: Callable[[], None] = field(compare=False)
    repo: RepoId | None = None


def find_waste(store: ModelStore, *, older_than_days: float, everything: bool = False) -> list[Finding]:
    """All that `prune` would delete; nothing is changed."""
    manifests = [manifest for _, manifest in store.manifests()]
    search = _Search(store, manifests, older_than_days * _DAY_S, everything=everything)
    findings = [*search.in_cache(), *search.in_downloads()]
    kernels = store.root.kernels
    for waste in (*stale_packed_weights(kernels), *stale_kernels(kernels, older_than_days * _DAY_S)):
        findings.append(Finding(waste, _deletion(waste.paths)))
    return findings


def prune(store: ModelStore, finding: Finding) -> int:
    """Delete it; bytes freed.  Raises ModelBusy while its repository is being downloaded, or OSError."""
    with repo_lock_now(store.root, finding.repo) if finding.repo else nullcontext():
        before_bytes = allocated_bytes(finding.waste.paths)
        finding.remove()
        return before_bytes - allocated_bytes(finding.waste.paths)


@dataclass(frozen=True, slots=True)
class _Search:
    store: ModelStore
    manifests: list[Manifest]
    old_after_s: float
    everything: bool

    def in_cache(self) -> Iterator[Finding]:
        for directory in sorted(self.store.root.hub.glob("*--*")):
            if directory.is_dir() and (repo := _repo(directory.name)) is not None:
                if any(manifest.repo == repo for manifest in self.manifests) or (directory / "quire").is_dir():
                    yield from self._in_repo(repo)
                elif self.everything:
                    reason = "in the cache, but of no model that Quire installed"
                    waste = Waste("other files", str(repo), reason, allocated_bytes([directory]), (directory,))
                    yield Finding(waste, self._unless_installed(repo, _deletion((directory,))), repo)

    def _in_repo(self, repo: RepoId) -> Iterator[Finding]:
        cache = RepoCache(self.store.root.hub, repo)
        strays = self._strays(repo)
        sizes = {
            path: size for commit, files in strays.items() for path, size in cache.needed_only_by(commit, files).items()
        }
        links = [cache.snapshot(commit) / file for commit, files in strays.items() for file in files]
        if strays:
            waste = Waste("files", str(repo), "of no installed model", sum(sizes.values()), (*links, *sizes))
            yield Finding(waste, lambda: self._remove_strays(repo), repo)
        if unlinked := self._unlinked(cache):
            waste = Waste("files", str(repo), "in no snapshot", sum(unlinked.values()), tuple(unlinked))
            yield Finding(waste, lambda: _delete(self._unlinked(cache)), repo)

    def _unlinked(self, cache: RepoCache) -> dict[Path, int]:
        return {path: size for path, size in cache.unlinked_blobs().items() if is_old(path, self.old_after_s)}

    def _strays(self, repo: RepoId) -> dict[CommitId, list[RepoFile]]:
        """Files of snapshots that no model names: Quire's own once they are old, others' if everything is asked for.

        A download that was paused between two files goes on with those it has.
        """
        cache = RepoCache(self.store.root.hub, repo)
        placed = cache.placed()
        strays = {place for place in placed if is_old(cache.snapshot(place[0]) / place[1], self.old_after_s)}
        if self.everything:
            strays |= set(cache.snapshot_files()) - placed
        return stray_files(self.store, repo, strays)

    def _remove_strays(self, repo: RepoId) -> None:
        for commit, files in self._strays(repo).items():
            RepoCache(self.store.root.hub, repo).remove_files(commit, files)

    def _unless_installed(self, repo: RepoId, remove: Callable[[], None]) -> Callable[[], None]:
        def remove_if_still_foreign() -> None:
            if not any(manifest.repo == repo for _, manifest in self.store.manifests()):
                remove()

        return remove_if_still_foreign

    def in_downloads(self) -> Iterator[Finding]:
        downloads = self.store.root.downloads
        if not downloads.is_dir():
            return
        for entry in sorted(downloads.iterdir()):
            repo = _repo(entry.name.removeprefix(IMPORT_FOLDER_PREFIX))
            if repo is None or not entry.is_dir():
                continue
            if entry.name.startswith(IMPORT_FOLDER_PREFIX):
                # One that is at work holds the repository's lock, and then nothing is deleted.
                waste = Waste("import", str(repo), "never finished", allocated_bytes([entry]), (entry,))
                yield Finding(waste, _deletion(waste.paths), repo)
            else:
                yield from self._partials(repo, entry)

    def _partials(self, repo: RepoId, folder: Path) -> Iterator[Finding]:
        """Downloads of one repository, a finding for each reason there is."""
        by_reason: dict[str, list[Path]] = {}
        cache = RepoCache(self.store.root.hub, repo)
        for path in sorted(folder.iterdir()):
            if reason := self._reason_needless(cache, path):
                by_reason.setdefault(reason, []).append(path)
        for reason, paths in by_reason.items():
            waste = Waste("download", str(repo), reason, allocated_bytes(paths), tuple(paths))
            yield Finding(waste, _deletion(waste.paths, folder), repo)

    def _reason_needless(self, cache: RepoCache, path: Path) -> str | None:
        if path.suffix == SET_ASIDE_SUFFIX:
            return "set aside as broken"
        # A blob's name has no dot; the suffixes of its partial and journal begin with one.
        if cache.blob(path.name.partition(".")[0]).is_file():
            return "complete by now"
        return f"unfinished for {self.old_after_s / _DAY_S:g} days" if is_old(path, self.old_after_s) else None


def _repo(folder: str) -> RepoId | None:
    try:
        return RepoId.of_folder(folder)
    except InvalidName:
        return None


def _deletion(paths: tuple[Path, ...], folder: Path | None = None) -> Callable[[], None]:
    """Delete these, and then their folder if it is empty."""

    def delete() -> None:
        _delete(paths)
        if folder is not None and not any(folder.iterdir()):
            folder.rmdir()

    return delete


def _delete(paths: Iterable[Path]) -> None:
    for path in paths:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
