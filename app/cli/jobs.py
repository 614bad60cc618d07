"""`quire jobs`: downloads that are on their way, and `quire pull --cancel`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from app.cli.connection import find_client
from app.cli.failure import CommandFailure
from app.cli.output import format_duration, notice, write_json, write_table
from app.cli.resident import JsonOption
from store.space import format_bytes

if TYPE_CHECKING:
    from app.client import QuireClient
    from app.job_journal import SavedJob
    from app.schema.jobs import CancelledJob, JobEntry
    from app.settings import Settings

_UNFINISHED = ("queued", "running", "paused")


def jobs(json_output: JsonOption = False) -> None:
    """Show downloads: on their way, paused, and ended lately."""
    from app.settings import load_settings

    found = _jobs(load_settings())
    if json_output:
        write_json({"jobs": found})
        return
    if not found:
        notice("No downloads are on their way; `quire pull MODEL` starts one.")
        return
    write_table(("NAME", "STATE", "HERE", "SIZE", "RATE", "LEFT"), [_row(job) for job in found])
    for job in found:
        if job.error is not None:
            notice(f"{job.model}: {job.error.message}")
    if any(job.state == "paused" for job in found):
        notice("`quire pull NAME` goes on with a paused download.")


def unfinished_jobs() -> tuple[SavedJob, ...]:
    """What the last daemon left, when none runs any more."""
    from app.job_journal import JOURNAL_NAME, JobJournal
    from store.paths import user_paths

    return JobJournal(user_paths().state_dir / JOURNAL_NAME).read()


def cancel_downloads(settings: Settings, name: str | None, *, discard: bool, json_output: bool) -> None:
    """Stop the unfinished download of this model, or all of them.  Raises CommandFailure where there is none."""
    import asyncio

    client = find_client(settings)
    if client is None:
        raise CommandFailure(
            "No daemon is running, so nothing is being downloaded; `quire rm MODEL` deletes what has arrived of one."
        )
    cancelled = asyncio.run(_cancel(client, name, discard=discard))
    if json_output:
        write_json({"jobs": cancelled})
    for each in cancelled:
        notice(_cancellation(each, discard=discard))


async def _cancel(client: QuireClient, name: str | None, *, discard: bool) -> list[CancelledJob]:
    async with client:
        found = await client.jobs.list()
        if name is None:
            chosen = [job for job in found if job.state in _UNFINISHED]
        else:
            # A failed one has nothing to stop, but may have left something to delete.
            states = (*_UNFINISHED, "failed", "cancelled") if discard else _UNFINISHED
            chosen = [job for job in found if job.model.casefold() == name.casefold() and job.state in states]
        if not chosen:
            what = "No download is on its way" if name is None else f"No download of {name} is on its way"
            raise CommandFailure(f"{what}; `quire jobs` lists what there is.")
        return [await client.jobs.cancel(job.id, discard=discard) for job in chosen]


def _cancellation(cancelled: CancelledJob, *, discard: bool) -> str:
    model = cancelled.job.model
    if cancelled.job.state == "done":
        return f"{model} was complete by then; `quire rm {model}` deletes it."
    if discard:
        return f"Cancelled {model}; {format_bytes(cancelled.freed_bytes)} freed."
    return (
        f"Cancelled {model}; what has arrived is kept: `quire pull {model}` goes on from there, `quire rm {model}` "
        "deletes it."
    )


def _jobs(settings: Settings) -> tuple[JobEntry, ...]:
    """Those of the running daemon, else those that the last one left unfinished."""
    import asyncio

    client = find_client(settings)
    if client is None:
        from app.translate.jobs import saved_job_entry

        return tuple(map(saved_job_entry, unfinished_jobs()))

    async def ask() -> tuple[JobEntry, ...]:
        async with client:
            return await client.jobs.list()

    return asyncio.run(ask())


def _row(job: JobEntry) -> tuple[str, ...]:
    rate = f"{format_bytes(job.bytes_per_s)}/s" if job.state == "running" else ""
    left = "" if job.seconds_left is None else format_duration(job.seconds_left)
    here, size = (format_bytes(job.completed), format_bytes(job.total)) if job.total else ("", "")
    return (job.model, job.state, here, size, rate, left)
