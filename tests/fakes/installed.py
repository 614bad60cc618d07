"""Models put into a store by hand, as a pull leaves them."""

from __future__ import annotations

from store.hf_cache import RepoCache
from store.models import InstalledModel, Manifest, ManifestFile, ModelStore
from store.names import CommitId, Digest, RepoFile, RepoId
from tests.fakes.hub import COMMIT, sha256


def install(
    store: ModelStore, name: str, repo: str, files: dict[str, bytes], *, entry: str | None = None, commit: str = COMMIT
) -> InstalledModel:
    """Put `files` into the cache under their sha256 and register them as a model."""
    cache = RepoCache(store.root.hub, RepoId(repo))
    for file, content in files.items():
        partial = store.root.downloads / "file.partial"
        partial.write_bytes(content)
        cache.add(partial, CommitId(commit), RepoFile(file), Digest(sha256(content)))
    manifest_files = tuple(ManifestFile(file, sha256(content), len(content)) for file, content in files.items())
    return store.register(Manifest(name, name, repo, commit, "hub", manifest_files, entry, 1.0))
