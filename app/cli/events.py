"""`quire events`: why models came into memory, slept, left or failed.  Starts no daemon."""

from __future__ import annotations

from contextlib import aclosing
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer

from app.cli.connection import require_client
from app.cli.failure import INTERRUPTED_EXIT_CODE
from app.cli.output import notice, write_json, write_json_line, write_text
from app.cli.resident import JsonOption

if TYPE_CHECKING:
    from app.client import QuireClient
    from app.schema.residency import ResidencyEvent

_KIND_COLUMNS = 6


def events(
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what happens from now on.")] = False,
    json_output: JsonOption = False,
) -> None:
    """Show what happened to models in memory, and why."""
    import asyncio

    from app.settings import load_settings

    client = require_client(load_settings())
    try:
        asyncio.run(_follow(client, json_output=json_output) if follow else _list(client, json_output=json_output))
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED_EXIT_CODE) from None


async def _list(client: QuireClient, *, json_output: bool) -> None:
    async with client:
        found = await client.residency.events()
    if json_output:
        write_json({"events": found})
        return
    write_text("".join(map(event_line, found)))
    if not found:
        notice("Nothing has happened since the daemon started; `quire load MODEL` brings a model into memory.")


async def _follow(client: QuireClient, *, json_output: bool) -> None:
    async with client, aclosing(client.residency.follow_events()) as following:
        async for event in following:
            if json_output:
                write_json_line(event)
            else:
                write_text(event_line(event))
    notice("The daemon has ended.")


def event_line(event: ResidencyEvent) -> str:
    """`2026-11-21 18:32:05  evict   smollm2:135m  idle for 12 min, and qwen3:4b needs its memory`, in local time."""
    at = datetime.fromisoformat(event.at).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    return f"{at}  {event.kind:<{_KIND_COLUMNS}}  {event.model}  {event.why}\n"
