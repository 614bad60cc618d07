"""`JobJournal`: the file in which unfinished jobs outlive the daemon.

Holds what is needed to name a job and to begin it again, not its bytes: those are in the store's
partials.  Written by `app.jobs`, read by it and, when no daemon runs, by `quire jobs`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import msgspec

from app.schema.admin import PullRequest

logger = logging.getLogger(__name__)

JOURNAL_NAME = "jobs.json"


class SavedJob(msgspec.Struct, frozen=True, kw_only=True):
    """An unfinished job; sizes in bytes as far as they were known, `created_at` in seconds since the epoch."""

    id: str
    request: PullRequest
    is_detached: bool
    created_at: float
    total_bytes: int = 0
    done_bytes: int = 0


class JobJournal:
    """A journal that cannot be written costs the list after a restart, never a download."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> tuple[SavedJob, ...]:
        """The jobs that were unfinished when the file was written last."""
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=tuple[SavedJob, ...])
        except FileNotFoundError:
            return ()
        except (OSError, msgspec.MsgspecError) as error:
            logger.warning("The unfinished downloads in %s cannot be read (%s)", self._path, error)
            return ()

    def write(self, jobs: Sequence[SavedJob]) -> None:
        """Replace the file in one step."""
        temporary = self._path.with_name(f"{self._path.name}.new")
        try:
            temporary.write_bytes(msgspec.json.encode(jobs))
            temporary.replace(self._path)
        except OSError as error:
            logger.warning("The unfinished downloads cannot be noted in %s (%s)", self._path, error)
