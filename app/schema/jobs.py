"""Bodies of /api/jobs.  msgspec structs, no behaviour; sizes in bytes, times RFC 3339."""

from __future__ import annotations

from typing import Literal

import msgspec

from app.schema.admin import PullRequest
from app.schema.error import ErrorDetail


class JobRequest(PullRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A download that goes on without its client; `kind` is what other long operations will be told apart by."""

    kind: Literal["pull"] = "pull"


class JobFile(msgspec.Struct, frozen=True):
    """One file on its way; `status` is "downloading" or "verifying"."""

    file: str
    status: str
    total: int
    completed: int


class JobEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A long operation.  `status` is a phrase for people about what it is at.

    `total` and `completed` are of all files and 0 until they are known; `bytes_per_s` is of the last ten seconds,
    `seconds_left` None where nobody can tell.  A `detached` job goes on with no client following it.
    """

    id: str
    kind: Literal["pull"] = "pull"
    model: str
    state: Literal["queued", "running", "paused", "done", "failed", "cancelled"]
    status: str
    total: int
    completed: int
    bytes_per_s: int
    seconds_left: int | None
    files: tuple[JobFile, ...]
    detached: bool
    error: ErrorDetail | None
    created_at: str
    started_at: str | None
    ended_at: str | None


class JobList(msgspec.Struct, frozen=True):
    jobs: tuple[JobEntry, ...]


class CancelledJob(msgspec.Struct, frozen=True):
    """`freed_bytes` are those of what had arrived, where it was to be discarded."""

    job: JobEntry
    freed_bytes: int = 0
