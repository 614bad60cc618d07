"""Read every file of installed models again and compare it with the digest in its manifest.

A file that is not what it should be is set aside, so that the next pull of the model fetches that file
and nothing else.  Knows no network; called by `quire verify`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from store.digests import file_matches, is_digest
from store.hf_cache import RepoCache
from store.locks import repo_lock_now
from store.models import Manifest, ManifestFile, ModelStore, find_manifest, pullable_name
from store.names import CommitId, Digest, RepoFile, RepoId
from store.progress import Reporter

SET_ASIDE_SUFFIX = ".broken"


@dataclass(frozen=True, slots=True)
class BrokenPart:
    """A file of a model, and what is wrong with it."""

    file: str
    reason: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of one model; `unchecked` are files whose digest was never known.

    Pulling `mended_by` fetches the broken ones again.
    """

    name: str
    mended_by: str
    size_bytes: int
    broken: tuple[BrokenPart, ...] = ()
    unchecked: tuple[str, ...] = ()

    @property
    def is_sound(self) -> bool:
        return not self.broken


def models_to_verify(store: ModelStore, names: Sequence[str]) -> list[Manifest]:
    """The manifests of these models, or of all; damaged ones too.  Raises ModelNotFound or InvalidName."""
    if not names:
        found = [manifest for _, manifest in store.manifests()]
        return sorted(found, key=lambda manifest: manifest.name.casefold())
    return [find_manifest(store, name) for name in dict.fromkeys(names)]


class Verifier:
    """Checks models one after another; a blob that several of them share is read once."""

    def __init__(self, store: ModelStore, reporter: Reporter) -> None:
        self._store = store
        self._reporter = reporter
        self._reasons: dict[Path, str | None] = {}

    def expect(self, manifests: Sequence[Manifest]) -> None:
        """Say what all there is to read consists of, before the first is verified."""
        unique = {
            (file.blob, manifest.repo): (manifest, file) for manifest in reversed(manifests) for file in manifest.files
        }
        self._reporter.expect({_label(manifest, file): file.size_bytes for manifest, file in unique.values()})

    def verify(self, manifest: Manifest) -> Verdict:
        """Hash a model's files.  Raises InvalidName, Cancelled, or ModelBusy where a broken file cannot go now."""
        if manifest.path is not None:
            return Verdict(manifest.name, manifest.name, 0, unchecked=(manifest.path,))
        broken: list[BrokenPart] = []
        unchecked: list[str] = []
        cache = RepoCache(self._store.root.hub, RepoId(manifest.repo))
        for file in manifest.files:
            path = cache.snapshot(CommitId(manifest.commit)) / RepoFile(file.path)
            if not is_digest(file.blob):
                unchecked.append(file.path)
            elif reason := self._reason_broken(manifest, file, path):
                broken.append(BrokenPart(file.path, reason))
        size_bytes = sum(file.size_bytes for file in manifest.files)
        mended_by = pullable_name(self._store, manifest) if broken else manifest.name
        return Verdict(manifest.name, mended_by, size_bytes, tuple(broken), tuple(unchecked))

    def _reason_broken(self, manifest: Manifest, file: ManifestFile, path: Path) -> str | None:
        try:
            resolved = path.resolve(strict=True)
            size_bytes = resolved.stat().st_size
        except OSError:
            return "it is missing"
        if resolved not in self._reasons:
            reason = None
            if size_bytes != file.size_bytes:
                reason = f"it has {size_bytes:,} bytes instead of {file.size_bytes:,}"
            elif not self._matches(manifest, file, resolved):
                reason = "its bytes are not those that were downloaded"
            if reason is not None:
                self._set_aside(RepoId(manifest.repo), path, resolved)
            self._reasons[resolved] = reason
        return self._reasons[resolved]

    def _matches(self, manifest: Manifest, file: ManifestFile, path: Path) -> bool:
        def report(done_bytes: int) -> None:
            self._reporter.raise_if_cancelled()
            self._reporter.count("verifying", _label(manifest, file), done_bytes, file.size_bytes)

        try:
            return file_matches(path, Digest(file.blob), report)
        except OSError:
            # A disk that cannot give the bytes back has lost them.
            return False

    def _set_aside(self, repo: RepoId, path: Path, resolved: Path) -> None:
        """Move the bytes out of the cache, where a pull would take them for complete."""
        root = self._store.root
        with repo_lock_now(root, repo):
            if not resolved.is_relative_to(root.hub.resolve()):
                # Another tool's store, shared by a second link: the bytes are its own to mend.
                path.unlink()
                return
            folder = root.downloads / repo.folder
            folder.mkdir(parents=True, exist_ok=True)
            resolved.replace(folder / (resolved.name + SET_ASIDE_SUFFIX))


def _label(manifest: Manifest, file: ManifestFile) -> str:
    return f"{manifest.name} {file.path}"
