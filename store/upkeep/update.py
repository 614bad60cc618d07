"""Which installed models have a newer commit at their source, and bringing them there.

Files that did not change stay, old ones go once the new model is complete.  Knows networks only through
the functions it is given; called by `quire outdated` and `quire update`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

from store.errors import StoreError
from store.locks import repo_lock
from store.models import InstalledModel, Manifest, ModelStore, find_manifest
from store.names import CommitId, RepoId, parse_model_name
from store.progress import Reporter
from store.upkeep.removal import release_files

CurrentCommit = Callable[[str], CommitId]
"""What a model's name stands for at its source now; raises a StoreError."""

Refresh = Callable[[str], InstalledModel]
"""`store.pull.pull` with `refresh`, for a model's name."""

_AT_ONCE = 8

State = Literal["current", "outdated", "pinned", "made here", "unknown"]


@dataclass(frozen=True, slots=True)
class Standing:
    """An installed model against its source; `reason` is a sentence where there is more to say."""

    name: str
    commit: str
    state: State
    current: str | None = None
    reason: str | None = None


def standings(store: ModelStore, names: Sequence[str], current_commit: CurrentCommit) -> Iterator[Standing]:
    """Each of these models, or of all, several asked at once.  Raises ModelNotFound or InvalidName."""
    if names:
        chosen = [find_manifest(store, name) for name in dict.fromkeys(names)]
    else:
        chosen = sorted((manifest for _, manifest in store.manifests()), key=lambda manifest: manifest.name.casefold())
    with ThreadPoolExecutor(max_workers=_AT_ONCE) as pool:
        yield from pool.map(lambda manifest: _standing(manifest, current_commit), chosen)


def _standing(manifest: Manifest, current_commit: CurrentCommit) -> Standing:
    if manifest.base is not None:
        reason = f"it was made from {manifest.base}; make it again once that is updated."
        return Standing(manifest.name, manifest.commit, "made here", reason=reason)
    if _is_pinned(manifest):
        reason = f"its name stands for one version ({manifest.reference})."
        return Standing(manifest.name, manifest.commit, "pinned", reason=reason)
    try:
        current = current_commit(manifest.name)
    except StoreError as error:
        return Standing(manifest.name, manifest.commit, "unknown", reason=error.message)
    state: State = "current" if current == manifest.commit else "outdated"
    return Standing(manifest.name, manifest.commit, state, str(current))


def _is_pinned(manifest: Manifest) -> bool:
    """Whether the name stands for one commit, or one version of a package, for ever."""
    name = parse_model_name(manifest.reference)
    is_version = name.repo is not None and name.repo.registry == "pypi" and name.revision is not None
    return is_version or str(name.revision) == manifest.commit


@dataclass(frozen=True, slots=True)
class Update:
    """What an update did; `freed_bytes` are those of files that only the old commit had."""

    name: str
    old_commit: str
    new_commit: str
    freed_bytes: int


def update_model(store: ModelStore, name: str, refresh: Refresh, reporter: Reporter) -> Update:
    """Bring an installed model to its source's current commit; a failure leaves the old one installed.

    Raises what `refresh` raises, ModelNotFound or InvalidName.
    """
    before = find_manifest(store, name)
    refresh(before.name)
    after = find_manifest(store, name)
    freed_bytes = 0
    if (after.commit, after.files) != (before.commit, before.files):
        repo = RepoId(before.repo)
        with repo_lock(store.root, repo, reporter, on_wait=lambda: reporter.say(f"waiting for a pull of {repo}")):
            freed_bytes = release_files(store, before)
    return Update(before.name, before.commit, after.commit, freed_bytes)
