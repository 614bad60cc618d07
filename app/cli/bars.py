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

from app.cli.progress import Whole

if TYPE_CHECKING:
    from app.schema.admin import ProgressLine

_MAX_FILES = 8
"""Bars shown at once; those of complete files make room first."""
_LEAST_NAME_COLUMNS = 12
_SMALL_BYTES = 10**6
"""Complete files up to this size are not worth a line among others."""


class BarView:
    """A bar for each file: bytes, rate, time left; stages as lines above.  With several files, a total below."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        # In a narrow terminal names give way, figures do not.
        name = Column(no_wrap=True, overflow="ellipsis", max_width=max(_LEAST_NAME_COLUMNS, console.width // 3))
        self._progress = _Bars(
            TextColumn("{task.description}", markup=False, table_column=name),
            BarColumn(bar_width=None),
            DownloadColumn(table_column=Column(no_wrap=True)),
            TransferSpeedColumn(table_column=Column(no_wrap=True)),
            TimeRemainingColumn(compact=True, table_column=Column(no_wrap=True)),
            console=console,
            expand=True,
        )
        self._files: dict[str, TaskID] = {}
        self._total = self._progress.add_task("total", total=None, visible=False)
        self._has_total = False
        self._whole = Whole()
        self._status = ""
        self._progress.start()

    def show(self, line: ProgressLine) -> None:
        if line.file is None or line.total == 0:
            if line.status != self._status:
                self._status = line.status
                self._progress.console.print(line.status, markup=False, highlight=False)
            return
        if line.all_total:
            self._show_total(line)
        task = self._files.get(line.file)
        if task is None:
            task = self._progress.add_task(line.file, total=line.total, completed=line.completed)
            self._files[line.file] = task
            self._make_room()
        is_aside = line.completed == line.total <= _SMALL_BYTES and line.all_total > line.total
        self._progress.update(task, total=line.total, completed=line.completed, visible=False if is_aside else None)

    def close(self) -> None:
        self._progress.stop()

    def _show_total(self, line: ProgressLine) -> None:
        if self._whole.is_another(line):
            for task in self._files.values():
                self._progress.remove_task(task)
            self._files.clear()
            self._has_total = False
        if not self._has_total:
            self._has_total = True
            # Not an update: bytes that are here already say nothing about the rate.
            self._progress.reset(self._total, total=line.all_total, completed=line.all_completed, visible=False)
        is_one_of_several = line.all_total > line.total
        self._progress.update(
            self._total,
            total=line.all_total,
            completed=line.all_completed,
            visible=True if is_one_of_several else None,
        )

    def _make_room(self) -> None:
        shown = [task for task in self._progress.tasks if task.visible and task.id != self._total]
        complete = [task for task in shown if task.finished]
        for task in complete[: max(0, len(shown) - _MAX_FILES)]:
            self._progress.update(task.id, visible=False)


class _Bars(Progress):
    """The first task, which is the whole, stands last."""

    def make_tasks_table(self, tasks: Iterable[Task]) -> Table:
        return super().make_tasks_table(sorted(tasks, key=lambda task: task.id == 0))
