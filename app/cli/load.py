"""`quire load`, `quire sleep` and `quire wake`: into memory, out of the device's memory for a while, and back."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated

import typer

from app.cli.connection import open_client, require_client
from app.cli.failure import INTERRUPTED_EXIT_CODE
from app.cli.output import notice, write_json
from app.cli.progress import follow, load_view
from app.cli.resident import JsonOption
from store.space import format_bytes

if TYPE_CHECKING:
    from app.client import QuireClient
    from app.residency_client import ResidencyClient
    from app.schema.residency import RunningModelEntry

_QUIET_S = 1.0
"""Nobody minds a silence of this length."""

ModelArgument = Annotated[str, typer.Argument(help="An installed model.")]


def checked_share(share: float | None) -> float | None:
    """For typer: a fraction of a device's memory."""
    if share is not None and not 0.0 < share <= 1.0:
        raise typer.BadParameter("give a fraction of the device's memory, above 0 and at most 1")
    return share


def load(
    model: ModelArgument,
    share: Annotated[
        float | None,
        typer.Option(callback=checked_share, help="Share of the device's memory; unless set, what the model needs."),
    ] = None,
    pin: Annotated[
        bool | None, typer.Option("--pin/--unpin", help="Whether it stays whatever else is asked for.")
    ] = None,
    keep_alive: Annotated[
        str | None, typer.Option(help="How long it stays when idle, like 30m or 1h30m; -1 for ever.")
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """Bring a model into memory, or change how it is kept there."""
    import asyncio

    from app.keep_alive import parse_keep_alive
    from app.settings import load_settings
    from store.names import parse_model_name

    if keep_alive is not None:
        parse_keep_alive(keep_alive)
    name = parse_model_name(model).text
    client = open_client(load_settings())

    async def load_and_ask() -> RunningModelEntry | None:
        async with client:
            progress = client.residency.load(name, share=share, pin=pin, keep_alive=keep_alive)
            await follow(progress, load_view())
            return await _entry(client, name)

    try:
        entry = asyncio.run(load_and_ask())
    except KeyboardInterrupt:
        notice(f"The daemon goes on loading {name}; `quire stop {name}` ends that.")
        raise typer.Exit(INTERRUPTED_EXIT_CODE) from None
    _tell_ready(entry, name, json_output=json_output)
    if keep_alive is not None and entry is not None and _stays_shorter(entry, keep_alive):
        notice(f"It stays for {entry.keep_alive} when idle, not {keep_alive}: max_keep_alive allows no more.")


def sleep(model: ModelArgument, json_output: JsonOption = False) -> None:
    """Give a model's memory to others for a while.

    Its weights stay in RAM, so that waking it is quick.
    """
    entry = change(model, lambda residency, name: residency.sleep(name))
    if json_output:
        write_json(entry)
        return
    where = f", its weights in {format_bytes(entry.size_host)} of RAM" if entry.size_host else ""
    notice(f"{entry.name} sleeps{where}; `quire wake {entry.name}` or the next request brings it back.")


def wake(model: ModelArgument, json_output: JsonOption = False) -> None:
    """Bring a sleeping model back."""
    entry = change(model, lambda residency, name: residency.wake(name))
    _tell_ready(entry, entry.name, json_output=json_output)


def change(model: str, action: Callable[[ResidencyClient, str], Awaitable[RunningModelEntry]]) -> RunningModelEntry:
    """Do something to a model of the running daemon; what it is afterwards.  Starts no daemon."""
    import asyncio

    from app.settings import load_settings
    from store.names import parse_model_name

    name = parse_model_name(model).text
    client = require_client(load_settings())

    async def act() -> RunningModelEntry:
        async with client:
            acting = asyncio.ensure_future(action(client.residency, name))
            done, _ = await asyncio.wait({acting}, timeout=_QUIET_S)
            if not done:
                notice(f"This takes a while; `quire ps` in another terminal shows what {name} waits for.")
            return await acting

    try:
        return asyncio.run(act())
    except KeyboardInterrupt:
        notice(f"The daemon goes on with it; `quire ps` shows what became of {name}.")
        raise typer.Exit(INTERRUPTED_EXIT_CODE) from None


async def _entry(client: QuireClient, name: str) -> RunningModelEntry | None:
    """The model as it is now; None if it has left already."""
    return next((running for running in (await client.residency.ps()).models if running.name == name), None)


def _stays_shorter(entry: RunningModelEntry, asked: str) -> bool:
    from app.keep_alive import parse_keep_alive

    return entry.keep_alive is not None and parse_keep_alive(entry.keep_alive) < parse_keep_alive(asked)


def _tell_ready(entry: RunningModelEntry | None, name: str, *, json_output: bool) -> None:
    if json_output:
        write_json(entry)
    elif entry is None or entry.state == "draining":
        notice(f"{name} was loaded and leaves again; `quire events` says why.")
    else:
        from app.cli.running_table import description

        notice(f"{entry.name} is {entry.state}: {description(entry)}.")
