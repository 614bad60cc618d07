"""Bundles: one model as one file, for machines without a network.

A bundle is an uncompressed tar that any tar program can list: `quire-bundle.json`, which says what the
model is and what follows, then each blob once as `blobs/<digest>`.  This module knows the format and
writes it; `bundle_import` reads it.  Called by `quire export`.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import msgspec

from store.digests import is_digest, new_hash
from store.errors import BrokenFile, NotEnoughSpace, UnsupportedFormat
from store.hf_cache import RepoCache
from store.locks import repo_lock_now
from store.models import Manifest, ManifestFile, ModelStore, find_manifest
from store.names import CommitId, Digest, RepoFile, RepoId
from store.progress import Reporter
from store.space import format_bytes

BUNDLE_HEADER = "quire-bundle.json"
BLOB_FOLDER = "blobs/"
COPY_BYTES = 4 * 1024 * 1024
FORMAT = 1


class Bundle(msgspec.Struct, frozen=True):
    """What the header says: the model, whose `files` name the blobs that follow with their sizes."""

    manifest: Manifest
    format: int = FORMAT


def export_model(store: ModelStore, name: str, file: Path, reporter: Reporter) -> int:
    """Write an installed model into `file`, which appears whole or not at all; its size in bytes.

    Every digest is checked on the way.  Raises ModelNotFound, UnsupportedFormat for a model whose files lie
    elsewhere, BrokenFile, ModelBusy, NotEnoughSpace, or OSError from the place where `file` goes.
    """
    manifest = find_manifest(store, name)
    if manifest.path is not None:
        raise UnsupportedFormat(f"The files of {manifest.name} are at {manifest.path}; copy them from there.")
    partial = file.with_name(file.name + ".partial")
    with repo_lock_now(store.root, RepoId(manifest.repo)):
        blobs, manifest = _blobs(store, manifest)
        needed_bytes = sum(member.size_bytes for member in blobs.values())
        free_bytes = shutil.disk_usage(file.absolute().parent).free
        if needed_bytes > free_bytes:
            raise NotEnoughSpace(
                f"{file} needs {format_bytes(needed_bytes)} but its disk has {format_bytes(free_bytes)} free; "
                "name a file on a larger one.",
                needed_bytes=needed_bytes,
                free_bytes=free_bytes,
            )
        try:
            with partial.open("wb") as output:
                _write(output, manifest, blobs, reporter)
                output.flush()
                os.fsync(output.fileno())
            partial.replace(file)
        finally:
            partial.unlink(missing_ok=True)
    return file.stat().st_size


def _blobs(store: ModelStore, manifest: Manifest) -> tuple[dict[Path, ManifestFile], Manifest]:
    """Where the bytes are, each once, and the manifest with a digest for every file."""
    snapshot = RepoCache(store.root.hub, RepoId(manifest.repo)).snapshot(CommitId(manifest.commit))
    blobs: dict[str, tuple[Path, ManifestFile]] = {}
    files = []
    for file in manifest.files:
        path = snapshot / RepoFile(file.path)
        if not path.is_file() or path.stat().st_size != file.size_bytes:
            raise BrokenFile(f"{manifest.name} is damaged; mend it with `quire pull {manifest.name}` and try again.")
        named = file if is_digest(file.blob) else msgspec.structs.replace(file, blob=_sha256(path))
        files.append(named)
        blobs[named.blob] = (path, named)
    return dict(blobs.values()), msgspec.structs.replace(manifest, files=tuple(files))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write(output: BinaryIO, manifest: Manifest, blobs: dict[Path, ManifestFile], reporter: Reporter) -> None:
    header = msgspec.json.format(msgspec.json.encode(Bundle(manifest))) + b"\n"
    _write_member_start(output, BUNDLE_HEADER, len(header), manifest.modified_at)
    output.write(header)
    _pad(output, len(header))
    reporter.expect({file.path: file.size_bytes for file in blobs.values()})
    for path, file in blobs.items():
        _write_member_start(output, BLOB_FOLDER + file.blob, file.size_bytes, manifest.modified_at)

        def report(done_bytes: int, file: ManifestFile = file) -> None:
            reporter.raise_if_cancelled()
            reporter.count("writing", file.path, done_bytes, file.size_bytes)

        with path.open("rb") as source:
            is_sound = copy_checked(source, output, file, report)
        if not is_sound:
            raise BrokenFile(f"{file.path} of {manifest.name} is damaged; run `quire verify {manifest.name}`.")
        _pad(output, file.size_bytes)
    output.write(tarfile.NUL * 2 * tarfile.BLOCKSIZE)


def copy_checked(source: BinaryIO, output: BinaryIO, file: ManifestFile, report: Callable[[int], None]) -> bool:
    """Copy exactly `file.size_bytes`; whether that many were there and hash to the digest."""
    state = new_hash(Digest(file.blob), file.size_bytes)
    done_bytes = 0
    report(0)
    while chunk := source.read(min(COPY_BYTES, file.size_bytes - done_bytes)):
        state.update(chunk)
        output.write(chunk)
        done_bytes += len(chunk)
        report(done_bytes)
    return done_bytes == file.size_bytes and state.hexdigest() == file.blob


def _write_member_start(output: BinaryIO, name: str, size_bytes: int, modified_at: float) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mtime, member.mode = size_bytes, int(modified_at), 0o644
    # GNU's format has sizes above 8 GiB without a further header.
    output.write(member.tobuf(tarfile.GNU_FORMAT))


def _pad(output: BinaryIO, size_bytes: int) -> None:
    output.write(tarfile.NUL * (-size_bytes % tarfile.BLOCKSIZE))
