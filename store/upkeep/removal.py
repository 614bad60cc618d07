"""Delete an installed model, or what an unfinished download of one has left.

A file goes only when no other model and no other snapshot of its repository needs it.  Knows nothing of
what is in memory: `app` asks the daemon first.  Called by the daemon's delete route and `quire rm`.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from store.errors import InvalidName, ModelNotFound, ModelNotOwned
from store.hf_cache import RepoCache
from store.locks import repo_lock_now
from store.models import Manifest, ModelStore, hub_name
from store.names import CommitId, ModelName, RepoFile, RepoId, parse_model_name
from store.upkeep.prune_caches import allocated_bytes


@dataclass(frozen=True, slots=True)
class Removal:
    """What removing `name` frees, and what stays because `used_by` need it too; sizes in bytes.

    `is_unfinished` is a download that never ended.
    """

    name: str
    freed_bytes: int
    kept_bytes: int = 0
    used_by: tuple[str, ...] = ()
    is_unfinished: bool = False


def plan_removal(store: ModelStore, name: str) -> Removal:
    """What `remove` would do.  Raises ModelNotFound, ModelNotOwned or InvalidName."""
    parsed = _pulled_name(name)
    found = next(store.matching(parsed), None)
    if found is None:
        return Removal(parsed.text, _unfinished(store, parsed).size_bytes, is_unfinished=True)
    return _plan(store, *found)


def remove(store: ModelStore, name: str) -> Removal:
    """Delete a model's manifest and every file that no other model or snapshot needs; says what that freed.

    Raises ModelNotFound, ModelNotOwned, InvalidName or ModelBusy.
    """
    parsed = _pulled_name(name)
    found = next(store.matching(parsed), None)
    if found is None:
        return _remove_unfinished(store, parsed)
    path, manifest = found
    if manifest.path is not None:
        path.unlink(missing_ok=True)
        return Removal(manifest.name, 0)
    with repo_lock_now(store.root, RepoId(manifest.repo)):
        removal = _plan(store, path, manifest)
        path.unlink(missing_ok=True)
        release_files(store, manifest)
        return removal


def remove_unfinished(store: ModelStore, name: str) -> Removal:
    """Delete what an unfinished download has left, and never an installed model.  Raises as `remove`."""
    parsed = _pulled_name(name)
    if next(store.matching(parsed), None) is not None:
        return Removal(parsed.text, 0)
    return _remove_unfinished(store, parsed)


def release_files(store: ModelStore, manifest: Manifest) -> int:
    """Delete what `manifest` named and no registered one needs; bytes freed.  The caller holds the repository's lock.

    The manifest itself is gone or replaced by now.
    """
    cache = RepoCache(store.root.hub, RepoId(manifest.repo))
    return cache.remove_files(CommitId(manifest.commit), _own_files(store, None, manifest)[0])


def _pulled_name(name: str) -> ModelName:
    parsed = parse_model_name(name)
    if parsed.kind == "path":
        raise InvalidName(f"{parsed.text} is a path, and only models that were pulled are deleted; delete it yourself.")
    return parsed


def _plan(store: ModelStore, path: Path, manifest: Manifest) -> Removal:
    if manifest.path is not None:
        return Removal(manifest.name, 0)
    files, used_by = _own_files(store, path, manifest)
    cache = RepoCache(store.root.hub, RepoId(manifest.repo))
    freed_bytes = sum(cache.needed_only_by(CommitId(manifest.commit), files).values())
    there_bytes = sum(file.size_bytes for file in manifest.files)
    return Removal(manifest.name, freed_bytes, max(0, there_bytes - freed_bytes), used_by)


def _own_files(store: ModelStore, path: Path | None, manifest: Manifest) -> tuple[list[RepoFile], tuple[str, ...]]:
    """The files of a snapshot that only the manifest at `path` names, and the models that name the rest."""
    others = [other for its_path, other in store.manifests() if its_path != path and other.repo == manifest.repo]
    blobs = {file.blob for file in manifest.files}
    kept = {file.path for other in others if other.commit == manifest.commit for file in other.files}
    used_by = sorted({other.name for other in others if any(file.blob in blobs for file in other.files)})
    return [RepoFile(file.path) for file in manifest.files if file.path not in kept], tuple(used_by)


@dataclass(frozen=True, slots=True)
class _Unfinished:
    """What downloads of a repository that never ended have left: partial files, and complete ones of no model."""

    repo: RepoId
    partials: list[Path]
    strays: dict[CommitId, list[RepoFile]]
    size_bytes: int


def _remove_unfinished(store: ModelStore, parsed: ModelName) -> Removal:
    repo = _unfinished(store, parsed).repo
    with repo_lock_now(store.root, repo):
        unfinished = _unfinished(store, parsed)
        for path in unfinished.partials:
            path.unlink(missing_ok=True)
        with suppress(OSError):
            (store.root.downloads / repo.folder).rmdir()
        for commit, files in unfinished.strays.items():
            RepoCache(store.root.hub, repo).remove_files(commit, files)
    return Removal(parsed.text, unfinished.size_bytes, is_unfinished=True)


def _unfinished(store: ModelStore, parsed: ModelName) -> _Unfinished:
    """Raises ModelNotFound if nothing is left of a download, ModelNotOwned for a model of a registered folder."""
    hub = hub_name(parsed)
    if external := store.external.find(parsed, hub):
        raise ModelNotOwned(
            f"{external.name} is in {external.folder}, which Quire only reads; delete it there yourself, or "
            f"take the folder off the list with `quire disk remove {external.folder}`."
        )
    if hub.repo is not None:
        folder = store.root.downloads / hub.repo.folder
        partials = [path for path in folder.iterdir() if path.is_file()] if folder.is_dir() else []
        strays = stray_files(store, hub.repo, RepoCache(store.root.hub, hub.repo).placed())
        if partials or strays:
            cache = RepoCache(store.root.hub, hub.repo)
            size_bytes = allocated_bytes(partials)
            size_bytes += sum(sum(cache.needed_only_by(commit, files).values()) for commit, files in strays.items())
            return _Unfinished(hub.repo, partials, strays, size_bytes)
    raise ModelNotFound(f"{parsed.text} is not installed; `quire list` shows what is.")


def stray_files(
    store: ModelStore, repo: RepoId, among: set[tuple[CommitId, RepoFile]]
) -> dict[CommitId, list[RepoFile]]:
    """Which of these files of a repository's snapshots no model names."""
    named = {
        (manifest.commit, file.path)
        for _, manifest in store.manifests()
        if manifest.repo == repo
        for file in manifest.files
    }
    strays: dict[CommitId, list[RepoFile]] = {}
    for commit, file in sorted(among - named):
        strays.setdefault(commit, []).append(file)
    return strays
