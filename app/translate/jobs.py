"""Jobs → bodies of /api/jobs: pure functions.  Called by `app.api.jobs` and `app.cli.jobs`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from app.schema.jobs import JobEntry, JobFile
from app.translate.admin import rfc3339

if TYPE_CHECKING:
    from app.job import Job
    from app.job_journal import SavedJob


def job_entry(job: Job) -> JobEntry:
    from app.errors import describe

    is_running = job.state == "running"
    return JobEntry(
        id=job.id,
        model=job.request.model,
        state=job.state,
        status=job.status,
        total=job.total_bytes,
        completed=job.done_bytes,
        bytes_per_s=job.rate.bytes_per_s if is_running else 0,
        seconds_left=job.rate.seconds_left(job.total_bytes - job.done_bytes) if is_running else None,
        files=tuple(
            JobFile(str(file), progress.status, progress.total_bytes, progress.done_bytes)
            for file, progress in job.files.items()
        ),
        detached=job.is_detached,
        error=None if job.error is None else describe(job.error, "a job")[1].error,
        created_at=rfc3339(job.created_at),
        started_at=None if job.started_at is None else rfc3339(job.started_at),
        ended_at=None if job.ended_at is None else rfc3339(job.ended_at),
    )


def saved_job_entry(saved: SavedJob) -> JobEntry:
    """A job of a daemon that no longer runs."""
    return JobEntry(
        id=saved.id,
        model=saved.request.model,
        state="paused",
        status="",
        total=saved.total_bytes,
        completed=saved.done_bytes,
        bytes_per_s=0,
        seconds_left=None,
        files=(),
        detached=saved.is_detached,
        error=None,
        created_at=rfc3339(saved.created_at),
        started_at=None,
        ended_at=None,
    )
