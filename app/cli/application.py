"""The Typer application: every command of `quire` under its name.  Called by `app.cli.main`."""

from __future__ import annotations

from typing import Annotated

import typer

from app.cli import (
    bundles,
    chats,
    creation,
    daemon,
    discover,
    disk,
    disk_move,
    events,
    installed,
    jobs,
    load,
    login,
    plan,
    prune,
    pull,
    recommend,
    removal,
    resident,
    run,
    share,
    show,
    update,
    upkeep,
    usage,
)

application = typer.Typer(
    help="Pull language models, chat with them, serve them to programs.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _show_version(is_wanted: bool) -> None:
    if is_wanted:
        from app.version import VERSION

        typer.echo(f"quire {VERSION}")
        raise typer.Exit


@application.callback()
def _options(
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


application.command("run")(run.run)
application.command("pull")(pull.pull)
application.command("jobs")(jobs.jobs)
application.command("login")(login.login)
application.command("logout")(login.logout)
application.command("search")(discover.search)
application.command("recommend")(recommend.recommend)
application.command("plan")(plan.plan)
application.command("list")(installed.list_models)
application.command("show")(show.show)
application.command("rm")(removal.remove)
application.command("cp")(creation.copy)
application.command("create")(creation.create)
application.command("outdated")(update.outdated)
application.command("update")(update.update)
application.command("prune")(prune.prune)
application.command("export")(bundles.export)
application.command("import")(bundles.import_bundle)
application.command("verify")(upkeep.verify)
application.command("ps")(resident.ps)
application.command("load")(load.load)
application.command("share")(share.share)
application.command("sleep")(load.sleep)
application.command("wake")(load.wake)
application.command("stop")(resident.stop)
application.command("events")(events.events)
application.command("usage")(usage.usage)
application.add_typer(chats.chats, name="chats")
application.command("serve")(daemon.serve)
application.command("shutdown")(daemon.shutdown)

disks = typer.Typer(help="Choose the disk for models, move them, add folders.", no_args_is_help=True)
disks.command("list")(disk.list_disks)
disks.command("use")(disk.use)
disks.command("usage")(disk.usage)
disks.command("move")(disk_move.move)
disks.command("add")(disk.add)
disks.command("remove")(disk.remove)
application.add_typer(disks, name="disk")
