"""`quire pull`: a model from its source to this machine, by way of the daemon."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from app.cli.connection import open_client
from app.cli.failure import INTERRUPTED_EXIT_CODE
from app.cli.output import notice, write_json_line
from app.cli.progress import follow, pull_view

if TYPE_CHECKING:
    from app.client import QuireClient


def pull(
    model: Annotated[str, typer.Argument(help="smollm2:135m, organisation/name, ...")],
    json_output: Annotated[bool, typer.Option("--json", help="Print progress as JSON lines.")] = False,
) -> None:
    """Download a model.

    An interrupted download goes on where it stopped.
    """
    import asyncio

    from app.settings import load_settings
    from store.names import parse_model_name

    name = parse_model_name(model).text
    client = open_client(load_settings(), may_ask=not json_output)
    try:
        asyncio.run(pull_model(client, name, json_output=json_output))
    except KeyboardInterrupt:
        notice(f"Paused; `quire pull {name}` goes on from here.")
        raise typer.Exit(INTERRUPTED_EXIT_CODE) from None
    if json_output:
        write_json_line({"status": "success"})
    notice(f"{name} is installed.")


async def pull_model(client: QuireClient, name: str, *, json_output: bool) -> None:
    """Download through the daemon, with progress; closes the client."""
    async with client:
        await follow(client.pull(name), pull_view(json_output=json_output))
