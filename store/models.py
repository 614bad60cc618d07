"""`ModelStore`: which models are installed below a data root.

The registry is one small JSON manifest per model beside its weights, in
`<hub>/models--org--name/quire/`: the disk is the only truth, a repository that another tool deletes
takes its manifests with it, a data root can be moved, and nothing needs rebuilding beyond a `pull`,
which finds the blobs and fetches nothing.  SQLite was measured and rejected for this: importing
sqlite-utils costs 0.19 s of the 0.6 s that `quire list` may take, reading 200 manifests 0.01 s.

Knows nothing of networks.  Called by `pull` (registers), `app` (lists, finds, removes) and
`engine.llm` (finds).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from store import catalog
from store.errors import InvalidName, ModelNotFound, ModelNotOwned, UnsupportedFormat
from store.external import ExternalModel, external_models, find_external
from store.formats.gguf_parts import gguf_part_paths
from store.hf_cache import RepoCache
from store.locks import repo_lock_now
from store.names import CommitId, ModelName, RepoFile, RepoId, parse_model_name
from store.paths import DataRoot

_MANIFEST_FOLDER = "quire"
_MAX_MANIFEST_BYTES = 1024 * 1024


class InstalledModel(msgspec.Struct, frozen=True):
    """A model that can be opened: `path` is a directory with config.json or a .gguf file.

    `digest` is the sha256 of a single file, or of the list of digests of several; it may be empty for
    the sources `path` and `external`.  `modified_at` is in seconds since the epoch.
    """

    name: str
    path: Path
    size_bytes: int
    source: str
    digest: str
    modified_at: float
    sampling_defaults: dict[str, float] = {}
    license: str | None = None


class ManifestFile(msgspec.Struct, frozen=True):
    """One file of a snapshot and the blob that holds it."""

    path: str
    blob: str
    size_bytes: int


class Manifest(msgspec.Struct, frozen=True):
    """What `pull` writes down once all files are there and verified.

    `reference` is the hub name that the model stands for, so that an alias and its repository are
    recognised as one model.  `entry` is the GGUF to open, or None for the snapshot directory.
    """

    name: str
    reference: str
    repo: str
    commit: str
    source: str
    files: tuple[ManifestFile, ...]
    entry: str | None
    modified_at: float
    license: str | None = None
    sampling_defaults: dict[str, float] = {}
    format: int = 1


def hub_reference(name: ModelName) -> str:
    """The canonical hub name of an alias or a hub name; an unknown alias is its own."""
    model = catalog.catalog_models().get(name.text) if name.kind == "alias" else None
    if model is None:
        return name.text
    revision = f"@{model.hub.revision}" if model.hub.revision else ""
    file = f":{model.file.name}" if model.file else ""
    return f"{model.hub.repo}{revision}{file}"


class ModelStore:
    """The installed models of one data root; reads the disk on every call and keeps nothing.

    Without `serves_paths` only names are found, never files: for callers that speak for other machines,
    which must neither open files here nor learn which exist.
    """

    def __init__(self, root: DataRoot, *, serves_paths: bool = True) -> None:
        self.root = root
        self._serves_paths = serves_paths

    def list(self) -> list[InstalledModel]:
        """All installed models whose files are still there, and those of registered folders, by name."""
        by_name = {model.name.casefold(): _external(model) for model in external_models(self.root)}
        for _, manifest in self._manifests():
            if model := self._installed(manifest):
                by_name[model.name.casefold()] = model
        return [by_name[name] for name in sorted(by_name)]

    def find(self, name: str) -> InstalledModel:
        """The model of that name, or the directory or GGUF file at that path.

        Raises ModelNotFound with the next step, InvalidName, or UnsupportedFormat for a directory
        that is no model.
        """
        parsed = parse_model_name(name)
        if parsed.kind == "path":
            if not self._serves_paths:
                raise ModelNotFound("Models are served by name here, not by path; `quire list` shows the names.")
            return _model_at_path(parsed)
        if model := self.find_pulled(parsed):
            return model
        if external := find_external(self.root, parsed, _hub_name(parsed)):
            return _external(external)
        raise ModelNotFound(_not_installed(parsed))

    def find_pulled(self, name: ModelName) -> InstalledModel | None:
        """The complete installed model that `name` stands for, if there is one."""
        for _, manifest in self._matching(name):
            if model := self._installed(manifest):
                return model
        return None

    def register(self, manifest: Manifest) -> InstalledModel:
        """Write the manifest of a model whose files are in place; the caller holds the repository's lock."""
        directory = self.root.hub / RepoId(manifest.repo).folder / _MANIFEST_FOLDER
        directory.mkdir(parents=True, exist_ok=True)
        # The name itself may hold characters that file systems refuse.
        path = directory / f"{hashlib.sha256(manifest.name.casefold().encode()).hexdigest()[:32]}.json"
        temporary = path.with_suffix(".new")
        temporary.write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))
        temporary.replace(path)
        model = self._installed(manifest)
        assert model is not None, "a model is registered only when all its files are in place"
        return model

    def remove(self, name: str) -> int:
        """Delete a model's manifest and every file that no other model or snapshot needs; bytes freed.

        Raises ModelNotFound, InvalidName, ModelNotOwned or ModelBusy.
        """
        parsed = parse_model_name(name)
        if parsed.kind == "path":
            raise InvalidName(f"{parsed.text} is not a pulled model; Quire leaves files of yours to you.")
        found = next(self._matching(parsed), None)
        if found is None and (external := find_external(self.root, parsed, _hub_name(parsed))):
            raise ModelNotOwned(
                f"{external.name} is in {external.folder}, which Quire only reads; delete it there yourself, or "
                f"take the folder off the list with `quire disk remove {external.folder}`."
            )
        if found is None:
            raise ModelNotFound(f"{parsed.text} is not installed; `quire list` shows what is.")
        path, manifest = found
        with repo_lock_now(self.root, RepoId(manifest.repo)):
            path.unlink(missing_ok=True)
            others = [other for _, other in self._manifests() if other.repo == manifest.repo]
            kept = {file.path for other in others if other.commit == manifest.commit for file in other.files}
            cache = RepoCache(self.root.hub, RepoId(manifest.repo))
            files = [RepoFile(file.path) for file in manifest.files if file.path not in kept]
            return cache.remove_files(CommitId(manifest.commit), files)

    def _matching(self, name: ModelName) -> Iterator[tuple[Path, Manifest]]:
        """Manifests by display name first, then by what they stand for."""
        manifests = list(self._manifests())
        text = name.text.casefold()
        reference = hub_reference(name).casefold()
        yield from ((path, manifest) for path, manifest in manifests if manifest.name.casefold() == text)
        yield from ((path, manifest) for path, manifest in manifests if manifest.reference.casefold() == reference)

    def _manifests(self) -> Iterator[tuple[Path, Manifest]]:
        """Every readable manifest; a broken one means that its model counts as not installed."""
        for path in self.root.hub.glob(f"models--*/{_MANIFEST_FOLDER}/*.json"):
            try:
                if path.stat().st_size > _MAX_MANIFEST_BYTES:
                    continue
                yield path, msgspec.json.decode(path.read_bytes(), type=Manifest)
            except (OSError, msgspec.DecodeError):
                continue

    def _installed(self, manifest: Manifest) -> InstalledModel | None:
        """The model of a manifest, or None unless every file is there with its size."""
        try:
            snapshot = RepoCache(self.root.hub, RepoId(manifest.repo)).snapshot(CommitId(manifest.commit))
            for file in manifest.files:
                if (snapshot / RepoFile(file.path)).stat().st_size != file.size_bytes:
                    return None
            path = snapshot / RepoFile(manifest.entry) if manifest.entry else snapshot
        except (OSError, InvalidName):
            return None
        return InstalledModel(
            name=manifest.name,
            path=path,
            size_bytes=sum(file.size_bytes for file in manifest.files),
            source=manifest.source,
            digest=_combined_digest(manifest.files),
            modified_at=manifest.modified_at,
            sampling_defaults=manifest.sampling_defaults,
            license=manifest.license,
        )


