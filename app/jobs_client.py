"""`JobsClient`: the part of the daemon's HTTP API that is about long operations, as typed async methods.

It is `QuireClient.jobs`, and uses that client's connection and errors.  Used by `app.cli`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, Protocol, TypeVar
from urllib.parse import quote

from app.schema.admin import ProgressLine
from app.schema.jobs import CancelledJob, JobEntry, JobList

T = TypeVar("T")


class Transport(Protocol):
    """How a request reaches the daemon; both methods raise `ClientError`."""

    async def request(self, method: str, path: str, shape: type[T], body: dict[str, Any] | None = None) -> T: ...

    def progress(
        self, method: str, path: str, model: str, body: dict[str, Any] | None = None
    ) -> AsyncGenerator[ProgressLine, None]: ...


def pull_body(model: str, *, limit_bytes_per_s: int | None, offline: bool, force: bool) -> dict[str, Any]:
    """What a request for a download says; options that are not wanted are left out."""
    options = {"limit_bytes_per_s": limit_bytes_per_s, "offline": offline, "force": force}
    return {"model": model} | {name: value for name, value in options.items() if value}


class JobsClient:
    """Each method raises `ClientError`."""

    def __init__(self, transport: Transport, *, is_offline: bool = False) -> None:
        self._transport = transport
        self._is_offline = is_offline

    async def list(self) -> tuple[JobEntry, ...]:
        """The jobs of the daemon, the oldest first."""
        return (await self._transport.request("GET", "/api/jobs", JobList)).jobs

    async def start(self, model: str, *, limit_bytes_per_s: int | None = None, force: bool = False) -> JobEntry:
        """Download a model without staying; goes on with the job that the model has."""
        body = pull_body(model, limit_bytes_per_s=limit_bytes_per_s, offline=self._is_offline, force=force)
        return await self._transport.request("POST", "/api/jobs", JobEntry, body)

    def follow(self, job: JobEntry) -> AsyncGenerator[ProgressLine, None]:
        """The job's progress until it succeeded; closing the generator early changes nothing."""
        return self._transport.progress("GET", f"{_path(job.id)}/events", job.model)

    async def cancel(self, job_id: str, *, discard: bool = False) -> CancelledJob:
        """Stop a job; with `discard` what has arrived is deleted."""
        query = "?discard=true" if discard else ""
        return await self._transport.request("DELETE", _path(job_id) + query, CancelledJob)


def _path(job_id: str) -> str:
    return f"/api/jobs/{quote(job_id, safe='')}"
