"""Progress of downloads and of loading, as fits where it goes.

A terminal gets a bar with rate and time left for downloads (`BarView`), one overwritten line
for loading (`LineView`: importing rich would take longer than many a load); anything else gets
a line now and then (`PlainView`, `StageView`); `--json` gets every event on stdout (`JsonView`).
"""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Protocol

from app.cli.output import format_bytes, notice, write_json_line

if TYPE_CHECKING:
    from rich.progress import TaskID

    from app.schema.admin import ProgressLine

_PLAIN_STEP_PERCENT = 10
_CLEAR_LINE = "\r\x1b[2K"


class ProgressView(Protocol):
    """Somewhere that progress is shown."""

    def show(self, line: ProgressLine) -> None: ...

    def close(self) -> None: ...


async def follow(events: AsyncGenerator[ProgressLine, None], view: ProgressView) -> None:
    """Show every event until the last; the view is closed whatever happens."""
    try:
        async with aclosing(events):
            async for line in events:
                view.show(line)
    finally:
        view.close()


def pull_view(*, json_output: bool) -> ProgressView:
    """The view of a download."""
    if json_output:
        return JsonView()
    return BarView() if sys.stderr.isatty() else PlainView()


def load_view() -> ProgressView:
    """The view of loading a model into memory."""
    return LineView() if sys.stderr.isatty() else StageView()


class JsonView:
    """One JSON object a line on stdout."""

    def show(self, line: ProgressLine) -> None:
        write_json_line(line)

    def close(self) -> None:
        pass


class PlainView:
    """A line for each new stage or file, and for each tenth of it."""

    def __init__(self) -> None:
        self._shown: tuple[str, str | None, int] | None = None

    def show(self, line: ProgressLine) -> None:
        percent = _percent(line)
        step = (line.status, line.file, percent - percent % _PLAIN_STEP_PERCENT)
        if step != self._shown:
            self._shown = step
            notice(_describe(line))

    def close(self) -> None:
        pass


class StageView:
    """A line for each new stage, without counts."""

    def __init__(self) -> None:
        self._shown = ""

    def show(self, line: ProgressLine) -> None:
        if line.status != self._shown:
            self._shown = line.status
            notice(line.status)

    def close(self) -> None:
        pass


class LineView:
    """One line that is overwritten, and gone in the end."""

    def show(self, line: ProgressLine) -> None:
        sys.stderr.write(f"{_CLEAR_LINE}{_describe(line)}")
        sys.stderr.flush()

    def close(self) -> None:
        sys.stderr.write(_CLEAR_LINE)
        sys.stderr.flush()


class BarView:
    """A bar for each file: bytes, rate, time left."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
        from rich.progress import TransferSpeedColumn as RateColumn

        console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            DownloadColumn(),
            RateColumn(),
            TimeRemainingColumn(compact=True),
            console=console,
            expand=True,
        )
        self._tasks: dict[str, TaskID] = {}
        self._status = ""
        self._progress.start()

    def show(self, line: ProgressLine) -> None:
        if line.file is None or line.total == 0:
            if line.status != self._status:
                self._status = line.status
                self._progress.console.print(line.status, markup=False, highlight=False)
            return
        if line.file not in self._tasks:
            self._tasks[line.file] = self._progress.add_task(line.file, total=line.total, completed=line.completed)
        self._progress.update(self._tasks[line.file], total=line.total, completed=line.completed)

    def close(self) -> None:
        self._progress.stop()


def _percent(line: ProgressLine) -> int:
    return 100 * line.completed // line.total if line.total else 0


def _describe(line: ProgressLine) -> str:
    """`downloading model.gguf: 45 MB of 94 MB (48 %)` or `loading weights: 45 %`."""
    if not line.total:
        return line.status
    if line.file is None:
        return f"{line.status}: {_percent(line)} %"
    sizes = f"{format_bytes(line.completed)} of {format_bytes(line.total)}"
    return f"{line.status} {line.file}: {sizes} ({_percent(line)} %)"
