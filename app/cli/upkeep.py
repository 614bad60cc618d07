"""`quire verify`: keeping what is installed sound.  Works on the disk and needs no daemon."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from app.cli.local_store import changing_store
from app.cli.output import notice, write_json, write_table
from app.cli.resident import JsonOption
from app.cli.store_work import shown_progress
from store.space import format_bytes

if TYPE_CHECKING:
    from store.upkeep.verify import Verdict


def verify(
    models: Annotated[list[str] | None, typer.Argument(help="The models to check; all of them by default.")] = None,
    json_output: JsonOption = False,
) -> None:
    """Check that the files of models are what was downloaded.

    A broken file is set aside, and `quire pull` of its model fetches that file again.
    """
    from app.settings import load_settings
    from store.errors import Cancelled, StoreError
    from store.upkeep.verify import Verifier, models_to_verify

    verdicts: list[Verdict] = []
    errors: list[dict[str, str]] = []
    with changing_store(load_settings()) as store, shown_progress(json_output=json_output) as reporter:
        verifier = Verifier(store, reporter)
        manifests = models_to_verify(store, models or [])
        verifier.expect(manifests)
        for manifest in manifests:
            try:
                verdicts.append(verifier.verify(manifest))
            except Cancelled:
                raise
            except StoreError as error:
                errors.append({"name": manifest.name, "error": error.message})
    if json_output:
        write_json({"models": [_entry(verdict) for verdict in verdicts] + errors})
    else:
        _print_verdicts(verdicts)
        for error_entry in errors:
            notice(f"{error_entry['name']}: {error_entry['error']}")
    if errors or not all(verdict.is_sound for verdict in verdicts):
        raise typer.Exit(1)


def _entry(verdict: Verdict) -> dict[str, object]:
    return {
        "name": verdict.name,
        "ok": verdict.is_sound,
        "broken": [{"file": part.file, "reason": part.reason} for part in verdict.broken],
        "unchecked": verdict.unchecked,
        "mended_by": verdict.mended_by,
    }


def _print_verdicts(verdicts: list[Verdict]) -> None:
    if not verdicts:
        notice("No model is installed; get one with `quire pull NAME`.")
        return
    write_table(("NAME", "SIZE", "STATE"), [(v.name, format_bytes(v.size_bytes), _state(v)) for v in verdicts])
    for verdict in verdicts:
        for part in verdict.broken:
            notice(f"{verdict.name}: {part.file} is broken ({part.reason}).")
        if verdict.broken:
            notice(f"`quire pull {verdict.mended_by}` fetches {'it' if len(verdict.broken) == 1 else 'them'} again.")


def _state(verdict: Verdict) -> str:
    if verdict.broken:
        return f"{len(verdict.broken)} broken"
    return f"sound, {len(verdict.unchecked)} without a digest" if verdict.unchecked else "sound"
