"""`quire ps` and `quire stop`: the models in memory.  Neither starts a daemon."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from app.cli.connection import require_client
from app.cli.output import format_age, format_bytes, notice, write_json, write_table

if TYPE_CHECKING:
    from app.client import QuireClient
    from app.schema.admin import RunningModelEntry

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def ps(json_output: JsonOption = False) -> None:
    """Show the models in memory."""
    import asyncio

    from app.settings import load_settings

    client = require_client(load_settings())

    async def ask() -> tuple[RunningModelEntry, ...]:
        async with client:
            return await client.ps()

    models = asyncio.run(ask())
    if json_output:
        write_json({"models": models})
        return
    header = ("NAME", "SIZE", "DEVICE", "CONTEXT", "REQUESTS", "KV USED", "LOADED")
    write_table(header, [_row(model) for model in models])
    if not models:
        notice("No model is in memory; `quire run MODEL` loads one.")


def _row(model: RunningModelEntry) -> tuple[str, ...]:
    return (
        model.name,
        format_bytes(model.size) if model.size else "shared",
        model.device,
        f"{model.context_length:,}",
        str(model.num_requests),
        f"{100 * model.kv_cache_usage:.0f} %",
        format_age(model.loaded_at),
    )


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


async def _stop(client: QuireClient, model: str | None) -> list[str]:
    """Unload one model, or all for None; the names of those that were in memory."""
    from store.names import parse_model_name

    async with client:
        names = [parse_model_name(model).text] if model else [running.name for running in await client.ps()]
        return [name for name in names if await client.stop(name)]
