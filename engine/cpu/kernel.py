"""`Kernel`: one compiled function of a program, and where compiled code is kept between starts.

Every kernel has the C signature `void (arguments, step, rank, team_size)`, all int64: `arguments` is the
address of the instruction's own int64 numbers (`engine.cpu.program`), `step` of the step's
(`engine.cpu.step`).  All threads of the team call it; together they do the work once.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import numba
from numba import cfunc, types

from engine.cpu.memory import fetch_add

Body = Callable[[int, int, int, int], None]
_SIGNATURE = types.void(types.int64, types.int64, types.int64, types.int64)


class Kernel:
    """Compiled when its address is first asked for, or read from the cache."""

    def __init__(self, body: Body) -> None:
        self.name = body.__name__
        self._body = body

    @functools.cached_property
    def _compiled(self):
        return cfunc(_SIGNATURE, cache=bool(numba.config.CACHE_DIR))(self._body)

    @property
    def address(self) -> int:
        return int(self._compiled.address)


def use_code_cache(folder: Path, environ: Mapping[str, str] = os.environ) -> None:
    """Keep compiled kernels in `folder` from now on, apart for every state of this package's sources.

    numba notices a change of the file that holds a kernel, but not of the files that it uses.  Its own variable,
    NUMBA_CACHE_DIR, goes before `folder`.
    """
    sources = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        sources.update(path.read_bytes())
    root = Path(environ.get("NUMBA_CACHE_DIR") or folder)
    numba.config.CACHE_DIR = str(root / sources.hexdigest()[:16])


@numba.njit
def claim(arguments):
    """The number of the next piece of the instruction's work: 0, 1, ... over all threads."""
    return fetch_add(arguments, 1)
