"""`ModelStore`: which models are installed below a data root.

The registry is one small JSON manifest per model beside its weights, in
`<hub>/models--org--name/quire/`: the disk is the only truth, a repository that another tool deletes
takes its manifests with it, a data root can be moved, and nothing needs rebuilding beyond a `pull`,
which finds the blobs and fetches nothing.  Several manifests may name the same files, under names and
with presets of their own; those made of files outside the hub lie in `<data root>/presets/`.  SQLite was
measured and rejected for this: importing sqlite-utils costs 0.19 s of the 0.6 s that `quire list` may
take, reading 200 manifests 0.01 s.

Knows nothing of networks.  Called by `pull` and `derive` (register), `removal`, `verify`, `update` and
`prune` (which manifests there are), `app` and `engine.llm` (find).
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from store import catalog
from store.errors import BrokenFile, InvalidName, ModelNotFound, UnsupportedFormat
from store.external import ExternalModel
from store.external_folders import ExternalFolders
from store.folder_reader import FolderReader
from store.formats.part_names import part_paths
from store.hf_cache import RepoCache
from store.names import CommitId, ModelName, RepoFile, RepoId, parse_model_name
from store.paths import DataRoot
from store.presets.preset import Preset

_MANIFEST_FOLDER = "quire"
MAX_MANIFEST_BYTES = 1024 * 1024


class InstalledModel(msgspec.Struct, frozen=True):
    """A model that can be opened: `path` is a directory with config.json or a .gguf file.

    `digest` is the sha256 of a single file, or of the list of digests of several; it may be empty for
    the sources `path` and `external`.  `modified_at` is in seconds since the epoch.  `base` is the name
    that this one was made from, where it was made here.
    """

    name: str
    path: Path
    size_bytes: int
    source: str
    digest: str
    modified_at: float
    sampling_defaults: dict[str, float] = {}
    license: str | None = None
    base: str | None = None
    preset: Preset | None = None


class ManifestFile(msgspec.Struct, frozen=True):
    """One file of a snapshot and the blob that holds it."""

    path: str
    blob: str
    size_bytes: int


class Manifest(msgspec.Struct, frozen=True):
    """What `pull` writes down once all files are there and verified.

    `reference` is the hub name that the model stands for, so that an alias and its repository are
    recognised as one model; a name that was made here stands for itself alone.  `entry` is the GGUF to
    open, or None for the snapshot directory.  `path` is set instead of `repo`, `commit` and `files` where the
    model's files lie outside the hub.
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
    base: str | None = None
    preset: Preset | None = None
    path: str | None = None
    format: int = 1


def hub_reference(name: ModelName) -> str:
    """The canonical hub name of an alias or a hub name; an unknown alias is its own."""
    model = catalog.catalog_models().get(name.text) if name.kind == "alias" else None
    if model is None:
        return name.text
    revision = f"@{model.hub.revision}" if model.hub.revision else ""
    selector = model.file.name if model.file else model.quantization
    return f"{model.hub.repo}{revision}" + (f":{selector}" if selector else "")


