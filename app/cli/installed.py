"""`quire list`, `show` and `rm`: the models on this machine.

`list` and `show` read the store and need no daemon.  `rm` asks a running daemon, which knows
whether the model is in use, and does it alone otherwise.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated

import typer

from app.cli.connection import find_client
from app.cli.output import format_age, format_bytes, notice, write_json, write_table
from app.cli.resident import JsonOption

if TYPE_CHECKING:
    from app.client import QuireClient
    from app.schema.admin import ModelCardDetails
    from app.settings import Settings
    from store.models import ModelStore


def list_models(json_output: JsonOption = False) -> None:
    """Show the installed models."""
    from app.settings import load_settings
    from app.translate.admin import installed_entry

    entries = [installed_entry(model, None) for model in _open_store(load_settings()).list()]
    if json_output:
        write_json({"models": entries})
        return
    rows = [(e.name, e.digest[:12], format_bytes(e.size), e.source, format_age(e.modified_at)) for e in entries]
    write_table(("NAME", "ID", "SIZE", "SOURCE", "MODIFIED"), rows)


def show(
    model: Annotated[str, typer.Argument(help="An installed model, or a path.")], json_output: JsonOption = False
) -> None:
    """Show what a model is."""
    from app.settings import load_settings
    from app.translate.admin import model_card
    from store.facts import read_model_facts

    installed = _open_store(load_settings()).find(model)
    card = model_card(installed, read_model_facts(installed.path))
    if json_output:
        write_json(card)
        return
    for label, value in _card_lines(card):
        typer.echo(f"{label:<18}{value}")


def _card_lines(card: ModelCardDetails) -> list[tuple[str, str]]:
    details = card.details
    defaults = ", ".join(f"{name} {value:g}" for name, value in card.sampling_defaults.items())
    lines = [
        ("name", card.name),
        ("architecture", details.family),
        ("parameters", details.parameter_size),
        ("quantization", details.quantization_level),
        ("context length", f"{details.context_length:,}" if details.context_length else None),
        ("embedding length", f"{details.embedding_length:,}" if details.embedding_length else None),
        ("layers", str(details.num_layers) if details.num_layers else None),
        ("chat template", "yes" if card.has_chat_template else "no"),
        ("sampling", defaults or None),
        ("license", card.license),
        ("size", format_bytes(card.size)),
        ("source", card.source),
        ("path", card.path),
    ]
    return [(label, value) for label, value in lines if value is not None]


def remove(
    models: Annotated[list[str], typer.Argument(help="The models to delete.")], json_output: JsonOption = False
) -> None:
    """Delete models from the disk."""
    import asyncio

    from app.settings import load_settings

    settings = load_settings()
    results = asyncio.run(_remove_each(find_client(settings), _open_store(settings), models))
    if json_output:
        write_json({"models": results})
    if any("error" in result for result in results):
        raise typer.Exit(1)


async def _remove_each(client: QuireClient | None, store: ModelStore, models: list[str]) -> list[dict[str, str | int]]:
    """Delete through the daemon, or from the store if there is none; one failure does not keep the others."""
    from app.client import ClientError
    from store.errors import StoreError
    from store.names import parse_model_name

    results: list[dict[str, str | int]] = []
    async with client or nullcontext():
        for model in models:
            try:
                name = parse_model_name(model).text
                freed_bytes = await client.delete(name) if client else store.remove(name)
            except (ClientError, StoreError) as error:
                notice(error.message)
                results.append({"name": model, "error": error.message})
            else:
                notice(f"Deleted {name}; {format_bytes(freed_bytes)} freed.")
                results.append({"name": name, "freed_bytes": freed_bytes})
    return results


def _open_store(settings: Settings) -> ModelStore:
    # Not DataRoot.open, which proves that the disk takes a write: looking needs none.
    from store.models import ModelStore
    from store.paths import DataRoot

    return ModelStore(DataRoot(settings.data_root))
