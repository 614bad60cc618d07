"""Install a model from a bundle that somebody brought: nothing in it is trusted.

The header becomes validated types before a path is made of it; members must be plain files, announced
by the header, as long as announced, and must hash to their names.  A tar is read header by header, so
that no extension of the format can ask for memory, links or places.  All bytes arrive in a folder of
their own first: what fails leaves no part of a model.  Called by `quire import`.
"""

from __future__ import annotations

import os
import re
import shutil
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec

from store.bundles.bundle import BLOB_FOLDER, BUNDLE_HEADER, FORMAT, Bundle, copy_checked
from store.errors import BrokenFile, InvalidModelfile, InvalidName, NameTaken
from store.hf_cache import RepoCache
from store.locks import repo_lock_now
from store.models import MAX_MANIFEST_BYTES, InstalledModel, Manifest, ManifestFile, ModelStore
from store.names import CommitId, Digest, RepoFile, RepoId, Revision, parse_model_name
from store.presets.modelfile import Modelfile, format_modelfile
from store.presets.preset import Parameters
from store.progress import Reporter
from store.space import require_free_space, storage_error
from store.upkeep.removal import release_files

IMPORT_FOLDER_PREFIX = "import-"
_SOURCE = re.compile(r"[a-z]{1,20}")
_PARAMETERS = Parameters.__struct_fields__


def read_bundle(file: Path) -> Manifest:
    """The model that a bundle holds, by its header alone.  Raises BrokenFile or OSError."""
    with file.open("rb") as source:
        return _read_header(source, file)


def import_model(store: ModelStore, file: Path, reporter: Reporter, *, force: bool = False) -> InstalledModel:
    """Install the model of a bundle; one that is here already, of the same files, is returned as it is.

    With `force` it takes the place of another model of its name.  Raises BrokenFile, NameTaken, ModelBusy,
    NotEnoughSpace, DataRootUnusable, or OSError when `file` cannot be read.
    """
    with file.open("rb") as source:
        manifest = _read_header(source, file)
        if done := _already_there(store, manifest, force=force):
            return done
        repo = RepoId(manifest.repo)
        with repo_lock_now(store.root, repo), _staging(store.root.downloads, repo) as folder:
            cache = RepoCache(store.root.hub, repo)
            missing = {member.blob: member for member in manifest.files if not _is_here(cache, member)}
            needed_bytes = sum(member.size_bytes for member in missing.values())
            require_free_space(needed_bytes, store.root.downloads, manifest.name)
            reporter.expect({member.path: member.size_bytes for member in missing.values()})
            _Extraction(source, file, folder, reporter).run(manifest, missing)
            try:
                return _install(store, cache, manifest, folder)
            except OSError as error:
                raise storage_error(error, store.root.root) from error


def _already_there(store: ModelStore, manifest: Manifest, *, force: bool) -> InstalledModel | None:
    for _, other in store.matching(parse_model_name(manifest.name)):
        if not _has_name_of(other, manifest):
            continue
        is_same = (other.repo, other.commit, other.files, other.preset) == (
            manifest.repo,
            manifest.commit,
            manifest.files,
            manifest.preset,
        )
        if is_same and (model := store.installed(other)):
            return model
        if not force and not is_same:
            raise NameTaken(f"There is another {other.name} here already; give --force to replace it.")
    return None


def _is_here(cache: RepoCache, file: ManifestFile) -> bool:
    blob = cache.blob(Digest(file.blob))
    return blob.is_file() and blob.stat().st_size == file.size_bytes


@contextmanager
def _staging(downloads: Path, repo: RepoId) -> Iterator[Path]:
    """An empty folder for one import; whoever holds the repository's lock owns what an earlier one has left there."""
    folder = downloads / f"{IMPORT_FOLDER_PREFIX}{repo.folder}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _install(store: ModelStore, cache: RepoCache, manifest: Manifest, folder: Path) -> InstalledModel:
    """Move the files in and register the model, or leave the cache as it was."""
    commit = CommitId(manifest.commit)
    added: list[RepoFile] = []
    try:
        for file in manifest.files:
            path, arrived = RepoFile(file.path), folder / file.blob
            was_there = (cache.snapshot(commit) / path).exists()
            if arrived.exists():
                cache.add(arrived, commit, path, Digest(file.blob))
            elif not cache.holds(commit, path, Digest(file.blob), file.size_bytes):
                raise BrokenFile(f"{path} of {manifest.name} disappeared while it was imported; try again.")
            if not was_there:
                added.append(path)
        replaced = [
            found for found in store.matching(parse_model_name(manifest.name)) if _has_name_of(found[1], manifest)
        ]
        model = store.register(manifest)
    except BaseException:
        cache.remove_files(commit, added)
        raise
    _write_ref(cache, manifest)
    for manifest_path, other in replaced:
        _retire(store, manifest_path, other, manifest)
    return model


def _has_name_of(manifest: Manifest, other: Manifest) -> bool:
    return manifest.name.casefold() == other.name.casefold()


def _write_ref(cache: RepoCache, manifest: Manifest) -> None:
    """Let other tools find the snapshot by the branch it was pulled from, unless that leads somewhere already."""
    name = parse_model_name(manifest.reference)
    revision = str(name.revision or "main")
    if name.repo is not None and revision != manifest.commit and not cache.ref(Revision(revision)).exists():
        cache.write_ref(Revision(revision), CommitId(manifest.commit))


