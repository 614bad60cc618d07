"""One daemon per state directory: the lock it holds for life, and the file that says where it is.

The lock decides, never the process id in daemon.json: an id may be stale, a lock dies with
its holder.  Used by `app.server`; `app.daemon` reads the file.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from app.errors import StartupError
from app.version import VERSION

LOCK_NAME = "daemon.lock"
RECORD_NAME = "daemon.json"


class DaemonRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of daemon.json; `started_at` is in seconds since the epoch."""

    pid: int
    host: str
    port: int
    version: str
    started_at: float


def read_record(state_dir: Path) -> DaemonRecord | None:
    """The record of the daemon that runs or ran last; None if there is none that can be read."""
    try:
        return msgspec.json.decode((state_dir / RECORD_NAME).read_bytes(), type=DaemonRecord)
    except (OSError, msgspec.DecodeError):
        return None


@contextmanager
def single_instance(state_dir: Path) -> Iterator[None]:
    """Hold the lock; raises `StartupError` if another daemon does.  Removes daemon.json at the end."""
    with (state_dir / LOCK_NAME).open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            other = read_record(state_dir)
            where = f" (process {other.pid}, http://{other.host}:{other.port})" if other else ""
            raise StartupError(
                f"A daemon is already running{where}; use that one, or stop it with `quire shutdown`."
            ) from None
        try:
            yield
        finally:
            (state_dir / RECORD_NAME).unlink(missing_ok=True)


def write_record(state_dir: Path, host: str, port: int) -> None:
    """Publish the address, readable by this user only; replaces the file in one step."""
    record = DaemonRecord(pid=os.getpid(), host=host, port=port, version=VERSION, started_at=time.time())
    temporary = state_dir / f"{RECORD_NAME}.new"
    temporary.touch(mode=0o600)
    temporary.write_bytes(msgspec.json.encode(record))
    temporary.replace(state_dir / RECORD_NAME)
