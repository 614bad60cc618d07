"""`quire share`: another share of the memory for a model that is in use.  Starts no daemon."""

from __future__ import annotations

from typing import Annotated

import typer

from app.cli.load import ModelArgument, change, checked_share
from app.cli.output import notice, write_json
from app.cli.resident import JsonOption


def share(
    model: ModelArgument,
    new_share: Annotated[
        float,
        typer.Argument(metavar="SHARE", callback=checked_share, help="Fraction of the device's memory, like 0.4."),
    ],
    json_output: JsonOption = False,
) -> None:
    """Give a model in memory another share of it.

    Neither the model nor its requests are interrupted.
    """
    entry = change(model, lambda residency, name: residency.share(name, new_share))
    if json_output:
        write_json(entry)
        return
    if entry.state == "asleep":
        notice(f"{entry.name} sleeps; it wakes with a share of {new_share:g}.")
        return
    from app.cli.running_table import description

    notice(f"{entry.name} has {description(entry)} now.")
