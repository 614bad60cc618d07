"""`quire disk move`: everything large to another disk, with progress."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from app.cli.disk import YesOption, data_root_at, stop_daemon_with_leave, warn_of_override
from app.cli.failure import INTERRUPTED_EXIT_CODE
from app.cli.output import notice
from store.space import format_bytes

if TYPE_CHECKING:
    from store.disk.relocate import MoveReport

_SHOWN_EVERY_S = 0.2
_PLAIN_STEP_PERCENT = 10


def move(
    path: Annotated[Path, typer.Argument(help="The new data root: a new directory, or the mount point of a disk.")],
    keep: Annotated[bool, typer.Option("--keep", help="Leave the old copy where it is.")] = False,
    yes: YesOption = False,
) -> None:
    """Move models, kernels and logs to another disk.

    Copies, verifies, switches, and removes the old copy last.  When interrupted, the same command goes on.
    """
    from app.config_file import remember_setting
    from app.settings import load_settings
    from store.disk.relocate import move_data_root, pending_move
    from store.paths import DataRoot

    settings = load_settings()
    target = data_root_at(path)
    pending = pending_move(target)
    if pending is None:
        DataRoot.look(settings.data_root)
    if pending is None or not pending.is_switched:
        stop_daemon_with_leave(settings, f"it uses {settings.data_root}", yes=yes)
    if pending is not None:
        notice(f"Going on with the move of {pending.source}.")
    view = _MoveView()
    try:
        report = move_data_root(
            settings.data_root,
            target,
            switch=lambda: remember_setting("data_root", str(target)),
            on_progress=view.show,
            keep=keep,
        )
    except KeyboardInterrupt:
        view.close()
        notice(f"Paused; `quire disk move {target}{' --keep' if keep else ''}` goes on from here.")
        raise typer.Exit(INTERRUPTED_EXIT_CODE) from None
    finally:
        view.close()
    _tell(report, target)
    warn_of_override(settings, target)


def _tell(report: MoveReport, target: Path) -> None:
    copied = f" ({format_bytes(report.copied_bytes)} copied and verified)" if report.copied_bytes else ""
    old = f"the old copy stays in {report.source}" if report.is_kept else f"the old copy in {report.source} is gone"
    notice(f"The data root is {target} now{copied}; {old}.")
    for blob in report.damaged:
        notice(f"{blob} was damaged before the move and is now as damaged as it was; `quire verify` names its model.")
    if report.left_behind:
        notice(f"Left in {report.source}, since it is not part of the data root: {', '.join(report.left_behind)}.")


class _MoveView:
    """One line that is overwritten in a terminal; a line for each tenth elsewhere."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._done = {"copying": 0, "verifying": 0}
        self._started_s = time.monotonic()
        self._shown_s = 0.0
        self._shown_percent = -1

    def show(self, stage: str, done_bytes: int, total_bytes: int) -> None:
        self._done[stage] = done_bytes
        both = sum(self._done.values())
        percent = 50 * both // total_bytes if total_bytes else 100
        if self._is_terminal:
            now_s = time.monotonic()
            if now_s - self._shown_s >= _SHOWN_EVERY_S or percent == 100:
                self._shown_s = now_s
                left_s = (now_s - self._started_s) * (2 * total_bytes - both) / both if both else 0.0
                sys.stderr.write(f"\r\x1b[2K{self._sentence(total_bytes, percent)}, {_duration(left_s)} left")
                sys.stderr.flush()
        elif (step := percent - percent % _PLAIN_STEP_PERCENT) != self._shown_percent:
            self._shown_percent = step
            notice(self._sentence(total_bytes, percent))

    def close(self) -> None:
        if self._is_terminal and self._shown_s:
            self._shown_s = 0.0
            sys.stderr.write("\r\x1b[2K")
            sys.stderr.flush()

    def _sentence(self, total_bytes: int, percent: int) -> str:
        copied, verified = (format_bytes(self._done[stage]) for stage in ("copying", "verifying"))
        return f"moving: {copied} copied and {verified} verified of {format_bytes(total_bytes)} ({percent} %)"


def _duration(seconds: float) -> str:
    """75 → "1:15"."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02}"
