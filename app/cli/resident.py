"""`quire ps` and `quire stop`: the models in memory.  Neither starts a daemon."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from app.cli.connection import require_client
from app.cli.output import notice, write_json, write_text

if TYPE_CHECKING:
    from app.client import QuireClient
    from app.schema.residency import RunningModels

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def ps(json_output: JsonOption = False) -> None:
    """Show the models in memory, and how the memory is split."""
    import asyncio

    from app.settings import load_settings

    client = require_client(load_settings())

    async def ask() -> RunningModels:
        async with client:
            return await client.residency.ps()

    running = asyncio.run(ask())
    if json_output:
        write_json(running)
        return
    from app.cli.fitted_table import picture_columns, table_columns
    from app.cli.running_table import notes_of, running_lines, split_lines

    lines = running_lines(running.models, table_columns())
    for device in running.devices:
        lines += ["", *split_lines(device, running.models, picture_columns())]
    write_text("".join(f"{line}\n" for line in lines))
    for note in notes_of(running.models):
        notice(note)
    if not running.models:
        notice("No model is in memory; `quire load MODEL` or `quire run MODEL` brings one there.")


def stop(
    model: Annotated[str | None, typer.Argument(help="The model to unload.")] = None,
    stop_all: Annotated[bool, typer.Option("--all", help="Unload every model.")] = False,
    json_output: JsonOption = False,
) -> None:
    """Unload a model from memory.

    The daemon goes on; `quire shutdown` ends it.
    """
    if (model is None) != stop_all:
        raise typer.BadParameter("name one model, or give --all; `quire shutdown` stops the daemon")
    import asyncio

    from app.settings import load_settings

    client = require_client(load_settings())
    stopped = asyncio.run(_stop(client, model))
    if json_output:
        write_json({"stopped": stopped})
    else:
        for name in stopped:
            notice(f"Unloaded {name}.")
        if not stopped:
            notice(f"{model} was not in memory." if model else "No model was in memory.")


async def names_in_memory(client: QuireClient) -> set[str]:
    """The models that hold memory; some of those that `ps` lists are only asked for, or have failed."""
    running = await client.residency.ps()
    return {model.name for model in running.models if model.state not in ("waiting", "failed")}


async def _stop(client: QuireClient, model: str | None) -> list[str]:
    """Unload one model, or all for None; the names of those that were in memory."""
    from store.names import parse_model_name

    async with client:
        if model is None:
            names = [running.name for running in (await client.residency.ps()).models]
        else:
            names = [parse_model_name(model).text]
        return [name for name in names if await client.residency.stop(name)]
