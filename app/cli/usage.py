"""`quire usage`: how long the prompts and answers of each model are, and what that asks of `max_model_len`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from app.cli.failure import CommandFailure
from app.cli.output import format_age, notice, write_json, write_table
from app.cli.resident import JsonOption

if TYPE_CHECKING:
    from app.schema.chats import ModelUsageEntry


def usage(
    model: Annotated[str | None, typer.Argument(help="Show this model only.")] = None, json_output: JsonOption = False
) -> None:
    """Show how long prompts and answers are.

    Lengths are in tokens; P99 is the length that 99 of 100 requests do not exceed.
    """
    import asyncio

    from app.cli.records import open_records
    from app.settings import load_settings

    async def ask() -> tuple[ModelUsageEntry, ...]:
        async with open_records(load_settings()) as records:
            return await records.usage()

    entries = asyncio.run(ask())
    if model is not None:
        entries = tuple(entry for entry in entries if entry.model in _names_of(model))
        if not entries:
            raise CommandFailure(f"{model} has answered nothing yet; `quire usage` shows the models that have.")
    if json_output:
        write_json({"models": entries})
        return
    header = ("MODEL", "REQUESTS", "PROMPT P50", "P99", "MAX", "OUTPUT P50", "P99", "MAX", "AT ONCE", "LAST USED")
    write_table(header, [_row(entry) for entry in entries])
    if not entries:
        notice("No model has answered anything yet; `quire run starter` asks one.")
    for entry in entries:
        typer.echo(f"\n{entry.model}: {entry.advice}")


def _names_of(model: str) -> set[str]:
    """The name as given, and the one under which it is installed."""
    from app.cli.local_store import open_store
    from app.settings import load_settings
    from store.errors import StoreError

    try:
        return {model, open_store(load_settings()).find(model).name}
    except StoreError:
        return {model}


def _row(entry: ModelUsageEntry) -> tuple[str, ...]:
    lengths = (
        entry.requests,
        entry.prompt_p50,
        entry.prompt_p99,
        entry.prompt_max,
        entry.output_p50,
        entry.output_p99,
        entry.output_max,
        entry.max_at_once,
    )
    return entry.model, *(f"{length:,}" for length in lengths), format_age(entry.last_used_at)
