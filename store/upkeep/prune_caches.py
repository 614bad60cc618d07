"""Compiled kernels and packed weights that no start will use again.  Losing one costs time, never a model.

Kernels are kept in a folder for each device, version and processor, which nothing tells when it was
needed last but the times of its files.  A file of packed weights names the files that it was made of.
Called by `prune`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

PACKED_SOURCES_KEY = "sources"
"""In the metadata of a safetensors file of packed weights: JSON, the paths it was made of, from its own folder."""

_PACKED_FOLDER = "packed"
_CPU_FOLDER = "cpu"
_MAX_HEADER_BYTES = 100_000_000
_ABANDONED_AFTER_S = 86400.0
_BYTES_PER_BLOCK = 512


@dataclass(frozen=True, slots=True)
class Waste:
    """What there is to delete: a word for its kind, whose it is, why it may go, and what that frees."""

    kind: str
    name: str
    reason: str
    size_bytes: int
    paths: tuple[Path, ...]


class _Header(msgspec.Struct):
    """The one entry of a safetensors header that is of interest here."""

    metadata: dict[str, str] = msgspec.field(default_factory=dict, name="__metadata__")


def stale_packed_weights(kernels: Path) -> Iterator[Waste]:
    """Packed weights whose model is gone, of an older version, or never finished."""
    for folder in sorted(kernels.glob(f"*/{_PACKED_FOLDER}")):
        for path in sorted(path for path in folder.iterdir() if path.is_file()):
            if reason := _reason_stale(path):
                yield Waste("packed weights", path.name, reason, allocated_bytes([path]), (path,))


def _reason_stale(path: Path) -> str | None:
    if path.suffix != ".safetensors":
        return "never finished" if is_old(path, _ABANDONED_AFTER_S) else None
    sources = packed_sources(path)
    if sources is None:
        return "of an older version"
    return None if all(source.exists() for source in sources) else "their model is gone"


def packed_sources(path: Path) -> list[Path] | None:
    """The files that packed weights were made of; None where the file does not say."""
    try:
        with path.open("rb") as file:
            size_bytes = int.from_bytes(file.read(8), "little")
            if size_bytes > _MAX_HEADER_BYTES:
                return None
            header = msgspec.json.decode(file.read(size_bytes), type=_Header)
        relative = msgspec.json.decode(header.metadata[PACKED_SOURCES_KEY], type=list[str])
    except (OSError, KeyError, UnicodeDecodeError, msgspec.DecodeError):
        return None
    return [Path(os.path.normpath(path.parent / source)) for source in relative]


def stale_kernels(kernels: Path, old_after_s: float) -> Iterator[Waste]:
    """Folders of kernels of which no file was read or written for that long."""
    devices = sorted(path for path in kernels.glob("*") if path.is_dir())
    for folder in (path for device in devices for path in _kernel_folders(device)):
        files = [path for path in folder.rglob("*") if path.is_file()]
        if files and all(is_old(path, old_after_s, unless_read=True) for path in files):
            reason = f"not used for {old_after_s / 86400:g} days"
            name = folder.relative_to(kernels).as_posix()
            yield Waste("kernels", name, reason, allocated_bytes([folder]), (folder,))


def _kernel_folders(device: Path) -> list[Path]:
    if device.name != _CPU_FOLDER:
        return [device]
    return sorted(path for path in device.iterdir() if path.is_dir() and path.name != _PACKED_FOLDER)


def is_old(path: Path, old_after_s: float, *, unless_read: bool = False) -> bool:
    """Whether the file, link or folder was not written for that long, nor read where that counts.

    For links and folders reading must not count: looking for waste reads them.
    """
    try:
        facts = path.lstat()
    except OSError:
        return False
    last = max(facts.st_mtime, facts.st_atime) if unless_read else facts.st_mtime
    return time.time() - last >= old_after_s


def allocated_bytes(paths: Iterable[Path]) -> int:
    """What files, and all below folders, take on the disk: unfinished downloads have holes."""
    num_blocks = 0
    for path in paths:
        for place in [path, *path.rglob("*")] if path.is_dir() and not path.is_symlink() else [path]:
            try:
                num_blocks += place.lstat().st_blocks
            except OSError:
                continue
    return num_blocks * _BYTES_PER_BLOCK
