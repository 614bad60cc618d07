"""Progress of downloads and of loading, as fits where it goes.

A terminal gets bars with rate and time left for downloads (`app.cli.bars`), one overwritten line
for loading (`LineView`: importing rich would take longer than many a load); anything else gets
a line now and then (`PlainView`, `StageView`); `--json` gets every event on stdout (`JsonView`).
`Tally` measures a download for the sentence after it.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Protocol

from app.cli.output import display_width, format_duration, notice, write_json_line
from app.transfer_rate import RateMeter
from store.space import format_bytes

if TYPE_CHECKING:
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
    if not sys.stderr.isatty():
        return PlainView()
    from app.cli.bars import BarView

    return BarView()


def load_view() -> ProgressView:
    """The view of loading a model into memory."""
    return LineView() if sys.stderr.isatty() else StageView()


class Tally:
    """How many bytes came while somebody looked on, and in what time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._first: tuple[float, int] | None = None
        self._last = (0.0, 0)

    async def of(self, events: AsyncGenerator[ProgressLine, None]) -> AsyncGenerator[ProgressLine, None]:
        """The same events, counted."""
        async with aclosing(events):
            async for line in events:
                if line.all_total:
                    self._last = (self._clock(), line.all_completed)
                    self._first = self._first or self._last
                yield line

    def summary(self) -> str:
        """` (94 MB in 12 s, 7.8 MB/s)`; empty if nothing came."""
        if self._first is None or self._last[1] <= self._first[1]:
            return ""
        elapsed_s, num_bytes = self._last[0] - self._first[0], self._last[1] - self._first[1]
        rate = f", {format_bytes(round(num_bytes / elapsed_s))}/s" if elapsed_s >= 0.1 else ""
        return f" ({format_bytes(num_bytes)} in {format_duration(elapsed_s)}{rate})"


class JsonView:
    """One JSON object a line on stdout."""

    def show(self, line: ProgressLine) -> None:
        write_json_line(line)

    def close(self) -> None:
        pass


class Whole:
    """Tells where one operation ends and the next begins: several models may be fetched one after another."""

    def __init__(self) -> None:
        self._total = 0
        self._completed = 0

    def is_another(self, line: ProgressLine) -> bool:
        """Whether this line belongs to another operation than the one before it."""
        was_complete = self._completed == self._total != line.all_total
        is_another = line.all_completed < self._completed or (was_complete and self._total > 0)
        self._total, self._completed = line.all_total, line.all_completed
        return is_another


class PlainView:
    """A line for each new stage, and for each tenth of the whole; of each file where the whole is not known."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._status = ""
        self._whole = Whole()
        self._begin()

    def show(self, line: ProgressLine) -> None:
        if not line.total:
            if line.status != self._status:
                self._status = line.status
                notice(line.status)
        elif line.all_total:
            self._show_whole(line)
        elif self._is_next_step(f"{line.status} {line.file}", _percent(line.completed, line.total)):
            notice(_describe(line))

    def close(self) -> None:
        pass

    def _begin(self) -> None:
        self._stage: str | None = None
        self._steps: dict[str | None, int] = {}
        self._rate = RateMeter(clock=self._clock)

    def _show_whole(self, line: ProgressLine) -> None:
        if self._whole.is_another(line):
            self._begin()
        # Files are verified while others still arrive.
        if self._stage is None or line.status != "verifying":
            self._stage = line.status
        self._rate.add(line.all_completed)
        percent = _percent(line.all_completed, line.all_total)
        if percent >= _PLAIN_STEP_PERCENT and self._is_next_step(None, percent):
            left_s = self._rate.seconds_left(line.all_total - line.all_completed)
            text = f"{self._stage}: {_sizes(line.all_completed, line.all_total)}"
            if left_s is not None and line.all_completed < line.all_total:
                text += f", {format_bytes(self._rate.bytes_per_s)}/s, {format_duration(left_s)} left"
            notice(text)

    def _is_next_step(self, what: str | None, percent: int) -> bool:
        step = percent - percent % _PLAIN_STEP_PERCENT
        is_next = step > self._steps.get(what, -1)
        self._steps[what] = max(step, self._steps.get(what, -1))
        return is_next


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
    """One line that is overwritten, and gone in the end; sentences that fill more of a terminal than that stay."""

    def __init__(self) -> None:
        self._shown = ""

    def show(self, line: ProgressLine) -> None:
        text = _describe(line)
        if display_width(text) < shutil.get_terminal_size().columns:
            sys.stderr.write(f"{_CLEAR_LINE}{text}")
        elif text != self._shown:
            sys.stderr.write(f"{_CLEAR_LINE}{text}\n")
        self._shown = text
        sys.stderr.flush()

    def close(self) -> None:
        sys.stderr.write(_CLEAR_LINE)
        sys.stderr.flush()


def _percent(completed: int, total: int) -> int:
    return 100 * completed // total if total else 0


def _sizes(completed: int, total: int) -> str:
    return f"{format_bytes(completed)} of {format_bytes(total)} ({_percent(completed, total)} %)"


def _describe(line: ProgressLine) -> str:
    """`downloading model.gguf: 45 MB of 94 MB (48 %)` or `loading weights: 45 %`."""
    if not line.total:
        return line.status
    if line.file is None:
        return f"{line.status}: {_percent(line.completed, line.total)} %"
    return f"{line.status} {line.file}: {_sizes(line.completed, line.total)}"
