"""Long operations: /api/jobs, and POST /api/pull for a client that stays.

A job started here goes on when its client leaves; one started by /api/pull pauses with the last of its
clients.  Progress is lines of JSON.  Translation is in `app.translate`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from litestar import Router, delete, get, post
from litestar.openapi import ResponseSpec

from app.api.body import JsonBody
from app.api.streaming import EventStream, json_line
from app.job import Job
from app.jobs import Jobs
from app.schema.admin import ProgressLine, PullRequest
from app.schema.error import ErrorBody
from app.schema.jobs import CancelledJob, JobEntry, JobList, JobRequest
from app.translate.admin import pull_line
from app.translate.jobs import job_entry
from store.errors import ModelNotFound
from store.models import ModelStore
from store.names import parse_model_name
from store.upkeep.removal import remove_unfinished

PROGRESS = {200: ResponseSpec(ProgressLine, description="JSON lines; the last one has the status success.")}
NOT_FOUND = {404: ResponseSpec(ErrorBody, description="No job has this id.")}


@post("/api/pull", dto=JsonBody, status_code=200, responses=PROGRESS, tags=["Models"])
async def pull_model(data: PullRequest, jobs: Jobs, models: ModelStore) -> EventStream:
    """Download a model; when the last client leaves, the download pauses.  Clients of one model share it."""

    async def lines() -> AsyncGenerator[bytes, None]:
        is_here = await asyncio.to_thread(_is_here, models, data.model)
        # Started here and not before: a stream that nobody reads any more would not end what it began.
        async with aclosing(_progress_lines(jobs, jobs.start(data, is_here=is_here), holds=True)) as progress:
            async for line in progress:
                yield line

    return _json_lines(lines())


@post("/", dto=JsonBody, status_code=201)
async def create_job(data: JobRequest, jobs: Jobs, models: ModelStore) -> JobEntry:
    """Download a model in the background; if a job for it is there, that one goes on and is the answer."""
    request = PullRequest(
        model=data.model, limit_bytes_per_s=data.limit_bytes_per_s, offline=data.offline, force=data.force
    )
    is_here = await asyncio.to_thread(_is_here, models, data.model)
    return job_entry(jobs.start(request, is_detached=True, is_here=is_here))


@get("/")
async def list_jobs(jobs: Jobs) -> JobList:
    """All jobs, the oldest first; those that ended are listed for a while."""
    return JobList(tuple(map(job_entry, jobs.list())))


@get("/{job_id:str}", responses=NOT_FOUND)
async def get_job(job_id: str, jobs: Jobs) -> JobEntry:
    return job_entry(jobs.find(job_id))


@get("/{job_id:str}/events", responses=PROGRESS | NOT_FOUND)
async def follow_job(job_id: str, jobs: Jobs) -> EventStream:
    """The job's progress, from what is known to its end; leaving changes nothing."""
    return _json_lines(_progress_lines(jobs, jobs.find(job_id), holds=False))


@post("/{job_id:str}/pause", status_code=200, responses=NOT_FOUND)
async def pause_job(job_id: str, jobs: Jobs) -> JobEntry:
    """Stop a job for now; what has arrived is kept."""
    job = jobs.find(job_id)
    jobs.pause(job)
    return job_entry(job)


@post("/{job_id:str}/resume", status_code=200, responses=NOT_FOUND)
async def resume_job(job_id: str, jobs: Jobs) -> JobEntry:
    """Go on with a job that was paused or cancelled, or that failed."""
    job = jobs.find(job_id)
    jobs.resume(job)
    return job_entry(job)


@delete("/{job_id:str}", status_code=200, responses=NOT_FOUND)
async def cancel_job(job_id: str, jobs: Jobs, models: ModelStore, discard: bool = False) -> CancelledJob:
    """Stop a job for good, or take an ended one off the list; `discard` deletes what has arrived of the model."""
    job = jobs.find(job_id)
    await jobs.cancel(job)
    freed_bytes = await asyncio.to_thread(_discard, models, job) if discard and job.state != "done" else 0
    return CancelledJob(job_entry(job), freed_bytes)


def _is_here(models: ModelStore, name: str) -> bool:
    """Whether there is nothing to download.  Raises InvalidName, and ModelNotFound for a path."""
    try:
        models.find(name)
    except ModelNotFound:
        if parse_model_name(name).kind == "path":
            raise
        return False
    return True


def _discard(models: ModelStore, job: Job) -> int:
    try:
        return remove_unfinished(models, job.request.model).freed_bytes
    except ModelNotFound:
        return 0


async def _progress_lines(jobs: Jobs, job: Job, *, holds: bool) -> AsyncGenerator[bytes, None]:
    async with aclosing(jobs.watch(job, holds=holds)) as reports:
        async for progress in reports:
            yield json_line(pull_line(progress))
    yield json_line(ProgressLine("success"))


def _json_lines(lines: AsyncGenerator[bytes, None]) -> EventStream:
    return EventStream(lines, media_type="application/x-ndjson", encode_error=json_line)


jobs_router = Router(
    "/api/jobs",
    route_handlers=[create_job, list_jobs, get_job, follow_job, pause_job, resume_job, cancel_job],
    tags=["Jobs"],
)