def _retire(store: ModelStore, path: Path, replaced: Manifest, by: Manifest) -> None:
    """Remove a replaced manifest, and the files that only it needed."""
    if path != store.manifest_path(by):
        path.unlink(missing_ok=True)
    if replaced.path is not None:
        return
    with repo_lock_now(store.root, RepoId(replaced.repo)) if replaced.repo != by.repo else nullcontext():
        release_files(store, replaced)


@dataclass(slots=True)
class _Extraction:
    """Writes the announced blobs of one bundle into `folder`, each checked on the way."""

    source: BinaryIO
    file: Path
    folder: Path
    reporter: Reporter

    def run(self, manifest: Manifest, missing: dict[str, ManifestFile]) -> None:
        announced = {member.blob: member for member in manifest.files}
        while announced:
            member = _next_member(self.source, self.file)
            digest = member.name.removeprefix(BLOB_FOLDER)
            expected = announced.pop(digest, None) if member.name.startswith(BLOB_FOLDER) else None
            if expected is None or member.size != expected.size_bytes:
                raise _broken(self.file, f"holds {ascii(member.name)[:80]}, which it does not announce in that size")
            if digest in missing:
                self._extract(expected)
            else:
                self.source.seek(expected.size_bytes, os.SEEK_CUR)
            self.source.seek(-member.size % tarfile.BLOCKSIZE, os.SEEK_CUR)

    def _extract(self, member: ManifestFile) -> None:
        try:
            with (self.folder / Digest(member.blob)).open("xb") as output:
                is_sound = copy_checked(self.source, output, member, self._report(member))
        except OSError as error:
            raise storage_error(error, self.folder.parent) from error
        if not is_sound:
            raise _broken(self.file, f"has other bytes of {member.path} than it announces")

    def _report(self, member: ManifestFile) -> Callable[[int], None]:
        def report(done_bytes: int) -> None:
            self.reporter.raise_if_cancelled()
            self.reporter.count("importing", member.path, done_bytes, member.size_bytes)

        return report


def _read_header(source: BinaryIO, file: Path) -> Manifest:
    member = _next_member(source, file)
    if member.name != BUNDLE_HEADER:
        raise _broken(file, f"does not begin with {BUNDLE_HEADER}")
    if member.size > MAX_MANIFEST_BYTES:
        raise _broken(file, "has a header of more than 1 MiB")
    content = source.read(member.size)
    source.seek(-member.size % tarfile.BLOCKSIZE, os.SEEK_CUR)
    try:
        bundle = msgspec.json.decode(content, type=Bundle)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _broken(file, f"has a header that cannot be read ({error})") from error
    if bundle.format != FORMAT:
        raise BrokenFile(f"{file} is a bundle of format {bundle.format}; import it with a newer version of Quire.")
    try:
        _check(bundle.manifest)
    except (InvalidName, InvalidModelfile, ValueError) as error:
        raise _broken(file, f"describes no model ({error})") from error
    return bundle.manifest


def _check(manifest: Manifest) -> None:
    """Refuse whatever no `quire export` writes.  Raises InvalidName, InvalidModelfile or ValueError."""
    name = parse_model_name(manifest.name)
    if name.kind == "path" or name.text != manifest.name or manifest.path is not None:
        raise ValueError("its name is not one of a model")
    parse_model_name(manifest.reference)
    if not _SOURCE.fullmatch(manifest.source) or not manifest.sampling_defaults.keys() <= set(_PARAMETERS):
        raise ValueError("its source or sampling defaults are not known")
    RepoId(manifest.repo)
    CommitId(manifest.commit)
    paths = [RepoFile(file.path) for file in manifest.files]
    folded = {path.casefold() for path in paths}
    folders = {parent.as_posix().casefold() for path in paths for parent in Path(path).parents}
    if not paths or len(folded) < len(paths) or folded & folders:
        raise ValueError("its files are none, or in each other's way")
    if manifest.entry is not None and manifest.entry not in paths:
        raise ValueError("the file to open is not among its files")
    sizes: dict[str, int] = {}
    for file in manifest.files:
        if file.size_bytes < 0 or sizes.setdefault(Digest(file.blob), file.size_bytes) != file.size_bytes:
            raise ValueError("its sizes contradict each other")
    if manifest.preset is not None:
        format_modelfile(Modelfile(manifest.base or manifest.name, manifest.preset))


def _next_member(source: BinaryIO, file: Path) -> tarfile.TarInfo:
    """The next header of a tar, which must be that of a plain file.

    Not `tarfile.open`, which follows extensions of the format wherever they lead.
    """
    block = source.read(tarfile.BLOCKSIZE)
    try:
        member = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except tarfile.HeaderError as error:
        raise _broken(file, f"is no bundle or ends too early ({error})") from error
    if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or member.size < 0:
        raise _broken(file, f"holds {ascii(member.name)[:80]}, which is not a plain file")
    return member


def _broken(file: Path, what: str) -> BrokenFile:
    return BrokenFile(f"{file} {what}; write it again with `quire export` or copy it again.")
