"""`quire list`: the models on this machine, read from the store without a daemon."""

from __future__ import annotations

from app.cli.local_store import open_store
from app.cli.output import format_age, notice, write_json, write_table
from app.cli.resident import JsonOption
from store.space import format_bytes


def list_models(json_output: JsonOption = False) -> None:
    """Show the installed models."""
    from app.model_task import listed_capability
    from app.settings import load_settings
    from app.translate.admin import installed_entry

    models = open_store(load_settings()).list()
    entries = [installed_entry(model, None, listed_capability(model.path)) for model in models]
    if json_output:
        write_json({"models": entries})
        return
    rows = [
        (e.name, e.digest[:12], format_bytes(e.size), ", ".join(e.capabilities), e.source, format_age(e.modified_at))
        for e in entries
    ]
    write_table(("NAME", "ID", "SIZE", "DOES", "SOURCE", "MODIFIED"), rows)
    if not entries:
        notice("No model is installed; `quire run starter` gets a small one, `quire recommend` shows what fits.")
