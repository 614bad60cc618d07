"""`quire disk list`, `use`, `usage`, `add` and `remove`: where models are, and whose folders are read too.

None of them needs a daemon; `use` asks to stop one, because it goes on with the old data root.  Moving is
`app.cli.disk_move`.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from app.cli.output import notice, write_json, write_table
from app.cli.resident import JsonOption
from store.space import format_bytes

if TYPE_CHECKING:
    from app.settings import Settings
    from store.disk.filesystems import Disk
    from store.folder_reader import FolderScan

DISK_HEADER = ("DISK", "TYPE", "KIND", "FREE", "TOTAL", "FOLDER")
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask before stopping the daemon.")]


def list_disks(json_output: JsonOption = False) -> None:
    """Show the disks for models, and the folders that were added."""
    from app.settings import load_settings
    from store.disk.filesystems import preselected, read_disks
    from store.external import user_caches
    from store.external_folders import registered_folders
    from store.folder_reader import FolderReader
    from store.known_roots import mount_of
    from store.paths import DataRoot

    settings = load_settings()
    root = DataRoot(settings.data_root)
    why_missing = _reason_missing(root.root)
    in_use = None if why_missing else mount_of(root.root)
    disks = [replace(disk, folder=root.root) if disk.mount == in_use else disk for disk in read_disks()]
    recommended = preselected(disks)
    registered = registered_folders(root)
    caches = [folder for folder in user_caches() if folder not in (*registered, root.hub)]
    scans = FolderReader().scan([*registered, *caches])
    external, found = scans[: len(registered)], [scan for scan in scans[len(registered) :] if scan.models]
    if json_output:
        write_json(
            {
                "data_root": str(root.root),
                "origin": settings.origin("data_root"),
                "problem": why_missing,
                "disks": [disk_entry(disk, in_use=disk.mount == in_use) for disk in disks],
                "recommended": str(recommended.mount) if recommended else None,
                "external": [_folder_entry(scan) for scan in external],
                "found": [_folder_entry(scan) for scan in found],
            }
        )
        return
    marks = {disk.mount: "*" if disk.mount == in_use else "" for disk in disks}
    write_table(("", *DISK_HEADER), [(marks[disk.mount], *disk_row(disk)) for disk in disks])
    typer.echo(f"\nData root: {root.root} ({settings.origin('data_root')})")
    for scan in external:
        typer.echo(f"Read only: {scan.folder} ({_folder_state(scan)})")
    if why_missing:
        notice(why_missing)
    for scan in found:
        count = plural(len(scan.models), "model")
        notice(f"{scan.folder} holds {count}; `quire disk add {scan.folder}` uses that folder in place.")


def _folder_entry(scan: FolderScan) -> dict[str, Any]:
    """A folder as JSON; no number of models for one that is not there or does not answer."""
    return {
        "folder": str(scan.folder),
        "models": len(scan.models) if scan.state == "there" else None,
        "state": scan.state,
    }


def _folder_state(scan: FolderScan) -> str:
    absent = {"missing": "not there now", "silent": "does not answer"}
    return absent.get(scan.state) or plural(len(scan.models), "model")


def _reason_missing(root: Path) -> str | None:
    from store.errors import DataRootUnusable
    from store.paths import DataRoot

    try:
        DataRoot.look(root)
    except DataRootUnusable as error:
        return error.message
    return None


def disk_row(disk: Disk) -> tuple[str, ...]:
    """A disk's cells below DISK_HEADER."""
    sizes = (format_bytes(disk.free_bytes), format_bytes(disk.total_bytes))
    return (str(disk.mount), disk.fs_type, disk.kind, *sizes, str(disk.folder))


def disk_entry(disk: Disk, *, in_use: bool) -> dict[str, Any]:
    """A disk as JSON; sizes in bytes."""
    return {
        "mount": str(disk.mount),
        "type": disk.fs_type,
        "kind": disk.kind,
        "free": disk.free_bytes,
        "total": disk.total_bytes,
        "folder": str(disk.folder),
        "in_use": in_use,
    }


def use(
    path: Annotated[Path, typer.Argument(help="The new data root: a directory, or the mount point of a disk.")],
    yes: YesOption = False,
) -> None:
    """Keep models in another place from now on.

    What is in the old place stays there; `quire disk move` takes it along.
    """
    from app.config_file import remember_setting
    from app.settings import load_settings
    from store.paths import DataRoot

    settings = load_settings()
    target = data_root_at(path)
    require_own_folder(target)
    DataRoot.open(target, renew=True)
    if target != settings.data_root:
        stop_daemon_with_leave(settings, f"it still uses {settings.data_root}", yes=yes)
    file = remember_setting("data_root", str(target))
    notice(f"Models are kept in {target} from now on (written to {file}).")
    if target != settings.data_root:
        _tell_what_stays(settings.data_root)
    warn_of_override(settings, target)


