"""`quire create` and `cp`: names of one's own for models that are here.

Both write a manifest and need no daemon; a base that is not installed is pulled through it first.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from app.cli.connection import find_client, open_client
from app.cli.failure import INTERRUPTED_EXIT_CODE
from app.cli.local_store import changing_store
from app.cli.output import notice, write_json
from app.cli.pull import pull_model
from app.cli.resident import JsonOption

if TYPE_CHECKING:
    from app.settings import Settings
    from store.models import InstalledModel, ModelStore


def create(
    name: Annotated[str, typer.Argument(help="The new model's name, such as mario or mario:v2.")],
    file: Annotated[Path, typer.Option("-f", "--file", help="The Modelfile.")] = Path("Modelfile"),
    json_output: JsonOption = False,
) -> None:
    """Make a model of your own from a Modelfile.

    A system prompt, sampling defaults and more on top of another model.  Its files are those of the
    model that FROM names, which is pulled if need be.
    """
    from app.creation import create as create_model
    from app.creation import read_modelfile
    from app.settings import load_settings
    from store.presets.derive import check_new_name

    settings = load_settings()
    new_name = check_new_name(name)
    modelfile = read_modelfile(file)
    with changing_store(settings, creates=True) as store:
        _pull_if_missing(settings, store, modelfile.base)
        model = create_model(store, new_name, modelfile)
    _unload(settings, new_name)
    _report(model, json_output=json_output)


def copy(
    source: Annotated[str, typer.Argument(help="An installed model.")],
    name: Annotated[str, typer.Argument(help="The further name, such as mine or mine:v2.")],
    json_output: JsonOption = False,
) -> None:
    """Give a model a further name.

    The files are shared, and stay until the last of their names is removed.
    """
    from app.settings import load_settings
    from store.presets.derive import copy_model

    with changing_store(load_settings()) as store:
        model = copy_model(store, source, name)
    _report(model, json_output=json_output)


def _report(model: InstalledModel, *, json_output: bool) -> None:
    if json_output:
        write_json({"name": model.name, "base": model.base, "digest": model.digest})
    notice(f"{model.name} is there; try `quire run {model.name}`.")


def _pull_if_missing(settings: Settings, store: ModelStore, name: str) -> None:
    import asyncio

    from store.errors import ModelNotFound
    from store.names import parse_model_name

    try:
        store.find(name)
    except ModelNotFound:
        if parse_model_name(name).kind == "path":
            raise
    else:
        return
    notice(f"{name} is not installed yet; pulling it.")
    try:
        asyncio.run(pull_model(open_client(settings), name, json_output=False))
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED_EXIT_CODE) from None


def _unload(settings: Settings, name: str) -> None:
    """Let a running daemon forget what it knew under this name, so that the next request sees the new model."""
    import asyncio

    client = find_client(settings)
    if client is None:
        return

    async def stop() -> None:
        async with client:
            await client.residency.stop(name)

    asyncio.run(stop())
