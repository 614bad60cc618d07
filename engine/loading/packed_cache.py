"""`PackedCache`: quantised packed models kept as safetensors files, so that the next start maps instead of packing.

One file for each checkpoint, named after the checkpoint's path and state; what is mapped is shared by all
processes that serve the model.  Losing an entry costs the packing, so nothing here ever fails.  Used by the
loader.  Packing does not depend on settings, so neither do the names.

Models of floats are not kept: packing them only moves numbers, at 2.4 GB/s with one thread (a checkpoint of 1 GB
in the page cache loads in 0.4 to 0.8 seconds), and the file would be as large as the checkpoint.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import secrets
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from threading import Thread

import torch

from engine.loading.mapped_file import MappedFile
from engine.loading.packed_state import find_segments, is_segment, named_tensors, restore
from engine.models.loadable import LoadableModel
from store.errors import BrokenFile
from store.formats.safetensors import read_safetensors_header
from store.upkeep.prune_caches import PACKED_SOURCES_KEY

log = logging.getLogger(__name__)

# To be raised with every change of the packed layout, of quantisation, or of this file's names.
FORMAT_VERSION = 3
# Packed records begin at cache lines, as in memory of their own.
_ALIGNMENT = 64
_SUFFIX = ".safetensors"
_UNFINISHED = ".unfinished"
# A writer at work writes all the time, and one that is wrongly taken for dead only has to warn.
_ABANDONED_AFTER_S = 120.0
_SPARE_DISK_BYTES = 256 * 2**20
_WRITE_BYTES = 8 * 2**20
_DTYPE_NAMES = {torch.uint8: "U8", torch.float32: "F32"}


class PackedCache:
    """The entry of one checkpoint, whose files are `sources`, under `folder`; None keeps nothing."""

    def __init__(self, folder: Path | None, sources: Sequence[Path]) -> None:
        self._path: Path | None = None
        self._sources: list[str] = []
        if folder is not None and sources:
            with contextlib.suppress(OSError):
                self._sources = _relative_paths(folder, sources)
                self._path = folder / _entry_name(self._sources, sources)

    def load(self, model: LoadableModel) -> bool:
        """Fill a packed model from the entry; False, and the model untouched, if there is no sound one.

        Packed matrices stay memory-mapped; they must never be written to.
        """
        if self._path is None or not self._path.exists():
            return False
        try:
            header = read_safetensors_header(self._path)
            sound = [
                tensor for tensor in header.values() if tensor.dtype == ("U8" if is_segment(tensor.name) else "F32")
            ]
            segments = find_segments(model, {tensor.name: tensor.shape for tensor in sound})
            file = MappedFile(self._path)
        except (BrokenFile, OSError) as error:
            log.warning("The packed model in %s is packed anew: %s", self._path, error)
            return False
        if segments is None:
            log.warning("The packed model in %s is another one's and is packed anew.", self._path)
            return False

        def tensor(name: str) -> torch.Tensor:
            stored = header[name]
            dtype = torch.uint8 if stored.dtype == "U8" else torch.float32
            return file.view(stored.offset, stored.num_bytes, dtype).view(stored.shape)

        restore(model, segments, tensor)
        model.weight_maps.append(file)
        return True

    def store_in_background(self, model: LoadableModel) -> None:
        """`store` on a thread of its own; `model` must not change any more.

        A process that ends meanwhile waits for it: else programs that end soon would pack at every start.
        """
        if self._path is not None:
            Thread(target=self.store, args=(model,), name="packed-cache-writer").start()

    def store(self, model: LoadableModel) -> None:
        """Write the entry of a loaded packed model, once those of the checkpoint's other states are removed.

        The entry appears whole or not at all; of two writers at once the later one wins.
        """
        if self._path is None:
            return
        unfinished = self._path.with_name(f"{self._path.name}.{secrets.token_hex(4)}{_UNFINISHED}")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            _remove_old(self._path)
            _require_space(self._path.parent, model.weight_bytes)
            _write(unfinished, named_tensors(model), self._sources)
            unfinished.replace(self._path)
        except OSError as error:
            log.warning(
                "The packed model cannot be kept in %s (%s); every start packs it anew.", self._path, error.strerror
            )
            with contextlib.suppress(OSError):
                unfinished.unlink(missing_ok=True)


def _relative_paths(folder: Path, sources: Sequence[Path]) -> list[str]:
    """From `folder`, so that entries stay good when the data root that holds both is moved."""
    return [os.path.relpath(path.resolve(), folder.resolve()) for path in sources]


def _entry_name(paths: list[str], sources: Sequence[Path]) -> str:
    """What the entry is of, then in which state: paths; sizes, times of change, and our format."""
    stats = [path.stat() for path in sources]
    state = [FORMAT_VERSION, *((stat.st_size, stat.st_mtime_ns) for stat in stats)]
    return f"{_digest(paths)}-{_digest(state)}{_SUFFIX}"


def _digest(values: Sequence[object]) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:20]


def _require_space(folder: Path, num_bytes: int) -> None:
    """Raises `OSError` where the file would leave the disk all but full."""
    if shutil.disk_usage(folder).free < num_bytes + _SPARE_DISK_BYTES:
        raise OSError(0, "the disk is nearly full")


def _write(path: Path, tensors: dict[str, torch.Tensor], sources: list[str]) -> None:
    """A safetensors file whose data begins at a multiple of `_ALIGNMENT`, on the disk when this returns.

    It names its sources, so that `quire prune` knows an entry whose model is gone.
    """
    entries: dict[str, object] = {"__metadata__": {PACKED_SOURCES_KEY: json.dumps(sources)}}
    end = 0
    for name, tensor in tensors.items():
        offsets = [end, end + tensor.nbytes]
        entries[name] = {"dtype": _DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        end += tensor.nbytes
    header = json.dumps(entries).encode()
    header += b" " * (-(8 + len(header)) % _ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for tensor in tensors.values():
            content = tensor.contiguous().view(-1).view(torch.uint8).numpy().data
            for start in range(0, len(content), _WRITE_BYTES):
                file.write(content[start : start + _WRITE_BYTES])
        file.flush()
        os.fsync(file.fileno())


def _remove_old(entry: Path) -> None:
    """Remove other states of the entry's checkpoint, and what writers that were killed have left behind."""
    checkpoint = entry.name.partition("-")[0]
    for path in entry.parent.glob(f"{checkpoint}-*"):
        # A file in use cannot be removed everywhere; the next time will do.
        with contextlib.suppress(OSError):
            if path.name.endswith(_UNFINISHED):
                is_old = time.time() - path.stat().st_mtime > _ABANDONED_AFTER_S
            else:
                is_old = path != entry
            if is_old:
                path.unlink(missing_ok=True)
