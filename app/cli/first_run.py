"""Where models go when nobody has said so yet: one question in a terminal, one warning elsewhere.

Called before a daemon is started.  Asks only at first use and only where there is a real choice; the answer
is remembered in config.toml.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from app.cli.ask import ask, can_ask
from app.cli.failure import CommandFailure
from app.cli.output import notice

if TYPE_CHECKING:
    from collections.abc import Sequence

    from app.settings import Settings
    from store.disk.filesystems import Disk


def settle_data_root(settings: Settings, *, may_ask: bool = True) -> Settings:
    """The settings with a data root that someone chose, or with the default.

    Raises CommandFailure when the question is left unanswered, DataRootUnusable or SettingsError.
    """
    if settings.origin("data_root") != "default":
        return settings
    from store.disk.filesystems import LOW_SPACE_BYTES, free_bytes_at, is_real_choice, read_disks
    from store.paths import DataRoot

    is_used = DataRoot(settings.data_root).hub.exists()
    asks = may_ask and not is_used and can_ask()
    free_bytes = free_bytes_at(settings.data_root)
    if not asks and free_bytes >= LOW_SPACE_BYTES:
        return settings
    disks = read_disks()
    if asks and is_real_choice(disks):
        return _remembered(settings, choose_data_root(disks))
    _warn_if_low(settings.data_root, disks, free_bytes, is_used=is_used)
    return settings


def choose_data_root(disks: Sequence[Disk]) -> Path:
    """Ask which disk, until there is an answer that works; the data root, made."""
    from store.disk.filesystems import preselected
    from store.errors import StoreError
    from store.paths import DataRoot

    best = preselected(disks) or disks[0]
    _show_choice(disks, best)
    while True:
        answer = ask(f"Enter takes {disks.index(best) + 1}; or type a number or a path: ")
        if answer is None:
            raise CommandFailure("No disk was chosen; `quire disk use PATH` chooses one.")
        try:
            folder = _answered(answer, disks, best)
            return DataRoot.open(folder, renew=True).root
        except (StoreError, CommandFailure) as error:
            notice(error.message)


def _show_choice(disks: Sequence[Disk], best: Disk) -> None:
    from app.cli.disk import DISK_HEADER, disk_row
    from app.cli.output import table_lines

    rows = [(">" if disk is best else "", str(number), *disk_row(disk)) for number, disk in enumerate(disks, start=1)]
    notice("On which disk shall models be kept?  They are large; `quire disk move` can move them later.\n")
    for line in table_lines(("", "", *DISK_HEADER), rows):
        notice(line)
    notice("")


def _answered(answer: str, disks: Sequence[Disk], best: Disk) -> Path:
    """The folder that an answer means.  Raises CommandFailure for one that means nothing."""
    from app.cli.disk import data_root_at, require_own_folder

    if not answer:
        return best.folder
    if answer.isdecimal():
        if not 1 <= int(answer) <= len(disks):
            raise CommandFailure(f"There is no disk {answer}; type a number from 1 to {len(disks)}, or a path.")
        return disks[int(answer) - 1].folder
    if not answer.startswith(("/", "~", "./", "../")):
        raise CommandFailure(f"{answer} is neither a number nor a path; a path begins with / or ~.")
    folder = data_root_at(Path(answer))
    require_own_folder(folder)
    return folder


def _remembered(settings: Settings, root: Path) -> Settings:
    import msgspec

    from app.config_file import remember_setting

    file = remember_setting("data_root", str(root))
    notice(f"Models are kept in {root} (written to {file}).")
    origins = {**settings.origins, "data_root": f"config file {file}"}
    return msgspec.structs.replace(settings, data_root=root, origins=origins)


def _warn_if_low(root: Path, disks: Sequence[Disk], free_bytes: int, *, is_used: bool) -> None:
    from store.disk.filesystems import roomier_disk
    from store.space import format_bytes

    better = roomier_disk(disks, free_bytes)
    if better is not None:
        verb = "move" if is_used else "use"
        notice(
            f"Models go to {root}, whose disk has {format_bytes(free_bytes)} free; {better.mount} has "
            f"{format_bytes(better.free_bytes)}: `quire disk {verb} {better.folder}` takes that."
        )
