"""`quire export` and `import`: models carried to machines without a network.  Neither needs a daemon."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from app.cli.failure import CommandFailure
from app.cli.local_store import changing_store
from app.cli.output import notice, write_json
from app.cli.resident import JsonOption
from app.cli.store_work import shown_progress
from store.space import format_bytes

ForceOption = Annotated[bool, typer.Option("--force", help="Replace what is there.")]


def export(
    model: Annotated[str, typer.Argument(help="An installed model.")],
    file: Annotated[Path, typer.Argument(help="The file to write, such as model.tar.")],
    force: ForceOption = False,
    json_output: JsonOption = False,
) -> None:
    """Write a model into one file.

    `quire import` installs it on another machine.
    """
    from app.settings import load_settings
    from store.bundles.bundle import export_model

    if file.is_dir():
        raise CommandFailure(f"{file} is a directory; name a file in it, such as {file / 'model.tar'}.")
    if file.exists() and not force:
        raise CommandFailure(f"{file} is there already; give --force to replace it, or name another file.")
    with (
        changing_store(load_settings()) as store,
        _file_errors(file, "written"),
        shown_progress(json_output=json_output) as reporter,
    ):
        size_bytes = export_model(store, model, file, reporter)
    if json_output:
        write_json({"file": str(file), "size_bytes": size_bytes})
    notice(f"Wrote {file} ({format_bytes(size_bytes)}); `quire import {file.name}` installs it on another machine.")


def import_bundle(
    file: Annotated[Path, typer.Argument(help="A file that `quire export` wrote.")],
    force: ForceOption = False,
    json_output: JsonOption = False,
) -> None:
    """Install a model from a file, without a network."""
    from app.settings import load_settings
    from store.bundles.bundle_import import import_model

    with (
        changing_store(load_settings(), creates=True) as store,
        _file_errors(file, "read"),
        shown_progress(json_output=json_output) as reporter,
    ):
        model = import_model(store, file, reporter, force=force)
    if json_output:
        write_json({"name": model.name, "size_bytes": model.size_bytes, "digest": model.digest})
    notice(f"{model.name} is installed; try `quire run {model.name}`.")


@contextmanager
def _file_errors(file: Path, doing: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = (error.strerror or type(error).__name__).lower()
        raise CommandFailure(
            f"{file} cannot be {doing} ({reason}); check its folder, its disk and its name."
        ) from error
