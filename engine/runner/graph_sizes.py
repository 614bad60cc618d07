"""`GraphSizeMemory`: which sizes of steps were captured, kept between starts in a small JSON file.

So that the next start captures graphs for these before they are asked for.  Losing the file costs
a few captures, so nothing here ever fails.  Used by whoever captures graphs.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterable
from pathlib import Path

log = logging.getLogger(__name__)

MAX_MODELS = 64
MAX_SIZES = 48
_FILE_NAME = "decode-batch-sizes.json"


class GraphSizeMemory:
    """Batch sizes by model in one file of `directory`; None remembers nothing.

    Two processes may share the file; of two writes at once the later one wins whole.
    """

    def __init__(self, directory: Path | None) -> None:
        self._path = directory / _FILE_NAME if directory is not None else None
        self._has_warned = False

    @staticmethod
    def key(model: str, dtype: str, device_name: str) -> str:
        """What a captured graph belongs to."""
        return " ".join((model, dtype, device_name))

    def load(self, key: str) -> tuple[int, ...]:
        """The sizes remembered for `key`, the latest captured first; empty when there are none."""
        return tuple(self._read().get(key, ()))

    def remember(self, key: str, sizes: Iterable[int]) -> None:
        """Put `sizes` before those remembered for `key`; the oldest are dropped beyond `MAX_SIZES`."""
        known = self._read()
        before = known.pop(key, [])
        merged = list(dict.fromkeys([*sizes, *before]))[:MAX_SIZES]
        if self._path is None or not merged or merged == before:
            return
        # The latest models are last, so the first ones are dropped.
        kept = dict([*known.items(), (key, merged)][-MAX_MODELS:])
        self._write(self._path, json.dumps(kept, indent=1))

    def _read(self) -> dict[str, list[int]]:
        try:
            values = json.loads(self._path.read_bytes()) if self._path is not None else {}
        except (OSError, ValueError, RecursionError):
            return {}
        if not isinstance(values, dict):
            return {}
        return {key: sizes for key, sizes in values.items() if _are_sizes(sizes)}

    def _write(self, path: Path, text: str) -> None:
        unfinished = path.with_name(f"{path.name}.{os.getpid()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished.write_text(text)
            unfinished.replace(path)
        except OSError as error:
            if not self._has_warned:
                log.warning("The batch sizes for the next start cannot be kept in %s (%s).", path, error.strerror)
            self._has_warned = True
            with contextlib.suppress(OSError):
                unfinished.unlink(missing_ok=True)


def _are_sizes(values: object) -> bool:
    return isinstance(values, list) and all(type(size) is int and size > 0 for size in values)
