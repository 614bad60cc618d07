"""`quire outdated` and `update`: installed models against their sources.  Neither needs a daemon."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from app.cli.connection import find_client
from app.cli.failure import CommandFailure
from app.cli.local_store import changing_store, open_store
from app.cli.output import notice, write_json, write_table
from app.cli.resident import JsonOption, names_in_memory
from app.cli.store_work import shown_callbacks
from store.space import format_bytes

if TYPE_CHECKING:
    from app.settings import Settings
    from store.facts import ModelFacts
    from store.hub_settings import HubSettings
    from store.models import ModelStore
    from store.progress import CancelCheck, Reporter
    from store.upkeep.update import Refresh, Standing

_SHOWN_DIGITS = 12
_FAILURES = ("unknown", "failed")


def outdated(
    models: Annotated[list[str] | None, typer.Argument(help="The models to ask for; all of them by default.")] = None,
    json_output: JsonOption = False,
) -> None:
    """Show the models of which there is a newer version."""
    from app.settings import load_settings

    settings = load_settings()
    with shown_callbacks(json_output=True) as (_, is_cancelled):
        entries = [
            _entry(each) for each in _standings(open_store(settings), models, _online_hub(settings), is_cancelled)
        ]
    if json_output:
        write_json({"models": entries})
    else:
        newer = [entry for entry in entries if entry["state"] == "outdated"]
        if newer:
            rows = [(e["name"], e["commit"][:_SHOWN_DIGITS], e["current"][:_SHOWN_DIGITS]) for e in newer]
            write_table(("NAME", "INSTALLED", "NEWER"), rows)
            notice("`quire update NAME` fetches what changed.")
        _report([entry for entry in entries if entry["state"] != "outdated"], is_each_told=bool(models))
    _exit(entries)


def update(
    models: Annotated[list[str] | None, typer.Argument(help="The models to update.")] = None,
    update_all: Annotated[bool, typer.Option("--all", help="Update every model.")] = False,
    json_output: JsonOption = False,
) -> None:
    """Fetch the newer version of models.

    Files that did not change are kept; old ones go when the new model is complete.
    """
    if bool(models) == update_all:
        raise typer.BadParameter("name models, or give --all; `quire outdated` shows which have a newer version")
    from app.residency.advice.acceptance import why_unsupported
    from app.settings import load_settings
    from store.errors import UnsupportedFormat
    from store.models import InstalledModel
    from store.progress import Reporter
    from store.pull import pull

    def refuse_unsupported(facts: ModelFacts) -> None:
        if reason := why_unsupported(facts):
            raise UnsupportedFormat(f"Its newer version cannot run here, so the old one stays: {reason}")

    settings = load_settings()
    hub = _online_hub(settings)
    with (
        changing_store(settings, creates=True) as store,
        shown_callbacks(json_output=json_output) as (on_progress, is_cancelled),
    ):

        def refresh(name: str) -> InstalledModel:
            return pull(name, store.root, hub, on_progress, is_cancelled, refresh=True, accept=refuse_unsupported)

        reporter = Reporter(on_progress, is_cancelled)
        entries = [_updated(store, each, refresh, reporter) for each in _standings(store, models, hub, is_cancelled)]
    if json_output:
        write_json({"models": entries})
    else:
        _report(entries, is_each_told=bool(models))
    _tell_of_residents(settings, [entry["name"] for entry in entries if entry["state"] == "updated"])
    _exit(entries)


def _online_hub(settings: Settings) -> HubSettings:
    from app.hub import hub_settings

    hub = hub_settings(settings)
    if hub.offline:
        raise CommandFailure(
            "Offline mode is on, so no source can be asked for newer versions; "
            f"change hub_offline ({settings.origin('hub_offline')}) and try again."
        )
    return hub


def _standings(
    store: ModelStore, models: list[str] | None, hub: HubSettings, is_cancelled: CancelCheck
) -> list[Standing]:
    from store.plan import current_commit
    from store.upkeep.update import standings

    return list(standings(store, models or [], lambda name: current_commit(name, hub, is_cancelled)))


def _entry(standing: Standing) -> dict[str, Any]:
    return {
        "name": standing.name,
        "state": standing.state,
        "commit": standing.commit,
        "current": standing.current,
        "reason": standing.reason,
    }


def _updated(store: ModelStore, standing: Standing, refresh: Refresh, reporter: Reporter) -> dict[str, Any]:
    """Update the model if there is something newer; one failure does not keep the others."""
    from store.errors import Cancelled, StoreError
    from store.upkeep.update import update_model

    entry = _entry(standing)
    if standing.state != "outdated":
        return entry
    try:
        done = update_model(store, standing.name, refresh, reporter)
    except Cancelled:
        raise
    except StoreError as error:
        return {**entry, "state": "failed", "reason": error.message}
    return {**entry, "state": "updated", "commit": done.new_commit, "freed_bytes": done.freed_bytes}


def _report(entries: list[dict[str, Any]], *, is_each_told: bool) -> None:
    """A line for everything that happened; models of which there is nothing to tell are counted, unless asked for."""
    for entry in entries:
        name, state, reason = entry["name"], entry["state"], entry["reason"]
        if state == "updated":
            freed = f"; {format_bytes(entry['freed_bytes'])} of old files freed" if entry["freed_bytes"] else ""
            notice(f"Updated {name} to {entry['commit'][:_SHOWN_DIGITS]}{freed}.")
        elif state in _FAILURES:
            notice(f"{name}: {reason}")
        elif is_each_told:
            notice(f"{name} is current." if state == "current" else f"{name} stays as it is: {reason}")
    counts = Counter(entry["state"] for entry in entries)
    if not is_each_told:
        parts = [f"{counts[state]} {words}" for state, words in _QUIET_STATES.items() if counts[state]]
        if parts:
            notice(f"Models that stay as they are: {', '.join(parts)}.")
        elif not entries:
            notice("No model is installed; get one with `quire pull NAME`.")


_QUIET_STATES = {"current": "current", "pinned": "pinned to a version", "made here": "made from others"}


def _tell_of_residents(settings: Settings, names: list[str]) -> None:
    """A model in memory goes on with the files it was loaded from."""
    import asyncio

    client = find_client(settings) if names else None
    if client is None:
        return

    async def ask() -> set[str]:
        async with client:
            return await names_in_memory(client)

    for name in sorted(asyncio.run(ask()) & set(names)):
        notice(f"{name} is in memory as it was before; `quire stop {name}` lets the next request load the new one.")


def _exit(entries: list[dict[str, Any]]) -> None:
    if any(entry["state"] in _FAILURES for entry in entries):
        raise typer.Exit(1)
