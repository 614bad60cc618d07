"""Long work of the store in this process: its progress on stderr, and Ctrl-C as an orderly end.

Shared by the commands that need no daemon.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from app.cli.failure import INTERRUPTED_EXIT_CODE
from app.cli.output import notice
from app.cli.progress import pull_view

if TYPE_CHECKING:
    from store.progress import CancelCheck, ProgressCallback, Reporter


@contextmanager
def shown_progress(*, json_output: bool) -> Iterator[Reporter]:
    """A reporter whose reports are shown; nothing is shown beside JSON."""
    from store.progress import Reporter

    with shown_callbacks(json_output=json_output) as (on_progress, is_cancelled):
        yield Reporter(on_progress, is_cancelled)


@contextmanager
def shown_callbacks(*, json_output: bool) -> Iterator[tuple[ProgressCallback, CancelCheck]]:
    """What `Reporter` is made of.  After the first Ctrl-C the work is told to stop, a second one ends it at once."""
    from app.translate.admin import pull_line
    from store.errors import Cancelled
    from store.progress import PullProgress

    cancelled = threading.Event()
    view = None if json_output else pull_view(json_output=False)

    def show(progress: PullProgress) -> None:
        if view is not None:
            view.show(pull_line(progress))

    def cancel(*_: object) -> None:
        cancelled.set()
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, cancel)
    try:
        try:
            yield show, cancelled.is_set
        finally:
            signal.signal(signal.SIGINT, before)
            if view is not None:
                view.close()
    except (Cancelled, KeyboardInterrupt):
        notice("Stopped; give the same command to begin again.")
        raise typer.Exit(INTERRUPTED_EXIT_CODE) from None
