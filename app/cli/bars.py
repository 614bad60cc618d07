"""`BarView`: a bar for every file on its way and one for the whole, on a terminal.

Imports rich, which takes a tenth of a second, and so is imported only when there is something to draw.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Column, Table

if TYPE_CHECKING:
    from app.schema.admin import ProgressLine

_MAX_FILES = 8
"""Bars shown at once; those of complete files make room first."""
_SMALL_BYTES = 10**6
"""Complete files up to this size are not worth a line among others."""


class BarView:
    """A bar for each file: bytes, rate, time left; stages as lines above.  With several files, a total below."""

    def __init__(self) -> None:
        self._progress = _Bars(
            TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis")),
            BarColumn(bar_width=None),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(compact=True),
            console=Console(stderr=True),
            expand=True,
        )
        self._files: dict[str, TaskID] = {}
        self._whole = self._progress.add_task("total", total=None, visible=False)
        self._has_whole = False
        self._status = ""
        self._progress.start()

    def show(self, line: ProgressLine) -> None:
        if line.file is None or line.total == 0:
            if line.status != self._status:
                self._status = line.status
                self._progress.console.print(line.status, markup=False, highlight=False)
            return
        if line.all_total:
            self._show_whole(line)
        task = self._files.get(line.file)
        if task is None:
            # Made with its count: bytes that are here already say nothing about the rate.
            task = self._progress.add_task(line.file, total=line.total, completed=line.completed)
            self._files[line.file] = task
            self._make_room()
        is_aside = line.completed == line.total <= _SMALL_BYTES and line.all_total > line.total
        self._progress.update(task, total=line.total, completed=line.completed, visible=False if is_aside else None)

    def close(self) -> None:
        self._progress.stop()

    def _show_whole(self, line: ProgressLine) -> None:
        if not self._has_whole:
            self._has_whole = True
            self._progress.reset(self._whole, total=line.all_total, completed=line.all_completed, visible=False)
        is_visible = line.all_total > line.total
        self._progress.update(
            self._whole, total=line.all_total, completed=line.all_completed, visible=is_visible or None
        )

    def _make_room(self) -> None:
        shown = [task for task in self._progress.tasks if task.visible and task.id != self._whole]
        complete = [task for task in shown if task.finished]
        for task in complete[: max(0, len(shown) - _MAX_FILES)]:
            self._progress.update(task.id, visible=False)


class _Bars(Progress):
    """The first task, which is the whole, stands last."""

    def make_tasks_table(self, tasks: Iterable[Task]) -> Table:
        return super().make_tasks_table(sorted(tasks, key=lambda task: task.id == 0))
