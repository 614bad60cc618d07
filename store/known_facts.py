"""`KnownFacts`: facts of models, read once and kept for as long as the files stay as they are.

A GGUF header with its vocabulary takes 10 ms to walk and more, which a listing of 200 models must not pay on
every call.  Knows nothing of names or of what facts mean.  The daemon owns one and shares it between
its routes and the planning of memory.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

from store.facts import ModelFacts, read_model_facts
from store.formats.part_names import part_paths

MAX_MODELS = 1024
"""Facts take a kilobyte or so each."""

_Fingerprint = tuple[tuple[str, int, int], ...]
"""Name, size in bytes and time of the last change in nanoseconds, of each file that facts may come from."""


class KnownFacts:
    """Facts by path; what was asked for last is kept longest.  Threads may share one."""

    def __init__(self, read: Callable[[Path], ModelFacts] = read_model_facts, *, max_models: int = MAX_MODELS) -> None:
        self._read = read
        self._max_models = max_models
        self._kept: OrderedDict[Path, tuple[_Fingerprint, ModelFacts]] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, path: Path) -> ModelFacts:
        """What `read_model_facts` says of the files as they are now.  Raises as it does; failures are not kept."""
        try:
            fingerprint = _fingerprint(path)
        except OSError:
            return self._read(path)
        with self._lock:
            kept = self._kept.get(path)
            if kept is not None and kept[0] == fingerprint:
                self._kept.move_to_end(path)
                return kept[1]
        # Outside the lock: reading takes its time, and two threads that read the same lose nothing else.
        facts = self._read(path)
        with self._lock:
            self._kept[path] = (fingerprint, facts)
            self._kept.move_to_end(path)
            while len(self._kept) > self._max_models:
                self._kept.popitem(last=False)
        return facts


def _fingerprint(path: Path) -> _Fingerprint:
    """Raises OSError for a file that is not there."""
    files = sorted(path.iterdir()) if path.is_dir() else part_paths(path)
    facts = ((file.name, file.stat()) for file in files)
    return tuple((name, fact.st_size, fact.st_mtime_ns) for name, fact in facts)
