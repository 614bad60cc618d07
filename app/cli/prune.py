"""`quire prune`: shows what nobody needs any more, asks, and deletes it.  Needs no daemon."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from app.cli.local_store import changing_store
from app.cli.output import notice, write_json, write_table
from app.cli.resident import JsonOption
from store.space import format_bytes

if TYPE_CHECKING:
    from store.models import ModelStore
    from store.upkeep.prune import Finding

DEFAULT_DAYS = 30.0


def prune(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would go.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Delete without asking.")] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="Also what other programs put into the cache of models.")
    ] = False,
    older_than: Annotated[
        float,
        typer.Option(min=0.0, metavar="DAYS", help="How long something lies unused before it may go."),
    ] = DEFAULT_DAYS,
    json_output: JsonOption = False,
) -> None:
    """Delete what no model needs any more.

    Unfinished downloads that are old, files of no model, kernels and packed weights that no start will use.
    Installed models stay.
    """
    from app.settings import load_settings
    from store.upkeep.prune import find_waste

    with changing_store(load_settings()) as store:
        findings = find_waste(store, older_than_days=older_than, everything=everything)
        if not json_output:
            _print(findings)
        if dry_run or not _is_wanted(findings, yes=yes, may_ask=not json_output):
            if json_output:
                write_json({"found": [_entry(finding) for finding in findings], "freed_bytes": 0})
            if findings and not dry_run:
                notice("Nothing was deleted; give --yes to delete it.")
                raise typer.Exit(1)
            return
        entries, freed_bytes = _delete(store, findings)
    if json_output:
        write_json({"found": entries, "freed_bytes": freed_bytes})
    notice(f"{format_bytes(freed_bytes)} freed.")
    if any("error" in entry for entry in entries):
        raise typer.Exit(1)


def _print(findings: list[Finding]) -> None:
    if not findings:
        notice("There is nothing to delete.")
        return
    rows = [(f.waste.kind, f.waste.name, format_bytes(f.waste.size_bytes), f.waste.reason) for f in findings]
    write_table(("WHAT", "OF", "SIZE", "WHY"), rows)
    notice(f"{format_bytes(sum(finding.waste.size_bytes for finding in findings))} in all.")


def _is_wanted(findings: list[Finding], *, yes: bool, may_ask: bool) -> bool:
    if not findings or yes or not may_ask or not (sys.stdin and sys.stdin.isatty()):
        return yes and bool(findings)
    return typer.confirm("Delete it?", err=True)


def _delete(store: ModelStore, findings: list[Finding]) -> tuple[list[dict[str, Any]], int]:
    """One failure does not keep the others: a repository may be in the middle of a download."""
    from store.errors import StoreError
    from store.upkeep.prune import prune as prune_one

    entries, freed_bytes = [], 0
    for finding in findings:
        entry = _entry(finding)
        try:
            entry["freed_bytes"] = prune_one(store, finding)
            freed_bytes += entry["freed_bytes"]
        except (StoreError, OSError) as error:
            entry["error"] = str(error)
            notice(f"{finding.waste.name} stays: {error}")
        entries.append(entry)
    return entries, freed_bytes


def _entry(finding: Finding) -> dict[str, Any]:
    waste = finding.waste
    return {"kind": waste.kind, "name": waste.name, "reason": waste.reason, "size_bytes": waste.size_bytes}