def data_root_at(path: Path) -> Path:
    """The data root that a path from the command line means; on a mount point, a folder of Quire's own."""
    from store.disk.filesystems import user_folder_on
    from store.known_roots import read_marker

    path = path.expanduser().absolute()
    if os.path.ismount(path) and read_marker(path) is None:
        return user_folder_on(path) or path / "quire"
    return path


def require_own_folder(target: Path) -> None:
    """Refuse a directory that holds other things: a data root has a folder of its own."""
    from app.cli.failure import CommandFailure
    from store.known_roots import read_marker

    is_foreign = target.is_dir() and read_marker(target) is None and not (target / "hub").is_dir()
    if is_foreign and any(target.iterdir()):
        raise CommandFailure(f"{target} holds other files; name a folder for Quire alone, such as {target / 'quire'}.")


def stop_daemon_with_leave(settings: Settings, why: str, *, yes: bool) -> None:
    """Stop a running daemon once the person, or `--yes`, agrees; the command fails if nobody does."""
    from app.cli.ask import can_ask, confirm
    from app.cli.daemon import stop_daemon
    from app.cli.failure import CommandFailure
    from app.daemon import running_daemon

    if running_daemon(settings) is None:
        return
    if not yes and not (can_ask() and confirm(f"A daemon is running, and {why}. Stop it?")):
        raise CommandFailure(f"A daemon is running, and {why}; stop it with `quire shutdown`, or give --yes.")
    stop_daemon(settings)
    notice("The daemon has stopped; the next `quire run` starts it again.")


def warn_of_override(settings: Settings, target: Path) -> None:
    """Say so when something goes before the config file, which now names `target`."""
    origin = settings.origin("data_root")
    if origin.startswith("environment") and settings.data_root != target:
        notice(
            f"QUIRE_HOME names {settings.data_root} and goes before the config file; unset it, or set it to {target}."
        )


def _tell_what_stays(old: Path) -> None:
    from store.disk.usage import disk_usage
    from store.paths import DataRoot

    models = disk_usage(DataRoot(old)).models if old.is_dir() else {}
    if models:
        notice(
            f"Left in {old}: {plural(len(models), 'model')} ({format_bytes(sum(models.values()))}); "
            f"`quire disk add {old}` reads them from there, `quire disk use {old}` goes back."
        )


def usage(json_output: JsonOption = False) -> None:
    """Show what takes the room below the data root."""
    from app.settings import load_settings
    from store.disk.usage import disk_usage
    from store.paths import DataRoot

    root = DataRoot.look(load_settings().data_root)
    found = disk_usage(root)
    folders = {
        "downloads": found.downloads,
        "kernels": found.kernels,
        "packed_weights": found.packed_weights,
        "logs": found.logs,
    }
    if json_output:
        totals = {"total": found.total_bytes, "free": found.free_bytes, "mount": str(found.mount)}
        write_json({"data_root": str(root.root), "models": found.models, **folders, **totals})
        return
    by_size = sorted(found.models.items(), key=lambda item: -item[1])
    rows = [("model", name, format_bytes(size)) for name, size in by_size]
    rows += [("folder", name.replace("_", " "), format_bytes(size)) for name, size in folders.items()]
    rows += [("total", str(root.root), format_bytes(found.total_bytes))]
    rows += [("free", str(found.mount), format_bytes(found.free_bytes))]
    write_table(("", "WHAT", "SIZE"), rows)


def add(
    path: Annotated[Path, typer.Argument(help="A Hugging Face cache, or a directory of models.")],
    json_output: JsonOption = False,
) -> None:
    """Use the models of another folder in place.

    Quire never writes there.
    """
    from app.settings import load_settings
    from store.external_folders import add_folder
    from store.paths import DataRoot

    folder = path.expanduser().absolute()
    models = add_folder(DataRoot.open(load_settings().data_root), folder)
    if json_output:
        write_json({"folder": str(folder), "models": [model.name for model in models]})
        return
    for model in models:
        typer.echo(model.name)
    notice(f"{folder} is read from now on: {plural(len(models), 'model')}; `quire list` shows them as external.")


def remove(path: Annotated[Path, typer.Argument(help="A folder that was added.")]) -> None:
    """Read a folder no more; its files stay."""
    from app.settings import load_settings
    from store.external_folders import remove_folder
    from store.paths import DataRoot

    folder = path.expanduser().absolute()
    remove_folder(DataRoot.open(load_settings().data_root), folder)
    notice(f"{folder} is not read any more; its files are as they were.")


def plural(count: int, noun: str) -> str:
    """1 → "1 model", 2 → "2 models"."""
    return f"{count} {noun}{'' if count == 1 else 's'}"