def _hub_name(name: ModelName) -> ModelName:
    """What an alias stands for on the hub; any other name is its own."""
    return parse_model_name(hub_reference(name)) if name.kind == "alias" else name


def _external(model: ExternalModel) -> InstalledModel:
    return InstalledModel(
        name=model.name,
        path=model.path,
        size_bytes=model.size_bytes,
        source="external",
        digest=model.digest,
        modified_at=model.modified_at,
    )


def _combined_digest(files: tuple[ManifestFile, ...]) -> str:
    if len(files) == 1:
        return files[0].blob
    lines = sorted(f"{file.path} {file.blob}\n" for file in files)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _model_at_path(name: ModelName) -> InstalledModel:
    path = name.path
    assert path is not None
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UnsupportedFormat(f"{path} holds no config.json; name a model directory or a .gguf file.")
        files = [file for file in path.iterdir() if file.is_file()]
    elif path.is_file():
        if path.suffix.lower() != ".gguf":
            raise UnsupportedFormat(f"{path} is not a .gguf file; name a model directory or a .gguf file.")
        files = [part for part in gguf_part_paths(path) if part.is_file()]
    else:
        raise ModelNotFound(f"There is no model at {path}; check the path, or pull a model with `quire pull NAME`.")
    return InstalledModel(
        name=name.text,
        path=path,
        size_bytes=sum(file.stat().st_size for file in files),
        source="path",
        digest="",
        modified_at=max(file.stat().st_mtime for file in files),
    )


def _not_installed(name: ModelName) -> str:
    if name.kind == "alias" and name.text not in catalog.catalog_models():
        return unknown_alias(name)
    return f"{name.text} is not installed; get it with `quire pull {name.text}`."


def unknown_alias(name: ModelName) -> str:
    """The sentence for an alias that the catalogue does not have."""
    similar = catalog.similar_names(name.text)
    hint = f"did you mean {' or '.join(similar)}?" if similar else "name a hub model as `quire pull organisation/name`."
    return f"No model is called {name.text}; {hint}"
