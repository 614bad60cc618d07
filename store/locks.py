"""One lock per repository, so that pulls and removals of it never overlap.

`flock` excludes other processes and, because every holder opens the file anew, other threads of
this one; the kernel drops it when a process dies.  On file systems where flock silently does
nothing two pulls may write the same partial: the digest check then catches it.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from store.errors import ModelBusy
from store.names import RepoId
from store.paths import DataRoot
from store.progress import Reporter

_POLL_INTERVAL_S = 0.1


@contextmanager
def repo_lock(root: DataRoot, repo: RepoId, reporter: Reporter, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold the repository's lock; waits for another holder after calling `on_wait` once.  Raises Cancelled."""
    descriptor = _open_lock_file(root, repo)
    try:
        if not try_lock(descriptor):
            on_wait()
            while not try_lock(descriptor):
                reporter.wait(_POLL_INTERVAL_S)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def repo_lock_now(root: DataRoot, repo: RepoId) -> Iterator[None]:
    """Hold the repository's lock or raise ModelBusy at once."""
    descriptor = _open_lock_file(root, repo)
    try:
        if not try_lock(descriptor):
            raise ModelBusy(
                f"{repo} is being downloaded or changed now; wait, or stop it (`quire pull --cancel`), and try again."
            )
        yield
    finally:
        os.close(descriptor)


def _open_lock_file(root: DataRoot, repo: RepoId) -> int:
    # Lock files stay: removing one while another process waits on it would let two holders in.
    directory = root.downloads / "locks"
    directory.mkdir(exist_ok=True)
    return os.open(directory / f"{repo.folder.casefold()}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)


def try_lock(descriptor: int) -> bool:
    """Take an open file's lock alone, if nobody holds it; the kernel drops it with the descriptor."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
