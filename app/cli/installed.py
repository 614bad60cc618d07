"""`quire list` and `show`: the models on this machine.  Both read the store and need no daemon."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from app.cli.local_store import open_store
from app.cli.output import format_age, format_bytes, write_json, write_table, write_text
from app.cli.resident import JsonOption

if TYPE_CHECKING:
    from app.schema.admin import ModelCardDetails


_MAX_SHOWN = 80


def list_models(json_output: JsonOption = False) -> None:
    """Show the installed models."""
    from app.settings import load_settings
    from app.translate.admin import installed_entry

    entries = [installed_entry(model, None) for model in open_store(load_settings()).list()]
    if json_output:
        write_json({"models": entries})
        return
    rows = [(e.name, e.digest[:12], format_bytes(e.size), e.source, format_age(e.modified_at)) for e in entries]
    write_table(("NAME", "ID", "SIZE", "SOURCE", "MODIFIED"), rows)


def show(
    model: Annotated[str, typer.Argument(help="An installed model, or a path.")],
    modelfile: Annotated[bool, typer.Option("--modelfile", help="Print the Modelfile that makes it.")] = False,
    json_output: JsonOption = False,
) -> None:
    """Show what a model is."""
    from app.settings import load_settings
    from app.translate.admin import model_card
    from store.facts import read_model_facts

    installed = open_store(load_settings()).find(model)
    card = model_card(installed, read_model_facts(installed.path))
    if json_output:
        write_json(card)
        return
    if modelfile:
        write_text(card.modelfile)
        return
    for label, value in _card_lines(card):
        write_text(f"{label:<18}{value}\n")


def _card_lines(card: ModelCardDetails) -> list[tuple[str, str]]:
    details = card.details
    defaults = ", ".join(f"{name} {_shown(value)}" for name, value in card.sampling_defaults.items())
    lines = [
        ("name", card.name),
        ("made from", card.base),
        ("architecture", details.family),
        ("parameters", details.parameter_size),
        ("quantization", details.quantization_level),
        ("context length", f"{details.context_length:,}" if details.context_length else None),
        ("embedding length", f"{details.embedding_length:,}" if details.embedding_length else None),
        ("layers", str(details.num_layers) if details.num_layers else None),
        ("chat template", "yes" if card.has_chat_template else "no"),
        ("sampling", defaults or None),
        ("system", _first_line(card.system)),
        ("license", _first_line(card.license)),
        ("size", format_bytes(card.size)),
        ("source", card.source),
        ("path", card.path),
    ]
    return [(label, value) for label, value in lines if value is not None]


def _shown(value: Any) -> str:
    return " ".join(repr(text) for text in value) if isinstance(value, list | tuple) else f"{value:g}"


def _first_line(text: str | None) -> str | None:
    """What fits a line of the listing; `--modelfile` and `--json` print the whole text."""
    lines = (text or "").strip().splitlines()
    if not lines:
        return None
    return lines[0] if len(lines) == 1 and len(lines[0]) <= _MAX_SHOWN else f"{lines[0][:_MAX_SHOWN]}..."
