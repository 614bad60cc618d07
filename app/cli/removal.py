"""`quire rm`: asks a running daemon, which knows whether a model is in use, and works alone otherwise."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated, Any

import typer

from app.cli.connection import find_client
from app.cli.failure import CommandFailure
from app.cli.local_store import changing_store
from app.cli.output import notice, write_json
from app.cli.resident import JsonOption, names_in_memory
from store.space import format_bytes

if TYPE_CHECKING:
    from app.client import QuireClient
    from store.models import ModelStore
    from store.upkeep.removal import Removal


def remove(
    models: Annotated[list[str], typer.Argument(help="The models to delete.")],
    force: Annotated[bool, typer.Option("--force", help="Take a model out of memory first.")] = False,
    json_output: JsonOption = False,
) -> None:
    """Delete models from the disk.

    Also deletes what an unfinished download of a model has left.
    """
    import asyncio

    from app.settings import load_settings

    settings = load_settings()
    with changing_store(settings) as store:
        results = asyncio.run(_remove_each(find_client(settings), store, models, force=force))
    if json_output:
        write_json({"models": results})
    if any("error" in result for result in results):
        raise typer.Exit(1)


async def _remove_each(
    client: QuireClient | None, store: ModelStore, models: list[str], *, force: bool
) -> list[dict[str, Any]]:
    """Delete one after another; one failure does not keep the others."""
    from app.client import ClientError
    from store.errors import StoreError

    results: list[dict[str, Any]] = []
    async with client or nullcontext():
        for model in models:
            try:
                results.append(await _remove(client, store, model, force=force))
            except (ClientError, CommandFailure, StoreError) as error:
                notice(error.message)
                results.append({"name": model, "error": error.message})
    return results


async def _remove(client: QuireClient | None, store: ModelStore, model: str, *, force: bool) -> dict[str, Any]:
    from store.upkeep.removal import plan_removal
    from store.upkeep.removal import remove as remove_from_store

    plan = plan_removal(store, model)
    if client is not None and not force and plan.name in await names_in_memory(client):
        raise CommandFailure(
            f"{plan.name} is in memory; stop it first with `quire stop {plan.name}`, or give `quire rm --force`."
        )
    notice(_announcement(plan))
    if client is None:
        freed_bytes = remove_from_store(store, model).freed_bytes
    else:
        if force and not plan.is_unfinished:
            await client.residency.stop(plan.name)
        freed_bytes = await client.delete(plan.name)
    notice(f"Deleted {plan.name}; {format_bytes(freed_bytes)} freed.")
    return {
        "name": plan.name,
        "freed_bytes": freed_bytes,
        "kept_bytes": plan.kept_bytes,
        "used_by": plan.used_by,
        "was_unfinished": plan.is_unfinished,
    }


def _announcement(plan: Removal) -> str:
    if plan.is_unfinished:
        return f"Deleting the unfinished download of {plan.name} frees {format_bytes(plan.freed_bytes)}."
    kept = f"; {format_bytes(plan.kept_bytes)} stay for {_listed(plan.used_by)}" if plan.kept_bytes else ""
    return f"Deleting {plan.name} frees {format_bytes(plan.freed_bytes)}{kept}."


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "") or "other programs"