class ModelStore:
    """The installed models of one data root; reads the disk on every call and keeps nothing.

    Without `serves_paths` only names are found, never files: for callers that speak for other machines,
    which must neither open files here nor learn which exist.  `tell` hears which registered folders do not answer.
    """

    def __init__(
        self, root: DataRoot, *, serves_paths: bool = True, tell: Callable[[str], None] = lambda _: None
    ) -> None:
        self.root = root
        self.external = ExternalFolders(root, FolderReader(tell))
        self._serves_paths = serves_paths

    def list(self) -> list[InstalledModel]:
        """All installed models whose files are still there, and those of registered folders, by name."""
        by_name = {model.name.casefold(): _external(model) for model in self.external.models()}
        for _, manifest in self.manifests():
            if model := self.installed(manifest):
                by_name[model.name.casefold()] = model
        return [by_name[name] for name in sorted(by_name)]

    def find(self, name: str) -> InstalledModel:
        """The model of that name, or the directory or GGUF file at that path.

        Raises ModelNotFound with the next step, BrokenFile for one that was made here and has lost its
        files, InvalidName, or UnsupportedFormat for a directory that is no model.
        """
        parsed = parse_model_name(name)
        if parsed.kind == "path":
            if not self._serves_paths:
                raise ModelNotFound("Models are served by name here, not by path; `quire list` shows the names.")
            return _model_at_path(parsed)
        if model := self.find_pulled(parsed):
            return model
        if external := self.external.find(parsed, hub_name(parsed)):
            return _external(external)
        for _, manifest in self.matching(parsed):
            if manifest.base is not None:
                raise BrokenFile(_lost_its_files(manifest))
        raise ModelNotFound(_not_installed(parsed, self.external.missing()))

    def find_pulled(self, name: ModelName) -> InstalledModel | None:
        """The complete installed model that `name` stands for, if there is one."""
        for _, manifest in self.matching(name):
            if model := self.installed(manifest):
                return model
        return None

    def register(self, manifest: Manifest) -> InstalledModel:
        """Write the manifest of a model whose files are in place; the caller holds the repository's lock."""
        path = self.manifest_path(manifest)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".new")
        temporary.write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))
        temporary.replace(path)
        model = self.installed(manifest)
        assert model is not None, "a model is registered only when all its files are in place"
        return model

    def manifest_path(self, manifest: Manifest) -> Path:
        """Where `manifest` is kept: beside its files, or apart for files that lie outside the hub."""
        directory = self.root.presets
        if manifest.path is None:
            directory = self.root.hub / RepoId(manifest.repo).folder / _MANIFEST_FOLDER
        # The name itself may hold characters that file systems refuse.
        return directory / f"{hashlib.sha256(manifest.name.casefold().encode()).hexdigest()[:32]}.json"

    def matching(self, name: ModelName) -> Iterator[tuple[Path, Manifest]]:
        """Manifests by display name first, then by what they stand for, whether their files are there or not."""
        manifests = list(self.manifests())
        text = name.text.casefold()
        reference = hub_reference(name).casefold()
        yield from ((path, manifest) for path, manifest in manifests if manifest.name.casefold() == text)
        yield from ((path, manifest) for path, manifest in manifests if manifest.reference.casefold() == reference)

    def manifests(self) -> Iterator[tuple[Path, Manifest]]:
        """Every readable manifest; a broken one means that its model counts as not installed."""
        apart = self.root.presets.glob("*.json")
        for path in itertools.chain(self.root.hub.glob(f"*--*/{_MANIFEST_FOLDER}/*.json"), apart):
            try:
                if path.stat().st_size > MAX_MANIFEST_BYTES:
                    continue
                yield path, msgspec.json.decode(path.read_bytes(), type=Manifest)
            except (OSError, UnicodeDecodeError, msgspec.DecodeError):
                continue

    def installed(self, manifest: Manifest) -> InstalledModel | None:
        """The model of a manifest, or None unless every file is there with its size."""
        try:
            if manifest.path is not None:
                found = _model_at_path(parse_model_name(manifest.path))
                path, size_bytes = found.path, found.size_bytes
            else:
                snapshot = RepoCache(self.root.hub, RepoId(manifest.repo)).snapshot(CommitId(manifest.commit))
                for file in manifest.files:
                    if (snapshot / RepoFile(file.path)).stat().st_size != file.size_bytes:
                        return None
                path = snapshot / RepoFile(manifest.entry) if manifest.entry else snapshot
                size_bytes = sum(file.size_bytes for file in manifest.files)
        except (OSError, InvalidName, ModelNotFound, UnsupportedFormat):
            return None
        return InstalledModel(
            name=manifest.name,
            path=path,
            size_bytes=size_bytes,
            source=manifest.source,
            digest=_digest(manifest),
            modified_at=manifest.modified_at,
            sampling_defaults=manifest.sampling_defaults,
            license=manifest.license,
            base=manifest.base,
            preset=manifest.preset,
        )


def find_manifest(store: ModelStore, name: str) -> Manifest:
    """The manifest that `name` stands for, whether its files are sound or not."""
    parsed = parse_model_name(name)
    if parsed.kind == "path":
        raise InvalidName(f"{parsed.text} is a path; name an installed model, `quire list` shows them.")
    found = next(store.matching(parsed), None)
    if found is None:
        raise ModelNotFound(f"{parsed.text} is not installed; `quire list` shows what is.")
    return found[1]


def hub_name(name: ModelName) -> ModelName:
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


def _digest(manifest: Manifest) -> str:
    """Of the model's files, and of its preset where it has one."""
    if manifest.preset is None:
        return _combined_digest(manifest.files)
    files = manifest.path or _combined_digest(manifest.files)
    return hashlib.sha256(files.encode() + msgspec.json.encode(manifest.preset)).hexdigest()


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
        files = [part for part in part_paths(path) if part.is_file()]
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


def _lost_its_files(manifest: Manifest) -> str:
    if manifest.path is not None:
        return (
            f"{manifest.name} is made of {manifest.path}, which is not there; put it back, or remove the name with "
            f"`quire rm {manifest.name}`."
        )
    return (
        f"{manifest.name} is made from {manifest.base}, of whose files some are missing or damaged; "
        f"`quire verify {manifest.name}` says how to mend it."
    )


def pullable_name(store: ModelStore, manifest: Manifest) -> str:
    """What to pull for the files of a model: its own name, or for one that was made here that of its origin."""
    if manifest.base is None:
        return manifest.name
    blobs = {file.blob for file in manifest.files}
    for _, other in store.manifests():
        is_same_commit = (other.repo, other.commit) == (manifest.repo, manifest.commit)
        if other.base is None and is_same_commit and blobs <= {file.blob for file in other.files}:
            return other.name
    entry = f":{manifest.entry}" if manifest.entry else ""
    return f"{manifest.repo}@{manifest.commit}{entry}"


def _not_installed(name: ModelName, missing: Sequence[Path]) -> str:
    if missing:
        folders = ", ".join(map(str, missing))
        return (
            f"{name.text} is not installed, and registered folders are not there ({folders}); mount their disk, take "
            f"them off with `quire disk remove`, or get the model with `quire pull {name.text}`."
        )
    if name.kind == "alias" and name.text not in catalog.catalog_models():
        return unknown_alias(name)
    return f"{name.text} is not installed; get it with `quire pull {name.text}`."


def unknown_alias(name: ModelName) -> str:
    """The sentence for an alias that the catalogue does not have."""
    similar = catalog.similar_names(name.text)
    if similar:
        return f"No model is called {name.text}; did you mean {' or '.join(similar)}?"
    return (
        f"No model is called {name.text}; `quire search {name.text.partition(':')[0]}` looks for it, and "
        "`quire pull organisation/name` gets one of the hub."
    )
