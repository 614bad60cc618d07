"""Opens `quire.db`, the user's small database of chats and usage, and gives it a thread of its own.

A file that is no database any more is moved aside and a new one begun: chats are lost then, but models
still answer.  Before the schema of an existing file changes, a copy is kept beside it.  Knows nothing of
what the tables mean: `store.chats.tree` and `store.usage_db` do.  Called by `app.server` (`DatabaseThread`)
and by commands that run without a daemon (`open_database`).
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from store.errors import DatabaseUnusable
from store.migrations import applied_steps, is_up_to_date, migrate, unknown_steps

logger = logging.getLogger(__name__)

BUSY_TIMEOUT_S = 5.0
_CORRUPT_CODES = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_FULL_CODES = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)

T = TypeVar("T")


def open_database(path: Path, *, is_checked: bool = False) -> sqlite3.Connection:
    """The database at `path` with the present schema, created where there is none; for one thread only.

    A broken file is moved aside, with a warning in the log; `is_checked` reads the whole file to find
    damage, 0.04 s for 28 MB.  Raises DatabaseUnusable.
    """
    with _sqlite_errors(path), _opening(path):
        try:
            connection = _connect(path)
            if is_checked:
                _check(connection)
        except sqlite3.DatabaseError as error:
            if not _is_corrupt(error):
                raise
            aside = _move_aside(path)
            logger.warning(
                "The database %s is damaged (%s); it was moved to %s and a new one begun.", path, error, aside
            )
            connection = _connect(path)
        if unknown := unknown_steps(connection):
            connection.close()
            raise DatabaseUnusable(
                f"The database {path} was written by a later version of Quire ({', '.join(sorted(unknown))}); "
                "update Quire, or move the file away."
            )
        if not is_up_to_date(connection):
            if applied_steps(connection):
                _back_up(connection, path)
            migrate(connection)
        return connection


@contextmanager
def writing(connection: sqlite3.Connection) -> Iterator[None]:
    """One transaction that may write; it waits for other writers at its start, and never fails midway for them."""
    connection.execute("BEGIN IMMEDIATE")
    with connection:
        yield


class DatabaseThread:
    """One thread through which everything in this process reaches the database, in order.

    The file is opened by the first piece of work, and again after a failure to open.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="database")
        self._connection: sqlite3.Connection | None = None

    async def run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """The result of `work`, given the connection.  Raises DatabaseUnusable, and what `work` raises."""
        return await asyncio.wrap_future(self.submit(work))

    def submit(self, work: Callable[[sqlite3.Connection], T]) -> Future[T]:
        """Begin what `run` waits for."""
        return self._executor.submit(self._run, work)

    def close(self) -> None:
        """Finish what was submitted, then close the file."""
        self._executor.submit(self._close)
        self._executor.shutdown(wait=True)

    def _run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        if self._connection is None:
            self._connection = open_database(self._path, is_checked=True)
        with _sqlite_errors(self._path):
            return work(self._connection)

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _connect(path: Path) -> sqlite3.Connection:
    # Chats are private; SQLite gives its journal files the mode of the database.
    path.touch(mode=0o600)
    connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S)
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        # A power cut may cost the last few writes, never the file; each commit would wait for the disk else.
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except sqlite3.Error:
        connection.close()
        raise
    return connection


def _check(connection: sqlite3.Connection) -> None:
    try:
        (verdict,) = connection.execute("PRAGMA quick_check(1)").fetchone()
        if verdict != "ok":
            damage = sqlite3.DatabaseError(verdict)
            damage.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
            raise damage
    except sqlite3.Error:
        connection.close()
        raise


def _move_aside(path: Path) -> Path:
    """Rename the file and its journal; the copy keeps whatever can still be read from it."""
    aside = path.with_name(f"{path.name}.broken-{time.strftime('%Y%m%d-%H%M%S')}")
    for suffix in ("", "-wal", "-shm"):
        part = path.with_name(path.name + suffix)
        if part.exists():
            part.rename(aside.with_name(aside.name + suffix))
    return aside


def _back_up(connection: sqlite3.Connection, path: Path) -> None:
    """Keep a copy of the database as it was before its schema changes; the latest such copy only."""
    unfinished = path.with_name(f"{path.name}.backup-new")
    unfinished.unlink(missing_ok=True)
    unfinished.touch(mode=0o600)
    connection.execute("VACUUM INTO ?", (str(unfinished),))
    unfinished.replace(path.with_name(f"{path.name}.backup"))


@contextmanager
def _opening(path: Path) -> Iterator[None]:
    """Of several processes that open the file, one at a time migrates it or moves it aside."""
    descriptor = os.open(path.with_name(f"{path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def _sqlite_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (sqlite3.IntegrityError, sqlite3.ProgrammingError):
        # Not the file's fault but ours.
        raise
    except sqlite3.Error as error:
        raise DatabaseUnusable(f"The database {path} cannot be used ({error}); {_next_step(error)}.") from error
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise DatabaseUnusable(
            f"The database {path} cannot be used ({reason}); make its folder writable, or set QUIRE_STATE_DIR "
            "to another one."
        ) from error


def _next_step(error: sqlite3.Error) -> str:
    code = _primary_code(error)
    if code in _CORRUPT_CODES:
        return "stop the daemon with `quire shutdown`, and the next start moves the damaged file aside"
    if code in _FULL_CODES:
        return "free some space on its disk"
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return "another program holds it; try again"
    return "make it and its folder writable, or set QUIRE_STATE_DIR to another folder"


def _is_corrupt(error: sqlite3.DatabaseError) -> bool:
    return _primary_code(error) in _CORRUPT_CODES


def _primary_code(error: sqlite3.Error) -> int:
    """SQLite's error code without the extension in its upper bytes."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF
