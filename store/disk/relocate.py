"""Moves a data root to another disk: copy, verify, switch, remove the old copy.

A kill at any moment leaves one whole data root in force, and the next call goes on where this one was:

1. copying.   The target has a journal and no marker, so nobody takes it for a data root.  A file gets its name
              only when it is complete and compared; one with its name is not copied again.
2. switching. The target gets its marker, the caller's `switch` makes it the data root, the journal says so.
3. removing.  The old root loses its marker first, then its folders; at the very end the journal goes.

Only what `DataRoot.folders` and `DataRoot.external_list` name is moved; anything else in the old folder stays.
Knows nothing of settings or daemons; called by `quire disk move`.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from store.disk.file_copy import Copier, unfinished
from store.errors import DataRootUnusable, ModelBusy, NotEnoughSpace
from store.known_roots import KnownRoot, ensure_marker, mount_of, read_marker, remember_root
from store.paths import MOVE_JOURNAL_NAME, DataRoot, root_lock, user_paths
from store.space import SPACE_RESERVE_BYTES, format_bytes

_MAX_PASSES = 3


class MoveJournal(msgspec.Struct, frozen=True):
    """What a target remembers of the move into it; `is_switched` once it is the data root."""

    source: str
    is_kept: bool
    is_switched: bool = False


@dataclass(frozen=True, slots=True)
class MoveReport:
    """What a move did; `damaged` are blobs whose bytes were not what their names promise before it."""

    source: Path
    is_kept: bool
    copied_bytes: int
    damaged: tuple[Path, ...]
    left_behind: tuple[str, ...]


def pending_move(target: Path) -> MoveJournal | None:
    """The unfinished move into `target`, if there is one.  Raises DataRootUnusable for a journal that is damaged."""
    try:
        return msgspec.json.decode((target / MOVE_JOURNAL_NAME).read_bytes(), type=MoveJournal)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise DataRootUnusable(
            f"{target / MOVE_JOURNAL_NAME} cannot be read ({error}); remove the directory {target} if the data root "
            "is still where it was, else that file alone."
        ) from error


def move_data_root(
    current: Path,
    target: Path,
    *,
    switch: Callable[[], object],
    on_progress: Callable[[str, int, int], None],
    keep: bool = False,
) -> MoveReport:
    """Move the data root `current` to `target`, or go on with an unfinished move into `target`.

    `switch` makes the target the data root for later commands; it may be called again after a kill.
    `on_progress` gets a stage ("copying" or "verifying"), bytes done and bytes in all.  With `keep` the
    old copy stays.  Raises DataRootUnusable, NotEnoughSpace or ModelBusy.
    """
    journal = pending_move(target)
    if journal is None:
        _require_fresh(current, target)
        journal = MoveJournal(str(current), is_kept=keep)
    elif keep:
        journal = msgspec.structs.replace(journal, is_kept=True)
    source = DataRoot(Path(journal.source))
    if current not in (source.root, target):
        raise DataRootUnusable(
            f"{target} holds the unfinished copy of {source.root}, but the data root is {current}; go on with that "
            f"move after `quire disk use {source.root}`, or remove {target}."
        )
    is_switched = journal.is_switched or current == target
    try:
        return _move(source, DataRoot(target), journal, is_switched, switch, on_progress)
    except OSError as error:
        raise _move_error(error, target) from error


def _move(
    source: DataRoot,
    target: DataRoot,
    journal: MoveJournal,
    is_switched: bool,
    switch: Callable[[], object],
    on_progress: Callable[[str, int, int], None],
) -> MoveReport:
    copier = Copier(source.root, target.root, on_progress, may_link=not journal.is_kept)
    if not is_switched:
        with suppress(OSError):
            # A source that is full or read-only can be moved all the same.
            ensure_marker(source.root)
    with root_lock(source.root, fcntl.LOCK_EX) as is_held:
        if not is_held:
            raise ModelBusy(
                f"A daemon or another move uses {source.root}; stop it with `quire shutdown`, then try again."
            )
        target.root.mkdir(exist_ok=True)
        _write_journal(target.root, journal)
        if not is_switched:
            _copy_or_leave_nothing(source, target, copier)
            _remember(target.root, ensure_marker(target.root))
            _sync_directories(target)
            switch()
        _write_journal(target.root, msgspec.structs.replace(journal, is_switched=True))
        if not journal.is_kept:
            _remove(source, target)
    (target.root / MOVE_JOURNAL_NAME).unlink()
    is_left = not journal.is_kept and source.root.is_dir()
    left_behind = tuple(sorted(path.name for path in source.root.iterdir())) if is_left else ()
    return MoveReport(source.root, journal.is_kept, copier.copied_bytes, tuple(copier.damaged), left_behind)


def _require_fresh(source: Path, target: Path) -> None:
    """Refuse a target that is no place for a new data root."""
    inner, outer = target.resolve(), source.resolve()
    if inner == outer:
        raise DataRootUnusable(f"{target} is the data root already; name another directory.")
    if inner.is_relative_to(outer) or outer.is_relative_to(inner):
        raise DataRootUnusable(
            f"{target} and the data root {source} contain one another; name a directory apart from it."
        )
    if not source.is_dir():
        raise DataRootUnusable(f"There is no data root at {source} yet; `quire disk use {target}` begins one there.")
    if read_marker(target) is not None:
        raise DataRootUnusable(
            f"{target} is a data root already; `quire disk use {target}` switches to it, or name another directory."
        )
    # The beginning of a journal is all that a move which was killed at once has left.
    if target.is_dir() and any(not path.name.startswith(MOVE_JOURNAL_NAME) for path in target.iterdir()):
        raise DataRootUnusable(f"{target} is not empty; name a new directory, such as {target / 'quire'}.")
    if not target.parent.is_dir():
        raise DataRootUnusable(f"There is no directory {target.parent}; mount its disk or create it, then try again.")


def _copy_or_leave_nothing(source: DataRoot, target: DataRoot, copier: Copier) -> None:
    """Copy; a target that turns out unfit before the first byte is left as it was found."""
    try:
        _copy(source, target, copier)
    except (NotEnoughSpace, DataRootUnusable):
        if [path.name for path in target.root.iterdir()] == [MOVE_JOURNAL_NAME]:
            (target.root / MOVE_JOURNAL_NAME).unlink()
            with suppress(OSError):
                target.root.rmdir()
        raise


def _copy(source: DataRoot, target: DataRoot, copier: Copier) -> None:
    """Make the target's folders equal to the source's; again while something changed meanwhile."""
    if read_marker(target.root) is None:
        _remove_extras(source, target)
    for _ in range(_MAX_PASSES):
        paths = [path for path in _tree(source) if not copier.has(path)]
        files = [path for path in paths if path.is_file() and not path.is_symlink()]
        _require_space(files, copier)
        if any(path.is_symlink() for path in paths):
            _require_links(target.root)
        copier.expect(sum(_size(path) for path in files))
        for path in paths:
            with suppress(FileNotFoundError):
                copier.copy(path)
        if not files:
            return


def _tree(root: DataRoot) -> Iterator[Path]:
    """Every directory, file and link that moves, parents first."""
    for top in (*root.folders, root.external_list):
        if not top.is_symlink() and not top.exists():
            continue
        yield top
        if top.is_symlink():
            continue
        for place, directories, files in os.walk(top):
            for name in sorted(directories) + sorted(files):
                yield Path(place, name)


def _remove_extras(source: DataRoot, target: DataRoot) -> None:
    """Remove what an earlier attempt copied and the source has no more."""
    for path in reversed(list(_tree(target))):
        original = source.root / path.relative_to(target.root)
        if not (original.exists() or original.is_symlink() or unfinished(path, original)):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


def _require_space(files: list[Path], copier: Copier) -> None:
    needed_bytes = copier.needed_bytes(files)
    free_bytes = shutil.disk_usage(copier.target).free
    if needed_bytes and needed_bytes + SPACE_RESERVE_BYTES > free_bytes:
        raise NotEnoughSpace(
            f"The move needs {format_bytes(needed_bytes)} but {copier.target} has {format_bytes(free_bytes)} free; "
            "choose a larger disk (`quire disk list`) or remove models with `quire rm`.",
            needed_bytes=needed_bytes,
            free_bytes=free_bytes,
        )


def _require_links(target: Path) -> None:
    probe = target / f"{MOVE_JOURNAL_NAME}.link"
    try:
        probe.unlink(missing_ok=True)
        probe.symlink_to(MOVE_JOURNAL_NAME)
        probe.unlink()
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        raise DataRootUnusable(
            f"The file system of {target} takes no symbolic links ({error.strerror}), and models are kept with them; "
            "choose another disk (`quire disk list`)."
        ) from error


def _sync_directories(root: DataRoot) -> None:
    """Make names last through a power cut; the files themselves were synced when they were copied."""
    for path in (root.root, *(path for path in _tree(root) if path.is_dir() and not path.is_symlink())):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _remove(source: DataRoot, target: DataRoot) -> None:
    """Remove the old copy; whoever still names it is told where it went."""
    _remember(source.root, read_marker(target.root) or "", moved_to=str(target.root))
    source.marker.unlink(missing_ok=True)
    for beginning in source.root.glob(f"{source.marker.name}.*.new"):
        beginning.unlink(missing_ok=True)
    for top in (*source.folders, source.external_list):
        if top.is_dir() and not top.is_symlink():
            shutil.rmtree(top)
        else:
            top.unlink(missing_ok=True)
    # A mount point, or a folder with other files in it, stays.
    with suppress(OSError):
        source.root.rmdir()


def _remember(root: Path, root_id: str, moved_to: str | None = None) -> None:
    # Without a place to remember it only the message of a missing disk is lost.
    with suppress(OSError, UnicodeEncodeError, DataRootUnusable):
        remember_root(user_paths().state_dir, KnownRoot(str(root), root_id, str(mount_of(root)), moved_to))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _write_journal(target: Path, journal: MoveJournal) -> None:
    temporary = target / f"{MOVE_JOURNAL_NAME}.new"
    with temporary.open("wb") as file:
        file.write(msgspec.json.encode(journal))
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(target / MOVE_JOURNAL_NAME)


def _move_error(error: OSError, target: Path) -> NotEnoughSpace | DataRootUnusable:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return NotEnoughSpace(
            f"The disk of {target} is full; free some space there and run `quire disk move {target}` again, it goes on "
            "where it stopped."
        )
    reason = (error.strerror or type(error).__name__).lower()
    return DataRootUnusable(
        f"The move stopped at {error.filename or target} ({reason}); mend that and run `quire disk move {target}` "
        "again, it goes on where it stopped."
    )
